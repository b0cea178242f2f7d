"""The hooks of an observer."""

from collections.abc import Sequence
from typing import Any

from pillarbox.batch import Batch, Part
from pillarbox.event import Status
from pillarbox.publisher import Outcome
from pillarbox.store import Claim, ClaimResults, Grant, Rescued, Settlement


class Observer:
    """Learns what a relay does. Subclass it and override the hooks that you want; all others cost nothing.

    ``before_...`` runs when a call begins, ``after_...`` when it has returned, ``call_failed`` when it has raised.
    ``seconds`` is how long the call took. Hooks run in the event loop of the relay, in the task that makes the call:
    they must be quick and must not block. An error in a hook is logged once and does not disturb the relay.
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

    def before_prune(self, status: Status) -> None:
        """Old events are deleted: published ones, or dead letters."""

    def after_prune(self, status: Status, deleted: int, seconds: float) -> None: ...

    def call_failed(self, call: str, arguments: tuple[Any, ...], error: BaseException, seconds: float) -> None:
        """The call raised, or was cancelled. ``call`` and ``arguments`` are those of its ``before_...`` hook."""

    def circuit_changed(self, stream: str, state: str) -> None:
        """The circuit of the stream's destination is now ``closed``, ``open`` or ``half_open``."""
