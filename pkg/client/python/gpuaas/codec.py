"""Dataclasses of the contract as JSON and back."""

from __future__ import annotations

import dataclasses
import types
import typing
from datetime import datetime, timezone
from functools import cache
from typing import Any, TypeVar

from . import api_gen

T = TypeVar("T")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, vars(api_gen))


def wire_name(name: str) -> str:
    """A Python keyword has an underscore that the wire does not have."""
    return name.rstrip("_")


def encode(value: Any) -> Any:
    """Return what json.dumps takes; what is None is left out."""
    if dataclasses.is_dataclass(value):
        named = {wire_name(f.name): getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: encode(v) for name, v in named.items() if v is not None}
    if isinstance(value, dict):
        return {key: encode(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    return value


def decode(kind: type[T], value: Any) -> T:
    """Make a value of a type from JSON. Keys that the SDK does not know are ignored: a newer hub may have them."""
    return typing.cast(T, _decode(kind, value))


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if value is None or kind is Any or origin is typing.Literal:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode(next(a for a in typing.get_args(kind) if a is not type(None)), value)
    if origin is list:
        return [_decode(typing.get_args(kind)[0], v) for v in value]
    if origin is dict:
        return {key: _decode(typing.get_args(kind)[1], v) for key, v in value.items()}
    if kind is datetime:
        return datetime.fromisoformat(value)
    if isinstance(kind, typing.ForwardRef):
        return _decode(getattr(api_gen, kind.__forward_arg__), value)
    if isinstance(kind, str):
        return _decode(getattr(api_gen, kind), value)
    if dataclasses.is_dataclass(kind):
        known = {
            name: _decode(of, value[wire_name(name)]) for name, of in _fields(kind).items()
            if wire_name(name) in value
        }
        return typing.cast(Any, kind)(**known)
    return value
