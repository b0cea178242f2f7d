"""The span of an event that a handler or a consumer works on. It costs nothing where nobody traces."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from pillarbox.event import Event

_UNTRACED: Final[AbstractContextManager[None]] = nullcontext()
_MOST_LINKS: Final = 128


def processing(given: Event | Sequence[Event]) -> AbstractContextManager[None]:
    """A block in which the event's trace goes on: with a span ``process TYPE``, a child of the span that wrote it.

    Events that are added in the block, and calls of other instrumented libraries, belong to the same trace. The span of
    several events is linked to those that wrote them."""
    # An application that traces has imported it already; others do not pay for the import.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return _UNTRACED
    # An event is a tuple too.
    events = [given] if isinstance(given, Event) else given
    traced = [event for event in events if "traceparent" in event.headers]
    return _span(trace, traced, len(events)) if traced else _UNTRACED


@contextmanager
def _span(trace: Any, events: Sequence[Event], count: int) -> Iterator[None]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    first = events[0]
    written = [TraceContextTextMapPropagator().extract(event.headers) for event in events[:_MOST_LINKS]]
    attributes: dict[str, Any] = {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "outbox.stream": first.stream,
        "outbox.event_type": first.type,
    }
    if count == 1:
        attributes["messaging.message.id"] = str(first.id)
    else:
        attributes["messaging.batch.message_count"] = count
    with trace.get_tracer("pillarbox").start_as_current_span(
        f"process {first.type}",
        context=written[0] if count == 1 else None,
        kind=trace.SpanKind.CONSUMER,
        links=[trace.Link(trace.get_current_span(each).get_span_context()) for each in written] if count > 1 else (),
        attributes=attributes,
        # Its text may hold a payload.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except BaseException as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
