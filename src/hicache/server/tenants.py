"""A request belongs to exactly one tenant, whose key it carries; keys are known by their hashes, and never shown."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import Scope

from hicache.errors import ConfigError
from hicache.server.keys import bearer, no_key

SHORTEST_KEY = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(rf"[!-~]{{{SHORTEST_KEY},1024}}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. `identity` sets cached pages apart and is stable over restarts; `label` is for people and metrics."""

    identity: str
    label: str


ANYONE: Final = Tenant("", "anyone")
"""Whoever reaches a server without keys."""

UNNAMED: Final = "unnamed"
"""The label of keys without a name; each is a tenant of its own all the same."""


MOST_LABELS: Final = 100
OTHERS: Final = "others"
"""The label of the tenants beyond the first MOST_LABELS."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A key, as its hash (SHA-256, 32 bytes), and whose it is."""

    digest: bytes
    tenant: Tenant


class Keyring:
    """All keys of a server; without any, requests belong to anyone. Raises ConfigError for one key of two tenants.

    The first MOST_LABELS tenants have labels of their own, the rest share one.
    """

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._grants = tuple(_with_few_labels(tuple(grants)))
        owners: dict[bytes, Tenant] = {}
        for grant in self._grants:
            if owners.setdefault(grant.digest, grant.tenant) != grant.tenant:
                names = f"{owners[grant.digest].label} and {grant.tenant.label}"
                raise ConfigError(f"the tenants {names} have the same key; give each its own")

    def __bool__(self) -> bool:
        return bool(self._grants)

    @property
    def labels(self) -> tuple[str, ...]:
        """What the tenants are called, each once."""
        return tuple(dict.fromkeys(grant.tenant.label for grant in self._grants))

    def opens(self, scope: Scope) -> bool:
        """Whether a request carries one of the keys."""
        return self._owner(bearer(scope)) is not None

    def tenant(self, scope: Scope) -> Tenant:
        """Whose request it is. Raises ApiError, 401, where a key is needed and it has none of them."""
        if not self._grants:
            return ANYONE
        owner = self._owner(bearer(scope))
        if owner is None:
            raise no_key(scope["path"])
        return owner

    def knows(self, secret: str) -> bool:
        """Whether a secret is one of the keys."""
        return self._owner(secret.encode()) is not None

    def _owner(self, secret: bytes | None) -> Tenant | None:
        """Looks at every key, in the same way, whichever it is."""
        given = hashlib.sha256(b"" if secret is None else secret).digest()
        owner = None
        for grant in self._grants:
            if hmac.compare_digest(given, grant.digest):
                owner = grant.tenant
        return owner


def _with_few_labels(grants: Sequence[Grant]) -> Iterator[Grant]:
    own = list(dict.fromkeys(one.tenant.label for one in grants))[:MOST_LABELS]
    for one in grants:
        label = one.tenant.label if one.tenant.label in own else OTHERS
        yield replace(one, tenant=replace(one.tenant, label=label))


def grant(text: str, where: str) -> Grant:
    """A key written as `TENANT:KEY`, or `KEY` alone. Raises ConfigError, which shows nothing of it."""
    name, colon, secret = text.rpartition(":")
    return grant_to(require_name(name, where) if colon else "", secret, where)


def require_name(name: str, where: str) -> str:
    """The name of a tenant. Raises ConfigError, which does not show it: it may be half of a key."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores")
    return name


def grant_to(name: str, secret: str, where: str) -> Grant:
    """The key `secret` of the tenant `name`; "": of a tenant that is known by this key alone."""
    if not _KEY.fullmatch(secret) or ":" in secret or "," in secret:
        raise ConfigError(
            f"{where}: a key has {SHORTEST_KEY} to 1024 visible ASCII characters, without colons and commas"
        )
    digest = hashlib.sha256(secret.encode()).digest()
    return Grant(digest, Tenant(name, name) if name else Tenant(_identity(secret), UNNAMED))


def _identity(secret: str) -> str:
    """What stands for a key without a name. Stores may show it: finding the key from it takes long for each guess.

    It has a colon, so it is nobody's name.
    """
    return "key:" + hashlib.scrypt(secret.encode(), salt=b"hicache tenant", n=1 << 14, r=8, p=1, dklen=16).hex()


def from_lines(text: str, where: str) -> Iterator[Grant]:
    """A key per line, `TENANT:KEY`; empty lines and those that begin with # are left out."""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield grant(stripped, f"{where}, line {number}")
