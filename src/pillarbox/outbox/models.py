"""Checks payloads against the models of their types: what is delivered must fit, not what was passed."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence, Set
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.hints import hint as similar

# Given a payload and its bytes: None if they fit, else the field that does not, or "" if it is none in particular.
Check: TypeAlias = Callable[[Any, bytes], str | None]
_WRAPPERS: Final = (Annotated, Required, NotRequired)
_AS_TEXT: Final[dict[type, Callable[[str], object]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
}
_ABSTRACT: Final = (Sequence, Set, MutableSequence, Collection, Iterable)  # a list will do
# In the texts of msgspec: "... - at `$.items[0].price`", "Object missing required field `id`".
_MSGSPEC_PLACES: Final = (re.compile(r"at `\$\.(\w+)"), re.compile(r"field `(\w+)"))


class Models:
    """The models of an outbox's types. is_strict: other types are refused."""

    def __init__(self, types: Mapping[str, Any], *, is_strict: bool) -> None:
        self._checks = {name: _check_of(name, model) for name, model in types.items()}
        self._names = {name: _name(model) for name, model in types.items()}
        self._is_strict = is_strict

    def check(self, type: Any, payload: Any, data: bytes) -> None:
        """Raise InvalidEvent if the payload does not fit the model of its type. The message has no value of it."""
        if not isinstance(type, str) or type not in self._checks:
            if self._is_strict:
                remedy = similar(str(type), self._checks, "list it there, or correct its name")
                raise InvalidEvent(f"the type {str(type)[:255]!r} is not among the types of this outbox; {remedy}")
            return
        field = self._checks[type](payload, data)
        if field is not None:
            at = f" at {field!r}" if field.isidentifier() and len(field) <= 100 else ""
            raise InvalidEvent(
                f"the payload of {type} does not fit {self._names[type]}{at}; pass a payload as the model declares it"
            )


def _name(model: Any) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def _check_of(name: str, model: Any) -> Check:
    validator = getattr(model, "__pydantic_validator__", model)
    if hasattr(validator, "validate_json"):
        return partial(_check_pydantic, model, validator)
    if hasattr(model, "__struct_fields__"):
        return partial(_check_msgspec, sys.modules["msgspec"].json.Decoder(model))
    if is_typeddict(model) or (dataclasses.is_dataclass(model) and isinstance(model, type)):
        try:
            _fields(model)
        except NameError as error:
            raise ConfigError(
                f"the model of {name} names a type that is not known ({error}); define it in the model's module"
            ) from None
        return partial(_check_plain, model)
    if model is None:
        return _fits_always
    if callable(model):
        return partial(_check_by_call, model)
    raise ConfigError(
        f"the model of {name} is of type {type(model).__name__}; pass a Pydantic model, a msgspec Struct, a dataclass, "
        "a TypedDict, a function, or None for any payload"
    )


def _fits_always(_payload: Any, _data: bytes) -> None:
    return None


def _check_pydantic(model: Any, validator: Any, payload: Any, data: bytes) -> str | None:
    if isinstance(model, type) and isinstance(payload, model):
        return None  # it was checked when it was made, and may be serialised in a form of its own
    try:
        validator.validate_json(data)
    except ValueError as error:
        problems: Any = error
        place = problems.errors(include_input=False, include_context=False, include_url=False)[0]["loc"]
        return str(place[0]) if place else ""
    return None


def _check_msgspec(decoder: Any, _payload: Any, data: bytes) -> str | None:
    try:
        decoder.decode(data)
    except ValueError as error:  # its text may quote the value
        found = [match[1] for each in _MSGSPEC_PLACES if (match := each.search(str(error)))]
        return found[0] if found else ""
    return None


def _check_by_call(model: Callable[[Any], object], payload: Any, _data: bytes) -> str | None:
    try:
        model(payload)
    except (TypeError, ValueError):
        return ""
    return None


def _check_plain(model: Any, _payload: Any, data: bytes) -> str | None:
    with suppress(ValueError):
        return _misfit(model, json.loads(data))
    return ""


