"""A RabbitMQ that refuses certificates, passwords and rights."""

import re
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from pillarbox.conformance.events import make_event
from pillarbox.conformance.source import Reader
from pillarbox.errors import Outage
from pillarbox.event import Status
from pillarbox.publisher import PUBLISHED, Result
from pillarbox.publishers.rabbitmq import RabbitMQPublisher
from pillarbox.sources.rabbitmq import RabbitMQSource
from pillarbox.store import Store
from proof.proxy import Proxy
from servers import RabbitMQ
from servers.process import free_port
from tests.integration.certificates import Certificates, certificates
from tests.integration.rabbit import Desk, Open, desk, publish, publish_rest, publishers
from tests.integration.relays import (
    CircuitState,
    SqlOutbox,
    attempts,
    counts,
    eventually,
    mixed,
    relay,
    settled,
    stream,
    until,
    worker_of,
)

pytestmark = pytest.mark.asyncio

BOBS = "^(amq.default|amq.fanout)$"  # where bob may write


@pytest_asyncio.fixture
async def publisher(guarded: RabbitMQ) -> AsyncIterator[Open]:
    async with publishers(guarded.url) as open_:
        yield open_


@pytest_asyncio.fixture
async def shop(guarded: RabbitMQ) -> AsyncIterator[Desk]:
    async with desk(guarded.url) as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(request: pytest.FixtureRequest, files: Certificates) -> Iterator[RabbitMQ]:
    """A server with TLS, small messages, and the user bob, who may write nothing but his own exchange. carol may write
    nothing, and dave only some routing keys."""
    request.getfixturevalue("rabbitmq")  # skips where there is no RabbitMQ
    for file in files:
        file.chmod(0o644)
    server = RabbitMQ(
        settings={
            "max_message_size": "20000",
            "listeners.ssl.default": str(free_port()),
            "ssl_options.cacertfile": str(files.authority),
            "ssl_options.certfile": str(files.server),
            "ssl_options.keyfile": str(files.server_key),
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "false",
        }
    )
    with server:
        server.ctl("add_user", "bob", "p@ss/word")
        server.ctl("set_permissions", "bob", ".*", BOBS, ".*")
        server.ctl("add_user", "carol", "secret")
        server.ctl("set_permissions", "carol", ".*", "^$", ".*")
        server.ctl("add_user", "dave", "secret")
        server.ctl("set_permissions", "dave", ".*", ".*", ".*")
        server.ctl("set_topic_permissions", "dave", "amq.topic", r"^order\.", ".*")
        yield server


