"""What a handler's first parameter asks for: the event itself, or its payload as a model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Event
from pillarbox.outbox.models import builder_of, misfit

# Given an event: what the handler is called with. Raises Reject, because no retry would help.
Reader: TypeAlias = Callable[[Event], Any]


def reader_of(function: Callable[..., Any], name: str, *, takes_lists: bool = False) -> Reader | None:
    """By the annotation of the function's first parameter; None: it takes the event itself, or a list of events."""
    wanted = _annotation(function, name)
    if get_origin(wanted) is Annotated:
        wanted = get_args(wanted)[0]
    kind = get_origin(wanted) or wanted
    if kind in (Any, Union, UnionType):
        return None
    if takes_lists and kind in (list, Sequence):
        return None
    if kind in (dict, Mapping):
        return _mapping
    if kind in (list, Sequence):
        raise ConfigError(f"handler {name} asks for a list; register it with on_batch to get lists of events")
    build = builder_of(kind)
    if build is not None:
        return _of_model(kind, build)
    if isinstance(kind, type) and not _is_base(kind):
        raise ConfigError(
            f"handler {name} asks for {kind.__qualname__}, which is neither the event nor a model of its payload; use "
            "pillarbox.Event, a Pydantic model, a msgspec Struct, a dataclass, a TypedDict or dict"
        )
    return None


def _is_base(kind: type) -> bool:
    """Whether an event is of this type."""
    try:
        return issubclass(Event, kind)
    except TypeError:  # a protocol that cannot be asked
        return True


def _mapping(event: Event) -> Any:
    value = event.json()
    if not isinstance(value, dict):
        raise Reject(f"the payload of {event.type} is not a JSON object")
    return value


def _of_model(model: Any, build: Callable[[bytes], Any]) -> Reader:
    def read(event: Event) -> Any:
        try:
            return build(event.payload)
        except ValueError:
            # Not from the error: its text may quote the payload.
            raise Reject(misfit(event.type, model, event.payload)) from None

    return read


def _annotation(function: Callable[..., Any], name: str) -> Any:
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):  # a built-in without a signature
        return None
    if first is None or first.annotation is first.empty:
        return None
    if not isinstance(first.annotation, str):
        return first.annotation
    text = first.annotation
    code = getattr(function, "__func__", function)
    inner = getattr(code, "__call__", code)  # noqa: B004
    names = {**getattr(code, "__globals__", getattr(inner, "__globals__", {})), **_nonlocals(code)}
    try:
        return eval(text, names)
    except Exception:
        if text.rpartition(".")[2] in ("Event", "Any"):  # imported for type checkers only
            return None
        raise ConfigError(
            f"handler {name} asks for {text}, which is not known where it is defined; define or import it before the "
            "handler, at the level of the module"
        ) from None


def _nonlocals(function: Any) -> Mapping[str, Any]:
    try:
        return inspect.getclosurevars(function).nonlocals
    except (TypeError, ValueError):
        return {}
