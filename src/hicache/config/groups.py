"""Every setting stands here once, with its default, bounds and help; a group that exists does not contradict itself."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hicache.config.explain import one_line, redact
from hicache.config.sizes import Size, format_size
from hicache.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_URL_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
_URL_CAP = re.compile(r"[?&]cap=")


def _user_cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "hicache"


def _listed(value: object) -> object:
    """A text is a list with commas between its parts."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class Group(BaseModel):
    """Frozen settings that are checked as a whole: a ConfigError of one line says what to change."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError(one_line(error, cls.model_fields, info.context or {})) from None

    def replace(self, **changes: Any) -> Self:
        """These settings with some others, checked again."""
        return type(self)(**{**dict(self), **changes})

    def describe(self) -> str:
        """The effective settings as TOML, secrets hidden."""
        return "\n".join(_toml_lines(self.model_dump(mode="json")))


class CacheConfig(Group):
    """What a cache may use and how it behaves. Sizes are given as `2GiB`, `512MiB` or bytes, and held in bytes."""

    device_size: Size = Field(1 << 30, gt=0, description="Device memory (L1) for all pools together.")
    host_size: Size = Field(
        2 << 30, gt=0, description="Host memory (L2) for all pools together, on all ranks of a machine."
    )
    host_arena: Literal["plain", "huge", "shared"] = Field(
        "plain",
        description="Host memory from ordinary pages (plain), huge pages (huge), or shared with others (shared).",
    )
    page_size: int = Field(16, gt=0, le=1024, description="Tokens per page: what is hashed, stored and evicted as one.")
    window_ratio: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Pages of a sliding-window pool per page of a full-attention pool, in models that have both.",
    )
    checkpoint_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="The share of device_size and of host_size for snapshots, where a model keeps recurrent state"
        " beside pages.",
    )
    storage_url: str | None = Field(
        None, repr=False, description="Where pages are stored (L3), such as file:./store. Not set: nothing is stored."
    )
    storage_size: Size | None = Field(None, gt=0, description="The most bytes the store may hold. Not set: no limit.")
    storage_failures: int = Field(5, gt=0, description="Failed calls in a row after which a store is left alone.")
    storage_slow_s: Seconds = Field(5.0, description="A call that takes longer, in seconds, has the same effect.")
    storage_pause_s: Seconds = Field(10.0, description="For how long, in seconds; then one call tries it again.")
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        "write_through",
        description="When pages are copied to host memory: when computed (write_through), when used again"
        " (write_through_selective), or when evicted (write_back).",
    )
    write_through_hits: int = Field(
        2,
        gt=0,
        description="How many requests use a page before write_through_selective copies it; others are dropped.",
    )
    write_back_watermark: float = Field(
        0.7,
        ge=0,
        le=1,
        description="The share of a device pool that write_back leaves without host copies; the rest it copies early.",
    )
    eviction_policy: Literal["lru", "fifo", "lfu", "slru", "s3-fifo", "priority", "cost-aware"] = Field(
        "lru",
        description="Which pages go first when a tier is full: lru, fifo, lfu, slru, s3-fifo, priority or cost-aware.",
    )
    fetch_workers: int = Field(2, gt=0, le=64, description="Threads that read from the store; copies have theirs.")
    transfer_timeout_s: Seconds = Field(30.0, description="A copy that takes longer is given up, in seconds.")
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout", "cost-aware"] = Field(
        "timeout",
        description="How long a request waits for its stored pages: not once it could run (best_effort), until all are"
        " there (wait_complete), for a time (timeout), or for less where computing is quicker (cost-aware).",
    )
    prefetch_timeout_s: Seconds = Field(10.0, description="How long a request waits for its stored pages, in seconds.")
    prefetch_page_timeout_s: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="How much longer for each page of its prompt, in seconds."
    )
    prefetch_limit_s: Seconds = Field(
        60.0, description="The longest that any request waits for its stored pages, in seconds."
    )
    prefetch_batch_pages: int = Field(32, gt=0, description="Pages that are fetched from the store in one call.")

    @field_validator("storage_url")
    @classmethod
    def _has_scheme(cls, url: str | None) -> str | None:
        if url is not None and not _URL_SCHEME.match(url):
            raise ValueError("say which kind of store it is, as in file:./store")
        return url

    @model_validator(mode="after")
    def _storage_size_needs_a_store(self, info: ValidationInfo) -> Self:
        if self.storage_size is None:
            return self
        said = f"{_label('storage_size', info)}={format_size(self.storage_size)}"
        if self.storage_url is None:
            raise ConfigError(
                f"{said}: there is no store to limit; set storage_url, as in file:./store, or leave it out"
            )
        if _URL_CAP.search(self.storage_url):
            raise ConfigError(f"{said}: storage_url has a cap too; give the limit once, here or there")
        return self


class ServeConfig(Group):
    """What `hicache serve` and `hicache demo` run, and where they listen."""

    model: str = Field(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        min_length=1,
        description="A folder or a hub id of a transformers checkpoint.",
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="The address to listen on; the default is this machine only."
    )
    port: int = Field(8000, ge=0, le=65535, description="The port to listen on; 0 takes any free one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What the model computes and caches in: float32 or bfloat16."
    )
    max_running: int = Field(
        16,
        gt=0,
        le=1024,
        description="Requests that are computed at the same time. Each holds a state where a model has recurrent ones.",
    )
    max_waiting: int = Field(
        256, gt=0, le=65536, description="Requests that may wait for their turn; one more is told to ask again later."
    )
    max_model_len: int | None = Field(
        None, gt=1, description="The most tokens of a prompt and its answer. Not set: what the model allows."
    )
    chunk_tokens: int = Field(512, gt=0, description="The most prompt tokens that one step computes.")
    snapshot_interval: int = Field(
        1024,
        ge=0,
        description="Prompt tokens between snapshots of recurrent state, beside those where reuse is likely; 0: none.",
    )
    draft: str | None = Field(
        None,
        min_length=1,
        description="What guesses tokens ahead: a folder or hub id of a smaller model with the same tokenizer, mtp for"
        " the model's own MTP layers, or first-layers:N for its own first N layers, a demonstration. Not set: nothing.",
    )
    draft_tokens: int = Field(
        4, gt=0, le=32, description="The most tokens that are guessed at a time; with mtp, at most one per MTP layer."
    )
    preemption: Literal["retract", "recompute"] = Field(
        "retract",
        description="A request that gives way when memory runs out is kept on the host, or computed again.",
    )
    priority_ageing_s: Seconds = Field(
        30.0,
        description="A request that has waited this long goes before one that comes now with a priority one higher, in"
        " seconds.",
    )
    admin_key: SecretStr | None = Field(
        None,
        min_length=8,
        description="The key that opens the routes under /admin; other processes see flags, so prefer the variable."
        " Not set: there are none.",
    )
    api_key: Annotated[tuple[SecretStr, ...], BeforeValidator(_listed)] = Field(
        (),
        description="A key that clients need for /v1, as KEY or TENANT:KEY; several in one variable with commas between"
        " them. Other processes see flags, so prefer the variable or a file. Not set: whoever reaches it can use it.",
    )
    api_key_file: Path | None = Field(
        None, description="More keys: a line TENANT:KEY for each, or a .toml file that has quotas too."
    )
    threads: int | None = Field(None, gt=0, description="Threads that the model computes with. Not set: torch decides.")
    cache_folder: Path = Field(
        default_factory=_user_cache_folder,
        description="Where converted models and the demo's store are kept.",
    )

    @field_validator("cache_folder")
    @classmethod
    def _expand(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


class Settings(Group):
    """All settings of a process, one group per table of the TOML file."""

    cache: CacheConfig = Field(default_factory=CacheConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)

    @model_validator(mode="after")
    def _a_chunk_holds_a_page(self, info: ValidationInfo) -> Self:
        chunk_tokens, page_size = self.serve.chunk_tokens, self.cache.page_size
        if chunk_tokens < page_size:
            raise ConfigError(
                f"{_label('chunk_tokens', info)}={chunk_tokens}: at least page_size, which is {page_size}"
            )
        return self


def _label(field: str, info: ValidationInfo) -> str:
    labels: dict[str, str] = info.context or {}
    return labels.get(field, field)


def _toml_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if value is None:
            yield f"# {name} is not set"
        elif isinstance(value, dict):
            yield f"[{name}]"
            yield from _toml_lines(value)
        else:
            yield f"{name} = {json.dumps(redact(value) if isinstance(value, str) else value)}"