class TestAccess:
    async def test_tls(self, guarded: RabbitMQ, files: Certificates, publisher: Open) -> None:
        port = guarded.settings["listeners.ssl.default"]
        async with desk(guarded.url) as shop:
            queue = await shop.queue()
            opened = await publisher(
                f"amqps://127.0.0.1:{port}", queue=queue, cafile=str(files.authority), certfile=str(files.client)
            )
            assert await publish(opened, [make_event()]) == [PUBLISHED]
            assert len(await shop.read(queue)) == 1

    async def test_a_certificate_that_is_not_trusted_is_an_outage(self, guarded: RabbitMQ, publisher: Open) -> None:
        port = guarded.settings["listeners.ssl.default"]
        with pytest.raises(Outage, match=r"TLS was refused \(.*certificate.*\); correct cafile"):
            await publisher(f"amqps://127.0.0.1:{port}", queue="q")

    async def test_a_certificate_for_another_name_is_an_outage(
        self, guarded: RabbitMQ, files: Certificates, publisher: Open
    ) -> None:
        port = guarded.settings["listeners.ssl.default"]
        with pytest.raises(Outage, match="TLS was refused"):
            await publisher(f"amqps://127.0.0.2:{port}", queue="q", cafile=str(files.authority))

    async def test_tls_to_a_port_without_it_is_an_outage(self, guarded: RabbitMQ, publisher: Open) -> None:
        with pytest.raises(Outage, match="TLS was refused"):
            await publisher(f"amqps://127.0.0.1:{guarded.port}", queue="q")

    async def test_a_wrong_password_is_an_outage(self, guarded: RabbitMQ, publisher: Open) -> None:
        with pytest.raises(Outage, match=r"refuses this client: .*; correct its user and password"):
            await publisher(f"amqp://bob:wrong@127.0.0.1:{guarded.port}", queue="q")

    async def test_a_missing_vhost_is_an_outage(self, guarded: RabbitMQ, publisher: Open) -> None:
        with pytest.raises(Outage, match="the vhost 'nope' does not exist"):
            await publisher(f"amqp://127.0.0.1:{guarded.port}/nope", queue="q")

    async def test_a_default_exchange_without_permission_is_an_outage(self, guarded: RabbitMQ, publisher: Open) -> None:
        opened = await publisher(f"amqp://bob:p%40ss%2Fword@127.0.0.1:{guarded.port}", exchange="amq.topic")
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.is_outage
        assert "refused for user" in (outcome.error or "")

    async def test_an_own_exchange_without_permission_waits(self, guarded: RabbitMQ, publisher: Open) -> None:
        async with desk(guarded.url) as shop:
            queue = await shop.queue()
            opened = await publisher(f"amqp://bob:p%40ss%2Fword@127.0.0.1:{guarded.port}", queue=queue)
            own, other = make_event(key="a", topic="amq.topic"), make_event(key="b")
            outcomes = await publish(opened, [own, other])
            assert (outcomes[0].result, outcomes[0].charged) == (Result.RETRY, False)
            assert "permission" in (outcomes[0].error or "")
            await publish_rest(opened, [other] if outcomes[1] is not PUBLISHED else [])
            # From now on it is known, and costs no connection.
            again = await publish(opened, [own, make_event(key="b")])
            assert (again[0].result, again[1]) == (Result.RETRY, PUBLISHED)

    async def test_a_default_queue_without_permission_is_an_outage(self, guarded: RabbitMQ, publisher: Open) -> None:
        async with desk(guarded.url) as shop:
            queue = await shop.queue()
            opened = await publisher(f"amqp://carol:secret@127.0.0.1:{guarded.port}", queue=queue)
            outcomes = await publish(opened, [make_event(key="a"), make_event(key="b")])
            assert all(each.is_outage for each in outcomes), outcomes
            assert "permission to write" in (outcomes[0].error or "")
            assert await shop.count(queue) == 0

    async def test_an_own_exchange_without_permission_is_tried_more_and_more_seldom(
        self, guarded: RabbitMQ, publisher: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Each try closes a connection. That the exchange is there says nothing about the permission.
        monkeypatch.setattr("pillarbox.publishers.rabbitmq.addresses.WAIT_SECONDS", (0.05, 30.0))
        opened = await publisher(f"amqp://carol:secret@127.0.0.1:{guarded.port}", exchange="*")
        own = make_event(key="a", topic="amq.topic")

        async def is_tried_later() -> bool:
            (outcome,) = await publish(opened, [own])
            assert (outcome.result, outcome.charged) == (Result.RETRY, False)
            return (outcome.after_seconds or 0.0) > 0.5

        await eventually(is_tried_later)

    async def test_a_routing_key_without_permission_waits_and_harms_nobody(
        self, guarded: RabbitMQ, publisher: Open
    ) -> None:
        async with desk(guarded.url) as shop:
            queue = await shop.queue()
            await shop.bind(queue, "amq.topic")
            opened = await publisher(f"amqp://dave:secret@127.0.0.1:{guarded.port}", exchange="amq.topic")
            secret, order = make_event(key="a", type="salary.paid"), make_event(key="b", type="order.paid")
            outcomes = await publish(opened, [secret, order])
            assert (outcomes[0].result, outcomes[0].charged, outcomes[0].ambiguous) == (Result.RETRY, False, True)
            assert "'salary.paid' from this user" in (outcomes[0].error or "")
            assert "topic permission" in (outcomes[0].error or "")
            await publish_rest(opened, [order] if outcomes[1] is not PUBLISHED else [])
            # From now on it is known, and costs no connection.
            again = await publish(opened, [secret, make_event(key="b", type="order.paid")])
            assert (again[0].result, again[1]) == (Result.RETRY, PUBLISHED)
            assert [each.routing_key for each in await shop.read(queue)][-1] == "order.paid"

    async def test_a_refusal_in_unknown_words_is_not_tried_in_a_circle(
        self, guarded: RabbitMQ, publisher: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pillarbox.publishers.rabbitmq.sender._EXCHANGE", re.compile("other words"))
        opened = await publisher(f"amqp://carol:secret@127.0.0.1:{guarded.port}", exchange="amq.topic")
        outcomes = await publish(opened, [make_event(key="a"), make_event(key="b")])
        assert {(each.result, each.charged, each.ambiguous) for each in outcomes} == {(Result.RETRY, False, True)}
        assert "closed the channel: " in (outcomes[0].error or "")

    async def test_the_servers_limit_of_a_body_is_learnt(self, guarded: RabbitMQ, publisher: Open) -> None:
        async with desk(guarded.url) as shop:
            queue = await shop.queue()
            opened = await publisher(guarded.url, queue=queue)
            large, small = make_event(key="a", payload=b"x" * 20_001), make_event(key="b")
            outcomes = await publish(opened, [large, small])
            assert outcomes[0].result is Result.REJECTED
            assert "20001 bytes and RabbitMQ takes at most 20000" in (outcomes[0].error or "")
            await publish_rest(opened, [small] if outcomes[1] is not PUBLISHED else [])
            fits = make_event(payload=b"x" * 20_000)
            outcomes = await publish(opened, [make_event(payload=b"x" * 20_001), fits])
            assert [each.result for each in outcomes] == [Result.REJECTED, Result.PUBLISHED]

    async def test_a_limit_of_a_body_that_is_raised_is_found_after_a_while(
        self, guarded: RabbitMQ, shop: Desk, publisher: Open
    ) -> None:
        opened, large = await publisher(queue=await shop.queue()), make_event(payload=b"x" * 20_001)
        assert (await publish(opened, [large]))[0].result is Result.REJECTED
        guarded.ctl("eval", "application:set_env(rabbit, max_message_size, 30000).")
        opened._addresses._learnt_until = 0.0  # five minutes later
        assert await publish(opened, [large]) == [PUBLISHED]
        guarded.ctl("eval", "application:set_env(rabbit, max_message_size, 20000).")


def bob(guarded: RabbitMQ, password: str = "p%40ss%2Fword", port: int | None = None) -> str:
    return f"amqp://bob:{password}@127.0.0.1:{port or guarded.port}"


class TestRelay:
    """A relay whose broker refuses: nothing is lost, and no attempt is charged, though one would be the last."""

    @pytest.mark.parametrize("kind", ["password", "certificate", "away"])
    async def test_a_relay_that_cannot_connect_waits(
        self,
        guarded: RabbitMQ,
        shop: Desk,
        sqlite: SqlOutbox,
        store: Store,
        caplog: pytest.LogCaptureFixture,
        kind: str,
    ) -> None:
        queue = await shop.queue()
        tls = f"amqps://127.0.0.1:{guarded.settings['listeners.ssl.default']}"
        wrong, said = {
            "password": (bob(guarded, "guess"), "refuses this client: "),
            "certificate": (tls, "TLS was refused"),
            "away": (bob(guarded, port=free_port()), "cannot be reached: Connection refused"),
        }[kind]
        events = mixed(["a", "b"], 10)
        await store.add(events)
        async with relay(sqlite(), stream(RabbitMQPublisher(wrong, queue=queue), max_attempts=1)):
            await until(lambda: said in caplog.text)
            assert await counts(store) == {Status.PENDING: 20}
        assert "guess" not in caplog.text
        async with relay(sqlite(), stream(RabbitMQPublisher(bob(guarded), queue=queue), max_attempts=1)):
            await settled(store, {Status.PUBLISHED: 20})
        assert await attempts(store) == [1] * 20
        found = [each.event_id for each in await shop.read(queue)]
        for key in ("a", "b"):
            wanted = [str(event.id) for event in events if event.key == key]
            assert [each for each in found if each in wanted] == wanted

    async def test_a_relay_waits_while_nothing_answers_and_while_its_user_may_not_write(
        self, guarded: RabbitMQ, shop: Desk, sqlite: SqlOutbox, store: Store
    ) -> None:
        queue = await shop.queue()
        circuit = CircuitState()
        async with Proxy("127.0.0.1", guarded.port) as proxy:
            to = RabbitMQPublisher(bob(guarded, port=proxy.port), queue=queue, connect_timeout="500ms", stuck="500ms")
            await store.add(mixed(["a", "b"], 10))
            async with relay(sqlite(), stream(to, max_attempts=1), observers=[circuit]) as running:
                await settled(store, {Status.PUBLISHED: 20})
                # The network is gone
                await proxy.drop()
                await store.add(mixed(["a", "b"], 10, first=11))
                await until(lambda: circuit.state == "open")
                assert await counts(store) == {Status.PUBLISHED: 20, Status.PENDING: 20}
                # A right is gone when it is back
                guarded.ctl("set_permissions", "bob", ".*", "^$", ".*")
                await proxy.heal()
                await until(lambda: "permission to write" in str(worker_of(running)._destination.breaker.error))
                assert await counts(store) == {Status.PUBLISHED: 20, Status.PENDING: 20}
                guarded.ctl("set_permissions", "bob", ".*", BOBS, ".*")
                await settled(store, {Status.PUBLISHED: 40}, seconds=40)
        assert await attempts(store) == [1] * 40

    async def test_a_full_queue_costs_no_event_an_attempt(
        self, guarded: RabbitMQ, shop: Desk, sqlite: SqlOutbox, store: Store
    ) -> None:
        queue = await shop.queue("classic", max_length=5, overflow="reject-publish")
        await store.add(mixed([f"k{n}" for n in range(10)], 2))
        circuit = CircuitState()
        to = RabbitMQPublisher(guarded.url, queue=queue)
        found: list[str] = []
        async with relay(sqlite(), stream(to, max_attempts=1), observers=[circuit]):
            await until(lambda: circuit.state == "open")
            assert (await counts(store)).get(Status.DEAD) is None

            async def taken() -> int:
                found.extend(each.event_id for each in await shop.read(queue))
                return len(set(found))

            await eventually(taken, lambda count: count == 20, 40)
            await settled(store, {Status.PUBLISHED: 20})
        assert await attempts(store) == [1] * 20


class TestSource:
    async def test_each_refusal_is_one_sentence_with_its_reason(
        self, guarded: RabbitMQ, files: Certificates, shop: Desk
    ) -> None:
        queue = await shop.queue(single_active_consumer=True)
        guarded.ctl("set_permissions", "carol", ".*", "^$", "^$")
        tls = f"amqps://127.0.0.1:{guarded.settings['listeners.ssl.default']}"
        for url, said in (
            (bob(guarded, "guess"), "refuses this client: .*; correct its user and password$"),
            (f"amqp://127.0.0.1:{guarded.port}/nope", "the vhost 'nope' does not exist"),
            (tls, "TLS was refused"),
            (bob(guarded, port=free_port()), "cannot be reached: Connection refused"),
            (
                f"amqp://carol:secret@127.0.0.1:{guarded.port}",
                "cannot be read: .*access to queue .* refused for user 'carol'; give this user permission to read$",
            ),
        ):
            source = RabbitMQSource(url, queue=queue)
            with pytest.raises(Outage, match=said) as caught:
                await source.open("cards", Reader(source, 1.0))
            await source.close()
            assert "guess" not in str(caught.value)
            assert "secret" not in str(caught.value)
            assert "relay" not in str(caught.value)
            assert "\n" not in str(caught.value)
        # With TLS, and the right certificates
        source = RabbitMQSource(tls, queue=queue, cafile=str(files.authority), certfile=str(files.client))
        reader = Reader(source, 30.0)
        await source.open("cards", reader)
        await shop.channel.basic_publish(b"1", routing_key=queue)
        assert [message.body for message in await reader.read(1)] == [b"1"]
        await source.close()
