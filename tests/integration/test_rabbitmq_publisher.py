import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage
from pillarbox.publisher import PUBLISHED, UNTRIED, Result
from pillarbox.publishers.rabbitmq import RabbitMQPublisher, addresses
from pillarbox.urls import publisher_from_url
from proof.proxy import Proxy
from servers import RabbitMQ
from servers.fixtures import OwnServer
from servers.process import free_port
from tests.integration.rabbit import Desk, Open, assert_key_order, desk, numbered, publish, publish_rest, publishers
from tests.integration.relays import eventually, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def shop(rabbitmq: RabbitMQ) -> AsyncIterator[Desk]:
    async with desk(rabbitmq.url) as found:
        yield found


@pytest_asyncio.fixture
async def publisher(rabbitmq: RabbitMQ) -> AsyncIterator[Open]:
    async with publishers(rabbitmq.url) as open_:
        yield open_


class TestMessages:
    async def test_properties_headers_and_body(self, shop: Desk, publisher: Open) -> None:
        queue = await shop.queue()
        event = make_event(type="order.created", headers={"region": "ø"}, aggregate_id="7")
        assert await publish(await publisher(queue=queue), [event]) == [PUBLISHED]
        (found,) = await shop.read(queue)
        properties = found.properties
        assert found.body == event.payload
        assert (properties.message_id, properties.message_type) == (str(event.id), "order.created")
        assert (properties.content_type, properties.delivery_mode) == (event.content_type, 2)
        assert properties.timestamp == event.occurred_at.replace(microsecond=0)
        assert properties.headers["region"] == "ø"
        assert properties.headers["event_id"] == str(event.id)

    async def test_an_event_from_before_the_protocols_first_instant(self, shop: Desk, publisher: Open) -> None:
        queue = await shop.queue()
        event = make_event(occurred_at=datetime(1969, 12, 31, tzinfo=UTC))
        assert await publish(await publisher(queue=queue), [event]) == [PUBLISHED]
        (found,) = await shop.read(queue)
        assert found.properties.timestamp is None
        assert found.properties.headers["occurred_at"].startswith("1969-12-31")

    async def test_cloudevents_have_text_headers_and_no_second_content_type(self, shop: Desk, publisher: Open) -> None:
        queue = await shop.queue()
        event = make_event(headers={"ce-source": "mine", "Content-Type": "mine"})
        opened = await publisher(queue=queue, envelope="cloudevents", source="/shop")
        assert await publish(opened, [event]) == [PUBLISHED]
        (found,) = await shop.read(queue)
        assert found.properties.headers["ce-source"] == "/shop"
        assert found.properties.headers["ce-id"] == str(event.id)
        assert found.properties.content_type == event.content_type
        assert not [name for name in found.properties.headers if name.lower() == "content-type"]

    async def test_the_exchange_is_the_topic_and_the_routing_key_the_type(self, shop: Desk, publisher: Open) -> None:
        default, own, queue, other = (
            await shop.exchange(),
            await shop.exchange(),
            await shop.queue(),
            await shop.queue(),
        )
        await shop.bind(queue, default)
        await shop.bind(other, own)
        events = [
            make_event(type="order.created"),
            make_event(type="order.paid", routing_key="eu.paid"),
            make_event(type="order.sent", topic=own),
        ]
        assert await publish(await publisher(exchange=default), events) == [PUBLISHED] * 3
        assert [each.routing_key for each in await shop.read(queue)] == ["order.created", "eu.paid"]
        assert [each.routing_key for each in await shop.read(other)] == ["order.sent"]

    async def test_the_key_as_routing_key(self, shop: Desk, publisher: Open) -> None:
        exchange, queue = await shop.exchange(), await shop.queue()
        await shop.bind(queue, exchange)
        events = [make_event(key="order-7"), make_event(key=None)]
        assert await publish(await publisher(exchange=exchange, route="key"), events) == [PUBLISHED] * 2
        assert {each.routing_key for each in await shop.read(queue)} == {"order-7", str(events[1].id)}


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("amqp://localhost", "an exchange or a queue"),
            ("amqp://localhost?queue=a&exchange=b", "and not both"),
            ("amqp://localhost?queu=a", "did you mean 'queue'"),
            ("amqp://localhost?queue=a&connections=no", "connections='no'"),
            ("amqp://localhost?queue=a&connections=0", "use 1 or more"),
            ("amqp://localhost?queue=a&max_bytes=0", "max_bytes=0"),
            ("amqp://localhost?queue=a&route=keys", "use one of: routing_key, key"),
            ("amqp://localhost?queue=a&stuck=never", "stuck"),
            ("amqp://localhost?queue=a&headers=os:sep", "not a function"),
            ("amqp://localhost?queue=a&cafile=x.pem", "write amqps"),
            ("amqps://localhost?queue=a&cafile=missing.pem", "cafile='missing.pem' cannot be read"),
            ("amqps://localhost?queue=a&certfile=missing.pem", "certfile='missing.pem'"),
            ("amqps://localhost?queue=a&keyfile=missing.pem", "keyfile= needs certfile="),
            ("amqp://?queue=a", "names no host"),
            ("amqp://localhost/a/b?queue=a", "more than a vhost"),
            ("amqp://localhost:port?queue=a", "cannot be read"),
            (f"amqp://localhost?queue={'q' * 256}", "not a name"),
        ],
    )
    async def test_a_wrong_setting_names_its_remedy(self, url: str, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            publisher_from_url(url)

    async def test_no_part_of_a_password_is_shown(self) -> None:
        for url in ("amqp://u:hunter2/@h?queue=a", "amqp://u:hunter2#@h?queue=a", "amqp://u:[hunter2@h?queue=a"):
            with pytest.raises(ConfigError) as caught:
                publisher_from_url(url)
            assert "hunter2" not in str(caught.value)

    async def test_the_description_has_no_login(self) -> None:
        publisher = publisher_from_url("amqp://u:hunter2@h/%2Fshop?queue=a")
        assert publisher.description == "rabbitmq h:5672//shop"


class TestRefusals:
    async def test_a_missing_default_exchange_is_an_outage(self, shop: Desk, publisher: Open) -> None:
        (outcome,) = await publish(await publisher(exchange="nobody-made-it"), [make_event()])
        assert outcome.is_outage
        assert "exchange 'nobody-made-it'" in (outcome.error or "")
        assert "create it" in (outcome.error or "")

    async def test_a_missing_default_queue_is_an_outage_until_it_is_made(
        self, shop: Desk, publisher: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(addresses, "WAIT_SECONDS", (0.0, 0.0))
        opened, event = await publisher(queue="made-later"), make_event()
        (outcome,) = await publish(opened, [event])
        assert outcome.is_outage
        assert "queue 'made-later'" in (outcome.error or "")
        await shop.channel.queue_declare("made-later", durable=True)
        assert await publish(opened, [event]) == [PUBLISHED]
        await shop.channel.queue_delete("made-later")
        assert (await publish(opened, [make_event()]))[0].is_outage

    async def test_an_own_exchange_that_is_missing_waits_and_harms_nobody(
        self, shop: Desk, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = await publisher(queue=await shop.queue())
        events = [make_event(key="a", topic="missing"), make_event(key="a"), make_event(key="b"), make_event(key=None)]
        first, *rest = await publish(opened, events)
        assert (first.result, first.charged) == (Result.RETRY, False)
        assert first.after_seconds == 1
        assert rest == [UNTRIED, PUBLISHED, PUBLISHED]
        assert [each.__dict__["action"] for each in caplog.records if "action" in each.__dict__] == ["topic_missing"]

    async def test_an_exchange_that_vanishes_costs_its_neighbours_nothing(self, shop: Desk, publisher: Open) -> None:
        own, queue = await shop.exchange(), await shop.queue()
        await shop.bind(queue, own)
        opened = await publisher(queue=queue)
        assert await publish(opened, [make_event(topic=own)]) == [PUBLISHED]
        await shop.channel.exchange_delete(own)
        gone, kept = make_event(topic=own), [make_event() for _ in range(20)]
        lost, *others = await publish(opened, [gone, *kept])
        assert (lost.result, lost.charged) == (Result.RETRY, False)
        assert own in (lost.error or "")
        await publish_rest(opened, [event for event, each in zip(kept, others, strict=True) if each is not PUBLISHED])
        assert {each.event_id for each in await shop.read(queue)} >= {str(event.id) for event in kept}

    async def test_missing_exchanges_cost_their_neighbours_nothing(
        self, shop: Desk, publisher: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Their waits end while the server is asked about the others: a message would close the connection.
        monkeypatch.setattr(addresses, "WAIT_SECONDS", (0.0, 0.0))
        opened = await publisher(queue=await shop.queue())
        missing = [make_event(key=f"m{n}", topic=f"missing-{n}") for n in range(30)]
        outcomes = await publish(opened, [*missing, *numbered(5, 4)])
        assert {(each.result, each.charged) for each in outcomes[:30]} == {(Result.RETRY, False)}
        assert outcomes[30:] == [PUBLISHED] * 20

    async def test_a_routing_key_without_a_queue_waits_uncharged(self, shop: Desk, publisher: Open) -> None:
        exchange, queue = await shop.exchange(), await shop.queue()
        await shop.bind(queue, exchange, "order.*")
        opened = await publisher(exchange=exchange)
        events = [make_event(type="order.created", key="a"), make_event(type="invoice.sent", key="b")]
        good, bad = await publish(opened, events)
        assert good is PUBLISHED
        assert (bad.result, bad.charged) == (Result.RETRY, False)
        assert "'invoice.sent'" in (bad.error or "")
        assert bad.after_seconds == 1
        # The longer nobody binds a queue, the longer it waits
        opened._addresses._keys["", "invoice.sent"] = opened._addresses._keys["", "invoice.sent"]._replace(
            since=-1000.0
        )
        assert (await publish(opened, events[1:]))[0].after_seconds == 30
        await shop.bind(queue, exchange, "invoice.*")
        assert await publish(opened, events[1:]) == [PUBLISHED]

    async def test_a_full_queue_is_uncharged_and_other_queues_go_on(self, shop: Desk, publisher: Open) -> None:
        exchange = await shop.exchange()
        full = await shop.queue("classic", max_length=1, overflow="reject-publish")
        free = await shop.queue()
        await shop.bind(full, exchange, "full")
        await shop.bind(free, exchange, "free")
        opened = await publisher(exchange=exchange)
        fill = make_event(routing_key="full", key=None)
        assert await publish(opened, [fill]) == [PUBLISHED]
        events = [make_event(routing_key=name, key=name) for name in ("full", "full", "free")]
        refused, behind, other = await publish(opened, events)
        assert (refused.result, refused.charged, other) == (Result.RETRY, False, PUBLISHED)
        assert "full" in (refused.error or "")
        assert behind == UNTRIED
        assert len(await shop.read(full)) == 1
        assert await publish(opened, events[:1]) == [PUBLISHED]

    async def test_fields_that_the_protocol_cannot_hold_are_rejected(self, shop: Desk, publisher: Open) -> None:
        queue = await shop.queue()
        bad = [
            make_event(routing_key="ø" * 200, topic="amq.topic"),
            make_event(topic="ø" * 200),
            make_event(type="ø" * 200),
            make_event(content_type="text/" + "ø" * 200),
            make_event(headers={"n" * 300: "long name"}),
            # The server closes the channel for these, because it would route by a list in them.
            make_event(headers={"CC": "boss@shop.example"}),
            make_event(headers={"BCC": "boss@shop.example"}),
        ]
        good = make_event()
        outcomes = await publish(await publisher(queue=queue), [*bad, good])
        assert [each.result for each in outcomes] == [Result.REJECTED] * 7 + [Result.PUBLISHED]
        assert all(each.error for each in outcomes[:7])
        assert [each.event_id for each in await shop.read(queue)] == [str(good.id)]

    async def test_headers_larger_than_a_frame_are_rejected(self, shop: Desk, publisher: Open) -> None:
        opened = await publisher(queue=await shop.queue(), headers=lambda event: [("h", b"x" * 200_000)])
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.result is Result.REJECTED
        assert "headers take" in (outcome.error or "")

    async def test_a_header_builder_that_fails_rejects_the_event(self, shop: Desk, publisher: Open) -> None:
        opened = await publisher(queue=await shop.queue(), headers=lambda event: [("h", b"\xff secret")])
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.result is Result.REJECTED
        assert "UnicodeDecodeError" in (outcome.error or "")
        assert "secret" not in (outcome.error or "")

    async def test_events_without_an_address_wait(self, publisher: Open) -> None:
        (outcome,) = await publish(await publisher(exchange="*"), [make_event()])
        assert (outcome.result, outcome.charged) == (Result.RETRY, False)
        assert "no topic" in (outcome.error or "")

    async def test_a_publisher_that_is_not_open_says_so(self, rabbitmq: RabbitMQ) -> None:
        (outcome,) = await publish(RabbitMQPublisher(rabbitmq.url, queue="q"), [make_event()])
        assert outcome.is_outage
        assert "call open()" in (outcome.error or "")


class TestOutages:
    async def test_away_at_the_start(self, publisher: Open) -> None:
        with pytest.raises(Outage, match=r"cannot be reached: Connection refused$"):
            await publisher(f"amqp://127.0.0.1:{free_port()}", queue="q")

    async def test_a_host_without_an_address(self, publisher: Open) -> None:
        with pytest.raises(Outage, match="cannot be reached"):
            await publisher("amqp://nobody.invalid", queue="q")

    @pytest.mark.long
    async def test_a_full_memory_makes_the_call_wait_and_says_why(
        self, own_server: OwnServer, publisher: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pillarbox.publishers.rabbitmq.sender.QUIET_SECONDS", 0.2)
        server = own_server(RabbitMQ)
        async with desk(server.url) as shop:
            queue = await shop.queue()
            # Longer than the silence that would be taken for a stuck queue.
            opened = await publisher(server.url, queue=queue, stuck="1s")
            await asyncio.to_thread(server.ctl, "set_vm_memory_high_watermark", "absolute", "1")
            events = numbered(3, 4)
            call = asyncio.create_task(publish(opened, events))
            await until(lambda: any("memory or its disk is full" in each.message for each in caplog.records))
            await asyncio.wait([call], timeout=1.5)
            assert not call.done()
            await asyncio.to_thread(server.ctl, "set_vm_memory_high_watermark", "0.6")
            assert await call == [PUBLISHED] * 12
            assert "destination_back" in [each.__dict__.get("action") for each in caplog.records]
            arrived = [each.event_id for each in await shop.read(queue)]
            assert len(arrived) == 12
            assert_key_order(events, arrived)

    @pytest.mark.long
    async def test_killed_in_the_middle_of_calls(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(RabbitMQ)
        async with desk(server.url) as shop:
            queue = await shop.queue("classic")
        opened = await publisher(server.url, queue=queue)
        events = numbered(20, 40)
        call = asyncio.create_task(publish(opened, events))
        async with desk(server.url) as shop:
            await eventually(lambda: shop.count(queue))
            server.kill()
        outcomes = await call
        assert any(each.is_outage for each in outcomes)
        assert not [each for each in outcomes if each.result is Result.RETRY]
        rest = [event for event, each in zip(events, outcomes, strict=True) if each is not PUBLISHED]
        assert (await publish(opened, events[:1]))[0].is_outage
        server.start()
        await publish_rest(opened, rest)
        async with desk(server.url) as shop:
            assert_key_order(events, [each.event_id for each in await shop.read(queue)])

    async def test_paused_for_longer_than_it_may_be_silent(
        self, own_server: OwnServer, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = own_server(RabbitMQ)
        async with desk(server.url) as shop:
            queue = await shop.queue()
        opened = await publisher(server.url, queue=queue, stuck="1s", connect_timeout="500ms")
        server.pause()
        events = numbered(5, 10)
        outcomes = await publish(opened, events)
        assert outcomes[0].is_outage
        assert not [each for each in outcomes if each.result is not Result.UNTRIED]
        server.resume()
        await publish_rest(opened, events)
        async with desk(server.url) as shop:
            assert_key_order(events, [each.event_id for each in await shop.read(queue)])

    async def test_cut_in_the_middle_of_calls(self, rabbitmq: RabbitMQ, shop: Desk, publisher: Open) -> None:
        queue = await shop.queue()
        async with Proxy("127.0.0.1", rabbitmq.port) as proxy:
            opened = await publisher(f"amqp://127.0.0.1:{proxy.port}", queue=queue)
            events = numbered(20, 40)
            rest = events
            for _ in range(3):
                await proxy.cut_after(60_000, "to_server")
                outcomes = await publish(opened, rest)
                assert not [each for each in outcomes if each.result is Result.RETRY]
                assert PUBLISHED in outcomes
                assert any(each.is_outage for each in outcomes)
                rest = [event for event, each in zip(rest, outcomes, strict=True) if each is not PUBLISHED]
            await proxy.heal()
            await publish_rest(opened, rest)
            await opened.close()
        assert_key_order(events, [each.event_id for each in await shop.read(queue)])

    async def test_a_closed_publisher_leaves_no_connection(
        self, rabbitmq: RabbitMQ, shop: Desk, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = await publisher(queue=await shop.queue())
        await publish(opened, [make_event()])
        with caplog.at_level(logging.WARNING):
            await opened.close()
        assert not [each for each in caplog.records if each.name.startswith("aiormq")]
