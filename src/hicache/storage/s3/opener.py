"""An S3 URL names a bucket and a prefix; credentials come from the environment, and are never printed."""

from datetime import timedelta
from typing import TYPE_CHECKING, cast

from obstore.exceptions import BaseError
from obstore.store import S3Store

from hicache.errors import ConfigError
from hicache.storage.registry import StoreLocation
from hicache.storage.remote import CALL_TIMEOUT_S, count_option, seconds_option
from hicache.storage.s3.backend import CONNECTIONS, S3Backend

if TYPE_CHECKING:
    from obstore.store import S3Config

_RETRIES = 2
_BACKOFF = timedelta(milliseconds=50)
_SETTINGS = ("endpoint", "region", "access_key_id", "secret_access_key", "session_token")


def open_s3(location: StoreLocation) -> S3Backend:
    """`s3://BUCKET/PREFIX?endpoint=https://HOST&region=...`; what is not given comes from `AWS_*` variables."""
    options = location.known_options(*_SETTINGS, "timeout", "connections")
    bucket, _, prefix = location.path.removeprefix("//").partition("/")
    if not bucket:
        raise ConfigError("an S3 URL names a bucket and, if you like, a prefix: write for instance s3://bucket/prefix")
    timeout_s = seconds_option(location, "timeout", CALL_TIMEOUT_S)
    connections = count_option(location, "connections", CONNECTIONS) or CONNECTIONS
    timeout = timedelta(seconds=timeout_s)
    settings = {name: options[name] for name in _SETTINGS if name in options}
    try:
        store = S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            config=cast("S3Config", settings),
            # Without TLS only where the endpoint says http: that may also come from the environment.
            client_options={"timeout": timeout, "connect_timeout": timeout, "allow_http": True},
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timeout,
                "backoff": {"init_backoff": _BACKOFF, "max_backoff": timeout, "base": 2},
            },
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"s3: the settings of bucket {bucket!r} are not understood; check {', '.join(options)}"
        ) from error
    return S3Backend(store, f"s3 store {bucket}", timeout_s=timeout_s, connections=connections)
