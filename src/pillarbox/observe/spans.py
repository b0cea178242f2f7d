"""Spans of what a relay publishes. Needs the extra ``otel``."""

import time
from collections.abc import Sequence
from contextvars import Token
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pillarbox.batch import Batch
from pillarbox.event import Event
from pillarbox.observe.tally import instants_of, outcome_name
from pillarbox.publisher import Outcome, Result

_LINKS: Final = 128  # the limit of the SDK
_SAMPLED: Final = 1  # the flag of W3C's trace context
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Call:
    """One call of a publisher, with the events whose traces are recorded."""

    span: Span
    token: Token[Context]
    begun_ns: int
    events: Sequence[tuple[int, Context]]  # place in the batch, and the context in which the event was written


class Spans:
    """One span for each call of a publisher with sampled events, and one for each of these events.

    The span of the call (CLIENT) has links to the spans that wrote its events. The span of an event (PRODUCER) is a
    child of the span that wrote it, so that a request's trace shows how long its event waited.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._calls: dict[int, _Call] = {}  # by the identity of the batch

    def begin(self, batch: Batch, attributes: dict[str, AttributeValue], destination: str) -> None:
        sampled = [(place, event) for place, event in enumerate(batch) if is_sampled(event)]
        if not sampled:
            return
        written = [(place, _PROPAGATOR.extract(event.headers, Context())) for place, event in sampled]
        links = [Link(get_current_span(context).get_span_context()) for _, context in written[:_LINKS]]
        begun = time.time_ns()
        span = self._tracer.start_span(
            f"send {destination}",
            Context(),  # a trace of its own: it serves the events of many
            SpanKind.CLIENT,
            {
                **attributes,
                "messaging.operation.name": "send",
                "messaging.operation.type": "send",
                "messaging.batch.message_count": len(batch),
            },
            links,
            begun,
        )
        # Spans of the destination's own client belong to this one.
        self._calls[id(batch)] = _Call(span, attach(set_span_in_context(span, Context())), begun, written)

    def end(self, batch: Batch, outcomes: Sequence[Outcome], attributes: dict[str, AttributeValue]) -> None:
        call = self._calls.pop(id(batch), None)
        if call is None:
            return
        detach(call.token)
        ended = time.time_ns()
        failed = sum(outcome.result is not Result.PUBLISHED for outcome in outcomes)
        if failed:
            call.span.set_status(StatusCode.ERROR, f"{failed} of {len(batch)} events were not published")
        call.span.end(ended)
        link = Link(call.span.get_span_context())
        for place, context in call.events:
            event, outcome = batch[place], outcomes[place]
            self._event(
                event,
                outcome,
                context,
                link,
                call.begun_ns,
                ended,
                {**attributes, **_about(batch, event, call.begun_ns)},
            )

    def fail(self, batch: Batch, error: BaseException) -> None:
        """The call raised, or was cancelled."""
        call = self._calls.pop(id(batch), None)
        if call is not None:
            detach(call.token)
            call.span.set_status(StatusCode.ERROR, type(error).__name__)
            call.span.end()

    def _event(
        self,
        event: Event,
        outcome: Outcome,
        context: Context,
        link: Link,
        begun_ns: int,
        ended_ns: int,
        attributes: dict[str, AttributeValue],
    ) -> None:
        said = outcome_name(outcome) or "untried"
        span = self._tracer.start_span(
            f"publish {event.topic or event.stream}",
            context,
            SpanKind.PRODUCER,
            {
                **attributes,
                "messaging.operation.name": "publish",
                "messaging.operation.type": "send",
                "messaging.message.id": str(event.id),
                "outbox.outcome": said,
            },
            [link],
            begun_ns,
        )
        if outcome.result is not Result.PUBLISHED:
            # Not the error: it may be the text of a handler's exception, which may hold a payload.
            span.set_status(StatusCode.ERROR, said)
        span.end(ended_ns)


def is_sampled(event: Event) -> bool:
    """Whether the trace in which the event was written is recorded."""
    traceparent = event.headers.get("traceparent")
    if traceparent is None:
        return False
    try:
        return bool(int(traceparent[53:55], 16) & _SAMPLED)
    except ValueError:  # a writer's own header
        return False


def _about(batch: Batch, event: Event, begun_ns: int) -> dict[str, AttributeValue]:
    # A claim of a queue stream has charged the attempt already.
    attempt = event.attempts if batch.parts[0].shard is None else event.attempts + 1
    (instant,) = instants_of([event])
    waited = begun_ns / 1e9 - instant.timestamp()
    return {"outbox.wait_seconds": max(0.0, waited), "outbox.attempt": max(1, attempt)}