@cache
def _fields(model: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The fields with their types, and the names of the required ones."""
    hints = get_type_hints(model, include_extras=True)
    if is_typeddict(model):
        return hints, model.__required_keys__
    fields = dataclasses.fields(model)
    missing = dataclasses.MISSING
    required = frozenset(each.name for each in fields if each.default is missing and each.default_factory is missing)
    return {each.name: hints[each.name] for each in fields}, required


def _misfit(model: Any, value: Any) -> str | None:
    """The first field of a JSON object that does not fit a dataclass or a TypedDict."""
    if not isinstance(value, dict):
        return ""
    hints, required = _fields(model)
    for name in (*(required - value.keys()), *(value.keys() - hints.keys())):
        return str(name)
    return next((name for name, each in value.items() if not _fits(hints[name], each)), None)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a JSON value fits a type; any value fits a type that this does not know."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _WRAPPERS:
        return _fits(arguments[0], value)
    if origin in (Union, UnionType):
        return any(_fits(each, value) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if hint in (None, NoneType):
        return value is None
    if is_typeddict(hint) or dataclasses.is_dataclass(hint):
        return _misfit(hint, value) is None
    kind = origin or hint
    return _fits_kind(kind, arguments, value) if isinstance(kind, type) else True


def _fits_kind(kind: type, arguments: Sequence[Any], value: Any) -> bool:
    if issubclass(kind, Enum):
        return any(type(value) is type(each.value) and value == each.value for each in kind)
    if kind in _AS_TEXT:
        with suppress(ValueError, InvalidOperation):
            return isinstance(value, str) and _AS_TEXT[kind](value) is not None
        return False
    if kind in (int, float, str):
        return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, bool)
    if issubclass(kind, Mapping):
        return isinstance(value, dict) and (not arguments or all(_fits(arguments[1], each) for each in value.values()))
    if issubclass(kind, tuple) and arguments and arguments[-1] is not ...:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(_fits, arguments, value))
    if issubclass(kind, Sequence | Set):
        return isinstance(value, list) and (not arguments or all(_fits(arguments[0], each) for each in value))
    return True


def builder_of(model: Any) -> Callable[[bytes], Any] | None:
    """A function from the bytes of a payload to a value of the model; it raises ValueError. None: this is no model."""
    if hasattr(model, "__pydantic_validator__"):
        validate: Callable[[bytes], Any] = model.__pydantic_validator__.validate_json
        return validate
    if hasattr(model, "__struct_fields__"):
        decode: Callable[[bytes], Any] = sys.modules["msgspec"].json.Decoder(model).decode
        return decode
    if is_typeddict(model) or dataclasses.is_dataclass(model):
        return partial(_read_plain, model)
    return None


def misfit(name: str, model: Any, data: bytes) -> str:
    """The sentence for a payload that is not of the model; it has no value of the payload."""
    field = _check_of(name, model)(None, data) or ""
    at = f" at {field!r}" if field.isidentifier() and len(field) <= 100 else ""
    return f"the payload of {name} does not fit {_name(model)}{at}"


def _read_plain(model: Any, data: bytes) -> Any:
    value = json.loads(data)
    if _misfit(model, value) is not None:
        raise ValueError
    return _built(model, value)


def _built(hint: Any, value: Any) -> Any:
    """The Python value of a JSON value that fits the type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _WRAPPERS:
        return _built(arguments[0], value)
    if origin in (Union, UnionType):
        return next(_built(each, value) for each in arguments if _fits(each, value))
    if is_typeddict(hint) or dataclasses.is_dataclass(hint):
        hints, _ = _fields(hint)
        fields = {name: _built(hints[name], each) for name, each in value.items()}
        return fields if is_typeddict(hint) else cast("Callable[..., Any]", hint)(**fields)
    kind = origin or hint
    if not isinstance(kind, type) or value is None:
        return value
    if kind in _AS_TEXT:
        return _AS_TEXT[kind](value)
    if issubclass(kind, Enum):
        return kind(value)
    if isinstance(value, dict) and arguments:
        return {name: _built(arguments[1], each) for name, each in value.items()}
    if isinstance(value, list) and issubclass(kind, Sequence | Set):
        if issubclass(kind, tuple) and arguments and arguments[-1] is not ...:
            return tuple(map(_built, arguments, value))
        items = [_built(arguments[0], each) for each in value] if arguments else value
        return items if kind in _ABSTRACT else cast("Callable[..., Any]", kind)(items)
    return value
