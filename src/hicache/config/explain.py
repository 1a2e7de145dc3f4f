"""What is wrong with a setting is said in one line: name, value and what would be right; secrets are never shown."""

import difflib
import re
from collections.abc import Iterable, Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_USER = re.compile(r"(?<=//)[^/?#]*@")
_SECRET_OPTION = re.compile(r"([?&][^=&]*(?:auth|cred|key|pass|pwd|secret|sig|token)[^=&]*=)[^&]*", re.IGNORECASE)
_SECRET_FIELD = re.compile(r"(?:^|_)(?:key|password|secret|token)$")
_SHOWN_CHARACTERS = 200


def redact(text: str) -> str:
    """The text without what stands for a user or a secret in a URL."""
    return _SECRET_OPTION.sub(r"\1***", _USER.sub("***@", text))


def show(value: object) -> str:
    """A value as it may be printed: short, on one line, secrets hidden."""
    text = redact(str(value))
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + "..."
    return text if text.isprintable() else repr(text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(error: ValidationError, known: Iterable[str], labels: Mapping[str, str]) -> str:
    """The first thing that is wrong. `labels` says how the user wrote a field's name, where that is another."""
    detail = error.errors()[0]
    field = str(detail["loc"][0]) if detail["loc"] else error.title
    label = labels.get(field, field)
    if detail["type"] == "extra_forbidden":
        return f"{label}: there is no such setting{did_you_mean(field, known)}"
    shown = "***" if _SECRET_FIELD.search(field) else show(detail["input"])
    return f"{label}={shown}: {_what_is_right(detail)}"


def _what_is_right(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return detail["msg"].removeprefix("Input ")
