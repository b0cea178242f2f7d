"""The hooks of an observer."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from pillarbox.batch import Batch, Part
from pillarbox.event import Event, Status
from pillarbox.publisher import Outcome
from pillarbox.store import Claim, ClaimResults, Grant, Progress, Rescued, Settlement, StreamGauges
from pillarbox.store.consumers import ConsumerReport


class Observer:
    """Learns what a relay or an application does. Subclass it and override the hooks that you want; all others cost
    nothing.

    ``before_...`` runs when a call begins, ``after_...`` when it has returned, ``call_failed`` when it has raised.
    ``seconds`` is how long the call took. Hooks run in the event loop of the relay, in the task that makes the call:
    they must be quick and must not block. Those of an Outbox, an Inbox and Idempotency run in the thread that makes the
    call. An error in a hook is logged once and disturbs nobody.
    """

    def before_take(self, stream: str) -> None:
        """The worker asks for shards."""

    def after_take(self, stream: str, grants: Sequence[Grant], seconds: float) -> None:
        """The worker owns these shards. A grant with ``previous`` was taken over from a worker that died."""

    def before_renew(self, grants: Sequence[Grant]) -> None: ...

    def after_renew(self, grants: Sequence[Grant], lost: Sequence[Grant], seconds: float) -> None:
        """``lost``: the grants that another worker has now."""

    def before_give(self, grants: Sequence[Grant]) -> None: ...

    def after_give(self, grants: Sequence[Grant], seconds: float) -> None: ...

    def before_read(self, grants: Sequence[Grant]) -> None:
        """New events of these shards are read, or those of one held key that is due."""

    def after_read(self, grants: Sequence[Grant], parts: Sequence[Part], seconds: float) -> None:
        """A shard without events has no part."""

    def before_recover(self, grant: Grant, ticket: bytes) -> None:
        """Exactly once: the store is asked whether the last ticket of a shard is settled."""

    def after_recover(self, grant: Grant, ticket: bytes, progress: Progress, seconds: float) -> None:
        """``progress.settled``: how many events were published before and are settled now."""

    def before_settle(self, settlements: Sequence[Settlement]) -> None: ...

    def after_settle(self, settlements: Sequence[Settlement], lost: Sequence[Settlement], seconds: float) -> None:
        """``lost``: the settlements that were refused, because another worker owns the shard now."""

    def before_claim(self, stream: str) -> None:
        """The worker of a queue stream asks for events. A stream has one such call at a time."""

    def after_claim(self, stream: str, claims: Sequence[Claim], seconds: float) -> None: ...

    def before_renew_claims(self, claims: Sequence[Claim]) -> None: ...

    def after_renew_claims(self, claims: Sequence[Claim], lost: Sequence[Claim], seconds: float) -> None:
        """``lost``: the claims that were taken from this worker."""

    def before_settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> None: ...

    def after_settle_claims(self, claims: Sequence[Claim], results: ClaimResults, refused: int, seconds: float) -> None:
        """``refused``: how many of the claims were stale; the store does not say which."""

    def before_rescue(self, stream: str) -> None: ...

    def after_rescue(self, stream: str, rescued: Rescued, seconds: float) -> None:
        """Events were taken from workers of a queue stream that died or hang."""

    def before_publish(self, batch: Batch) -> None: ...

    def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        """One outcome for each event of the batch, in the same order."""

    def before_consume(self, batch: Batch) -> None:
        """A consumer gives events to its destination. ``batch.stream`` is the consumer's name."""

    def after_consume(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        """One outcome for each event of the batch, in the same order."""

    def before_prune(self, status: Status) -> None:
        """Old events are deleted: published ones, or dead letters."""

    def after_prune(self, status: Status, deleted: int, seconds: float) -> None: ...

    def call_failed(self, call: str, arguments: tuple[Any, ...], error: BaseException, seconds: float) -> None:
        """The call raised, or was cancelled. ``call`` and ``arguments`` are those of its ``before_...`` hook."""

    def serves(self, stream: str, destination: str) -> None:
        """The relay serves this stream. ``destination``: as in the log, for example ``kafka localhost:9092``."""

    def consumer_circuit_changed(self, consumer: str, state: str) -> None:
        """The circuit of the consumer's destination is now ``closed``, ``open`` or ``half_open``."""

    def event_buried(self, consumer: str, event: Event) -> None:
        """An event of a consumer died, and its dead letter is kept."""

    def consumer_reported(self, consumer: str, report: ConsumerReport) -> None:
        """A consumer with a store has told how it is, as it does every 5 s."""

    def circuit_changed(self, stream: str, state: str) -> None:
        """The circuit of the stream's destination is now ``closed``, ``open`` or ``half_open``."""

    def sampled(self, gauges: Sequence[StreamGauges], seconds: float) -> None:
        """The relay has asked the store what waits, for all streams of the outbox. It does so every 15 seconds."""

    def added(self, events: Sequence[Event]) -> None:
        """An Outbox was given events to write. Their transaction may still roll back."""

    def inbox_asked(self, consumer: str, new: int, copies: int) -> None:
        """An Inbox was asked about events. The transaction that records the new ones may still roll back."""

    def request_served(self, outcome: str) -> None:
        """Idempotency has served a request: ``done`` (``unkeyed`` without a key), ``replayed``, ``busy``, ``mismatch``
        (the key belongs to another request), ``unfinished``, ``failed`` (nothing was committed) or ``unavailable``."""


@runtime_checkable
class Exporter(Protocol):
    """An observer with a page of metrics."""

    def page(self, accept: str = "") -> tuple[str, bytes]:
        """The content type and the bytes of the page. accept: the header of the request."""
        ...
