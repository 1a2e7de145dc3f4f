"""The fields of a model's config as a family reads them: a value of the wrong kind is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fields:
    """A config with the defaults of its model type filled in; `layer` is set where one layer is asked about.

    `overrides` are the fields that differ at some layers. `dtype` is what the model runs in.
    """

    values: Mapping[str, Any]
    dtype: str
    overrides: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    layer: int | None = None

    def updated(self, changes: Mapping[str, Any]) -> "Fields":
        """The fields with `changes`."""
        return replace(self, values={**self.values, **changes})

    def overridden(self, overrides: Mapping[int, Mapping[str, Any]]) -> "Fields":
        """The fields with what differs at some layers."""
        return replace(self, overrides=overrides)

    def at(self, layer: int) -> "Fields":
        """The fields as layer `layer` has them."""
        return replace(self, values={**self.values, **self.overrides.get(layer, {})}, layer=layer)

    def get(self, name: str) -> Any:
        """The value, None where the config has none."""
        return self.values.get(name)

    @property
    def model_type(self) -> str:
        """The model's type in transformers."""
        return str(self.values.get("model_type", "(no model_type)"))

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.count("num_hidden_layers")

    def count(self, name: str) -> int:
        """A whole number above 0. Raises ConfigError where there is none."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refused(f"{name}={value!r}; it must be a whole number above 0")
        return value

    def count_or(self, name: str, otherwise: int) -> int:
        """A whole number above 0, or `otherwise` where the config says None."""
        return otherwise if self.get(name) is None else self.count(name)

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of names, or None. Raises ConfigError for anything else."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.refused(f"{name}={value!r}; it must be a list of names")
        return tuple(value)

    def divide(self, total: int, what: str, parts: int, by: str, instead: str) -> int:
        """`total` shared evenly by `parts`. Raises ConfigError, naming the fields, where that leaves a rest."""
        if total % parts:
            raise self.refused(f"{what}={total}, which {parts} {by} can't share evenly; {instead}")
        return total // parts

    def refused(self, why: str) -> ConfigError:
        """The error for this model: its type with `why`."""
        return ConfigError(f"model type {self.model_type!r} with {why}")
