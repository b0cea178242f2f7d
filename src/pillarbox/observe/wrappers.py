"""A store and a publisher that report their calls to observers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast
from uuid import UUID

from pillarbox.batch import Batch, Part
from pillarbox.event import Status
from pillarbox.observe.observers import Observers
from pillarbox.publisher import Needs, Outcome, Publisher
from pillarbox.store import Claim, ClaimResults, Grant, KeyRun, Page, Progress, Rescued, Settlement, Store

# The verbs of a store that are reported, each with its name in the hooks.
_CALLS: Final = {
    **{verb: verb for verb in ("take", "renew", "give", "read", "settle")},
    **{verb: verb for verb in ("claim", "renew_claims", "settle_claims", "rescue")},
    "read_due": "read",
    "settle_ticket": "recover",
    "prune_published": "prune",
    "prune_dead": "prune",
}


def observed_publisher(publisher: Publisher, observers: Observers, call: str = "publish") -> Publisher:
    """The publisher itself, if nobody wants to learn of its calls. call: their name in the hooks, ``publish`` of a
    relay or ``consume`` of a consumer."""
    return cast(Publisher, _ObservedPublisher(publisher, observers, call)) if observers.follow(call) else publisher


def observed_store(store: Store, observers: Observers) -> Store:
    """The store itself, if nobody wants to learn of its calls."""
    followed = any(observers.follow(call) for call in _CALLS.values())
    return cast(Store, _ObservedStore(store, observers)) if followed else store


class _ObservedPublisher:
    """Passes everything on to the publisher and reports what is published."""

    def __init__(self, publisher: Publisher, observers: Observers, call: str) -> None:
        self._publisher = publisher
        self._observers = observers
        self._call = call
        self._report = observers.report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    def prepared(self, needs: Needs) -> Publisher:
        return observed_publisher(self._publisher.prepared(needs), self._observers, self._call)

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return await self._report(self._call, (batch,), self._publisher.publish(batch))


class _ObservedStore:
    """Passes everything on to the store and reports the calls that observers follow."""

    def __init__(self, store: Store, observers: Observers) -> None:
        self._store = store
        self._report = observers.report
        for verb, call in _CALLS.items():
            if not observers.follow(call):
                setattr(self, verb, getattr(store, verb))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        return await self._report("take", (stream,), self._store.take(stream, worker, limit, seconds))

    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        def lost(kept: Collection[Grant]) -> tuple[list[Grant]]:
            return ([grant for grant in grants if grant not in kept],)

        return await self._report("renew", (grants,), self._store.renew(grants, seconds), lost)

    async def give(self, grants: Sequence[Grant]) -> None:
        await self._report("give", (grants,), self._store.give(grants), lambda _: ())

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        return await self._report("read", (grants,), self._store.read(grants, limit, max_bytes))

    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        def parts(run: KeyRun | None) -> tuple[list[Part]]:
            return ([Part(grant.shard, grant.token, run.events)] if run is not None and run.events else [],)

        return await self._report("read", ([grant],), self._store.read_due(grant, limit, max_bytes), parts)

    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        call = self._store.settle_ticket(grant, ticket, keep_published=keep_published)
        return await self._report("recover", (grant, ticket), call)

    async def settle(self, settlements: Sequence[Settlement]) -> Mapping[int, Collection[str]]:
        def lost(held: Mapping[int, Collection[str]]) -> tuple[list[Settlement]]:
            return ([each for each in settlements if each.grant.shard not in held],)

        return await self._report("settle", (settlements,), self._store.settle(settlements), lost)

    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        return await self._report("claim", (stream,), self._store.claim(stream, shard, worker, limit, seconds))

    async def renew_claims(self, claims: Sequence[Claim], seconds: float) -> Collection[UUID]:
        def lost(kept: Collection[UUID]) -> tuple[list[Claim]]:
            return ([claim for claim in claims if claim.event.id not in kept],)

        return await self._report("renew_claims", (claims,), self._store.renew_claims(claims, seconds), lost)

    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        return await self._report("settle_claims", (claims, results), self._store.settle_claims(claims, results))

    async def rescue(self, stream: str, stuck_seconds: float, limit: int) -> Rescued:
        call = self._store.rescue(stream, stuck_seconds, limit)
        return await self._report("rescue", (stream,), call)

    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        call = self._store.prune_published(keep_seconds, limit, after)
        return await self._report("prune", (Status.PUBLISHED,), call, lambda page: (page.deleted,))

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        return await self._report("prune", (Status.DEAD,), self._store.prune_dead(keep_seconds, limit))
