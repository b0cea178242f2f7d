"""The least rights that a writer and a relay need on MongoDB, tried with users that have no others."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from pillarbox import Event, Mode, Outbox
from pillarbox.conformance.events import make_event
from pillarbox.conformance.store_setup import read, settle
from pillarbox.errors import DuplicateEvent, LeaseLost
from pillarbox.finding import State
from pillarbox.store import Failure, Settlement
from pillarbox.stores.mongo import MongoStore
from servers import Mongo
from servers.fixtures import OwnServer
from tests.integration.mongos import Pause
from tests.integration.relays import eventually
from tests.mongo_outbox import MongoOutbox


class GuardedMongo(Mongo):
    """A node that asks who is there."""

    def prepare(self) -> None:
        super().prepare()
        key = self.folder / "key"
        key.touch(0o600)
        key.write_text("between the members of the set")

    def command(self) -> Sequence[str]:
        return [*super().command(), "--keyFile", str(self.folder / "key")]

    def url_of(self, user: str) -> str:
        return self.url.replace("mongodb://", f"mongodb://{user}:{user}@", 1) + "&authSource=admin"


class Clerk:
    """A user with the rights that he was granted and no others."""

    def __init__(self, server: GuardedMongo) -> None:
        self.server = server
        with MongoClient[Any](server.url) as client:
            # The first user may be made by anybody on the same machine.
            client.admin.command("createUser", "owner", pwd="owner", roles=["root"])
        self.made = MongoOutbox(server.url_of("owner"))
        self.admin = self.made.client.admin
        self.admin.command("createRole", "clerk", privileges=[], roles=[])
        self.admin.command("createUser", "clerk", pwd="clerk", roles=["clerk"])
        self.client: MongoClient[Any] = MongoClient(server.url_of("clerk").replace("/?", "/shop?"))

    def grant(self, name: str, *actions: str) -> None:
        resource = {"db": "shop", "collection": f"{self.made.prefix}_{name}"}
        self.admin.command("grantPrivilegesToRole", "clerk", privileges=[{"resource": resource, "actions": actions}])

    def write(self, event: Event | None = None, *, on_duplicate: Any = "raise", **settings: Any) -> Event:
        outbox = Outbox(prefix=self.made.prefix, **settings)
        event = event or outbox.event("order.created", {}, key=1)
        with self.client.start_session() as session, session.start_transaction():
            outbox.add_all(session, [event], on_duplicate=on_duplicate)
        return event

    def knows(self, event: Event) -> bool:
        with self.client.start_session() as session, session.start_transaction():
            return bool(Outbox(prefix=self.made.prefix).exists(session, event.id))

    def close(self) -> None:
        self.client.close()
        self.made.close()


@pytest.fixture
def clerk(own_server: OwnServer) -> Iterator[Clerk]:
    clerk = Clerk(own_server(GuardedMongo))
    yield clerk
    clerk.close()


def test_a_writer_has_the_rights_that_the_page_names(clerk: Clerk) -> None:
    with pytest.raises(OperationFailure, match="not authorized"):
        clerk.write()
    clerk.grant("meta", "find")
    with pytest.raises(OperationFailure, match="not authorized"):
        clerk.write()
    clerk.grant("event", "insert")
    event = clerk.write()
    with pytest.raises(DuplicateEvent):
        clerk.write(event)

    with pytest.raises(OperationFailure, match="not authorized"):
        clerk.write(event, on_duplicate="ignore")
    clerk.grant("event", "find")
    clerk.write(event, on_duplicate="ignore")

    # Without this right an id that is not found first is asked for in vain.
    unknown = Outbox().event("order.created", {})
    with pytest.raises(OperationFailure, match="not authorized"):
        clerk.knows(unknown)
    clerk.grant("dead_letter", "find")
    assert not clerk.knows(unknown)

    with pytest.raises(OperationFailure, match="not authorized"):
        clerk.write(lock_keys=True)
    clerk.grant("key_lock", "insert", "update")
    clerk.write(lock_keys=True)
    assert len(clerk.made.events()) == 2


@pytest.mark.asyncio
async def test_a_relay_needs_no_more_than_to_read_and_write(
    clerk: Clerk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk.admin.command("createUser", "relay", pwd="relay", roles=[{"role": "readWrite", "db": "shop"}])
    url = clerk.server.url_of("relay").replace("/?", "/shop?")
    ann, bob = (MongoStore(url, prefix="own", shards=1) for _ in range(2))
    await ann.migrate()
    await ann.open()
    await bob.open()
    await ann.add([make_event(stream="orders")])
    await ann.announce("orders", Mode.ORDERED, "memory")
    await ann.join("orders", "ann", 60)
    (held,) = await ann.take("orders", "ann", 1, 60)
    events = await read(ann, held, 10, 1_000_000)
    await settle(ann, Settlement(held, published=events))
    # She hangs in her next settle: whoever takes over ends her transaction, with no right but these.
    await ann.renew([held], -1)
    inside = Pause(ann, monkeypatch, "event", "bulk_write")
    hanging = asyncio.create_task(settle(ann, Settlement(held, failed=[Failure(events[0], "refused", 1)])))
    await inside.reached()
    (taken,) = await eventually(lambda: bob.take("orders", "bob", 1, 60))
    assert taken.token != held.token
    assert "could not be ended" not in caplog.text
    inside.go.set()
    with pytest.raises(LeaseLost):
        await hanging
    await ann.close()
    await bob.close()


@pytest.mark.asyncio
async def test_the_doctor_names_each_right_that_a_relay_lacks(clerk: Clerk) -> None:
    store = MongoStore(clerk.server.url_of("clerk").replace("/?", "/shop?"), prefix=clerk.made.prefix)
    clerk.grant("meta", "find")
    for name in ("event", "stream", "worker", "lease", "held_key"):
        clerk.grant(name, "find", "insert", "update", "remove")
    clerk.grant("dead_letter", "find", "update", "remove")
    for name in ("inbox", "idempotency", "audit"):
        clerk.grant(name, "find")
    await store.open()
    try:
        told = {each.check: each for each in await store.examine(15.0)}
        assert told["rights"].state is State.FAILED
        prefix = clerk.made.prefix
        assert told["rights"].sentence == (
            f"this user lacks insert on {prefix}_dead_letter; insert on {prefix}_audit; remove on {prefix}_inbox; "
            f"remove on {prefix}_idempotency"
        )
        assert told["old_transactions"].state is State.WARNING
        assert "clusterMonitor" in str(told["old_transactions"].remedy)

        clerk.admin.command("grantRolesToUser", "clerk", roles=[{"role": "readWrite", "db": "shop"}, "clusterMonitor"])
        told = {each.check: each for each in await store.examine(15.0)}
        assert {each.state for each in told.values()} == {State.OK}
        shop = clerk.made.client["shop"]
        assert all(shop[name].count_documents({}) == 0 for name in (f"{prefix}_dead_letter", f"{prefix}_event"))
    finally:
        await store.close()
