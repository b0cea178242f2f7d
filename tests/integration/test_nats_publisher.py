import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import unquote

import pytest
import pytest_asyncio
from nats.js.api import DiscardPolicy, StorageType

from pillarbox.conformance.events import make_event
from pillarbox.envelopes import NatsMessage
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event
from pillarbox.finding import State
from pillarbox.publisher import PUBLISHED, UNTRIED, Result
from pillarbox.publishers.nats import NatsPublisher
from pillarbox.urls import publisher_from_url
from proof.proxy import Proxy
from servers import Nats
from servers.fixtures import OwnServer
from servers.process import free_port
from tests.integration.certificates import Certificates, certificates
from tests.integration.jetstream import Desk, desk
from tests.integration.publishing import assert_key_order, numbered, publish, publish_rest, unpublished
from tests.integration.relays import eventually

pytestmark = pytest.mark.asyncio

Open = Callable[..., Awaitable[NatsPublisher]]


@pytest_asyncio.fixture
async def shop(nats: Nats) -> AsyncIterator[Desk]:
    async with desk(nats.url) as found:
        yield found


@pytest_asyncio.fixture
async def publisher(nats: Nats) -> AsyncIterator[Open]:
    """Opens publishers, and closes them with the test."""
    async with AsyncExitStack() as stack:

        async def make(url: str = nats.url, **settings: Any) -> NatsPublisher:
            made = NatsPublisher(url, **settings)
            stack.push_async_callback(made.close)
            await made.open()
            return made

        yield make


class TestMessages:
    async def test_headers_and_body(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream()
        own = {"region": "ø %", "two lines": "a\r\nNats-Rollup: all", " odd:name": "x"}
        event = make_event(type="order.created", headers=own, key="Zoë 7")
        assert await publish(await publisher(subject=stream), [event]) == [PUBLISHED]
        (found,) = await shop.read(stream)
        assert (found.event_id, found.subject, found.body) == (str(event.id), stream, event.payload)
        assert found.headers["event_id"] == str(event.id)
        assert found.headers["event_key"] == "Zoë 7"
        assert {unquote(name): value for name, value in found.headers.items()}.items() >= own.items()
        assert "Nats-Rollup" not in found.headers

    async def test_own_headers_are_no_commands_to_the_server(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream(allow_rollup_hdrs=True)
        opened = await publisher(subject=stream)
        commands = {"Nats-Rollup": "all", "nats-expected-last-sequence": "99", " Nats-TTL": "1s", "Nats-Msg-Id": "x"}
        events = [make_event(), make_event(headers=commands)]
        assert await publish(opened, events) == [PUBLISHED] * 2
        found = await shop.read(stream)
        assert {each.event_id for each in found} == {str(event.id) for event in events}

    async def test_cloudevents(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream()
        event = make_event(headers={"ce-source": "mine", "Content-Type": "mine"}, aggregate_id="ø")
        opened = await publisher(subject=stream, envelope="cloudevents", source="/shop")
        assert await publish(opened, [event]) == [PUBLISHED]
        ((*_, headers),) = await shop.read(stream)
        assert (headers["ce-source"], headers["ce-id"], headers["ce-subject"]) == ("/shop", str(event.id), "ø")
        assert headers["ce-datacontenttype"] == headers["content-type"] == event.content_type

    async def test_structured_cloudevents(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream()
        opened = await publisher(subject=stream, envelope="cloudevents_structured")
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        ((*_, headers),) = await shop.read(stream)
        assert headers["content-type"].startswith("application/cloudevents+json")
        assert not [name for name in headers if name.startswith("ce-")]

    async def test_an_envelope_of_ones_own(self, shop: Desk, publisher: Open) -> None:
        stream, headers = await shop.stream(), {"place": "ø"}
        opened = await publisher(subject=stream, envelope=lambda event: NatsMessage(event.payload, headers))
        assert await publish(opened, [make_event(), make_event()]) == [PUBLISHED] * 2
        assert headers == {"place": "ø"}
        headers["place"] *= 600_000  # more than the server takes, but only in bytes
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.result is Result.REJECTED
        assert "takes 1200" in (outcome.error or "")
        broken: Any = {"number": 7}
        opened = await publisher(subject=stream, envelope=lambda event: NatsMessage(b"", broken))
        assert (await publish(opened, [make_event()]))[0].result is Result.REJECTED

    async def test_the_subject_is_the_routing_key_or_the_topic(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream("shop.>")
        opened = await publisher(subject="shop.default")
        events = [
            make_event(),
            make_event(topic="shop.topic"),
            make_event(topic="shop.topic", routing_key="shop.ø.key"),
        ]
        assert await publish(opened, events) == [PUBLISHED] * 3
        found = {each.event_id: each.subject for each in await shop.read(stream)}
        assert [found[str(event.id)] for event in events] == ["shop.default", "shop.topic", "shop.ø.key"]
        await shop.manager.delete_stream(stream)

    async def test_a_copy_is_dropped_and_counted(
        self, shop: Desk, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        stream, event = await shop.stream(), make_event()
        opened = await publisher(subject=stream)
        with caplog.at_level(logging.INFO):
            assert await publish(opened, [event]) == [PUBLISHED]
            assert await publish(opened, [event]) == [PUBLISHED]
        assert await shop.count(stream) == 1
        (line,) = [each for each in caplog.records if each.__dict__.get("action") == "copies_dropped"]
        assert line.__dict__["events"] == 1
        assert opened.features.deduplicates


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("nats://localhost", "a NATS publisher a subject"),
            ("nats://localhost?subjet=a", "did you mean 'subject'"),
            ("nats://localhost?subject=a b", "no spaces"),
            ("nats://localhost?subject=a.*", "no wildcards"),
            ("nats://localhost?subject=a..b", "is empty"),
            ("nats://localhost?subject=$JS.API.INFO", "the server's own"),
            (f"nats://localhost?subject={'s' * 1025}", "at most 1024 bytes"),
            ("nats://localhost?subject=a&stream=x.y", "not the name of a stream"),
            ("nats://localhost?subject=a&connections=no", "connections='no'"),
            ("nats://localhost?subject=a&connections=0", "use 1 or more"),
            ("nats://localhost?subject=a&stuck=never", "stuck"),
            ("nats://localhost?subject=a&envelope=row", "did you mean 'raw'"),
            ("nats://localhost?subject=a&headers=os:sep", "not a function"),
            ("nats://localhost?subject=a&cafile=x.pem", "write tls"),
            ("tls://localhost?subject=a&cafile=missing.pem", "cafile='missing.pem' cannot be read"),
            ("tls://localhost?subject=a&certfile=missing.pem", "certfile='missing.pem'"),
            ("tls://localhost?subject=a&keyfile=missing.pem", "keyfile= needs certfile="),
            ("nats://?subject=a", "names no host"),
            ("nats://localhost,?subject=a", "names no host"),
            ("nats://localhost/a?subject=a", "more than hosts"),
            ("nats://localhost:port?subject=a", "cannot be read"),
        ],
    )
    async def test_a_wrong_setting_names_its_remedy(self, url: str, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            publisher_from_url(url)

    async def test_no_part_of_a_password_is_shown(self) -> None:
        for url in ("nats://u:hunter2/@h?subject=a", "nats://u:hunter2#@h?subject=a", "nats://u:[hunter2@h?subject=a"):
            with pytest.raises(ConfigError) as caught:
                publisher_from_url(url)
            assert "hunter2" not in str(caught.value)

    async def test_the_description_has_no_login(self) -> None:
        publisher = publisher_from_url("nats://u:hunter2@h,[::1]:4223?subject=a")
        assert publisher.description == "nats h:4222,[::1]:4223"


class TestRefusals:
    async def test_a_default_subject_without_a_stream_is_an_outage_until_there_is_one(
        self, shop: Desk, publisher: Open
    ) -> None:
        opened, event = await publisher(subject="made.later"), make_event()
        (outcome,) = await publish(opened, [event])
        assert outcome.is_outage
        assert "'made.later' now; make one" in (outcome.error or "")
        stream = await shop.stream("made.later")
        assert await publish(opened, [event]) == [PUBLISHED]
        await shop.manager.delete_stream(stream)
        assert (await publish(opened, [make_event()]))[0].is_outage

    async def test_an_own_subject_without_a_stream_waits_and_harms_nobody(
        self, shop: Desk, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = await publisher(subject=await shop.stream())
        events = [make_event(key="a", topic="missing"), make_event(key="a"), make_event(key="b"), make_event(key=None)]
        first, *rest = await publish(opened, events)
        assert (first.result, first.charged, first.ambiguous) == (Result.RETRY, False, True)
        assert first.after_seconds == 1
        assert rest == [UNTRIED, PUBLISHED, PUBLISHED]
        assert [each.__dict__["action"] for each in caplog.records if "action" in each.__dict__] == ["topic_missing"]

    async def test_a_subject_that_another_program_answers_is_not_stored(self, shop: Desk, publisher: Open) -> None:
        async def answer(message: Any) -> None:
            await message.respond(b"[1]")

        await shop.client.subscribe("echo", cb=answer)
        await shop.client.flush()
        (outcome,) = await publish(await publisher(subject="echo"), [make_event()])
        assert outcome.is_outage
        assert "no stream" in (outcome.error or "")

    async def test_a_full_stream_is_an_outage_and_loses_nothing(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream(max_msgs=2, discard=DiscardPolicy.NEW)
        opened, events = await publisher(subject=stream), [make_event(key="a") for _ in range(4)]
        outcomes = await publish(opened, events)
        assert outcomes[:2] == [PUBLISHED] * 2
        assert outcomes[2].is_outage
        assert "takes no more: maximum messages exceeded" in (outcomes[2].error or "")
        await shop.manager.purge_stream(stream)
        assert await publish(opened, events[2:]) == [PUBLISHED] * 2

    async def test_another_stream_than_the_named_one(self, shop: Desk, publisher: Open) -> None:
        stream, other = await shop.stream(), await shop.stream()
        opened = await publisher(subject=stream, stream=other)
        assert "another stream" in ((await publish(opened, [make_event()]))[0].error or "")
        opened = await publisher(subject=stream, stream=stream)
        right, wrong = await publish(opened, [make_event(), make_event(topic=other)])
        assert (right, wrong.result, wrong.charged) == (PUBLISHED, Result.RETRY, False)
        assert await shop.count(other) == 0

    @pytest.mark.parametrize("how", ["no_ack", "sealed"])
    async def test_a_stream_that_confirms_nothing_is_an_outage(self, how: str, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream(no_ack=how == "no_ack")
        if how == "sealed":
            config = (await shop.manager.stream_info(stream)).config
            await shop.manager.update_stream(config, sealed=True)
        (outcome,) = await publish(await publisher(subject=stream), [make_event()])
        assert outcome.is_outage
        assert stream in (outcome.error or "")

    async def test_a_message_above_the_limit_of_its_stream_is_rejected(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream(max_msg_size=2000)
        events = [make_event(key="a", payload=b"x" * 2001), make_event(key="a"), make_event(key="b")]
        large, behind, other = await publish(await publisher(subject=stream), events)
        assert (large.result, behind, other) == (Result.REJECTED, UNTRIED, PUBLISHED)
        assert "raise max_msg_size" in (large.error or "")

    async def test_subjects_that_no_server_takes_are_rejected(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream()
        names = ["a b", "a.*", ">", "a..b", ".a", "a\r\nPUB x 0", "$JS.API.STREAM.DELETE." + stream, "ø" * 600]
        bad = [make_event(topic=name, key=None) for name in names]
        bad.append(make_event(routing_key="_INBOX.x", key=None))
        good = make_event()
        outcomes = await publish(await publisher(subject=stream), [*bad, good])
        assert [each.result for each in outcomes] == [Result.REJECTED] * len(bad) + [Result.PUBLISHED]
        assert all("is impossible" in (each.error or "") for each in outcomes[:-1])
        assert [each.event_id for each in await shop.read(stream)] == [str(good.id)]

    async def test_a_header_builder_that_fails_rejects_the_event(self, shop: Desk, publisher: Open) -> None:
        def fail(event: Event) -> list[tuple[str, bytes]]:
            raise RuntimeError("secret")

        (outcome,) = await publish(await publisher(subject=await shop.stream(), headers=fail), [make_event()])
        assert outcome.result is Result.REJECTED
        assert "RuntimeError" in (outcome.error or "")
        assert "secret" not in (outcome.error or "")

    async def test_events_without_a_subject_wait(self, publisher: Open) -> None:
        (outcome,) = await publish(await publisher(subject="*"), [make_event()])
        assert (outcome.result, outcome.charged) == (Result.RETRY, False)
        assert "neither a topic nor a routing key" in (outcome.error or "")

    async def test_a_publisher_that_is_not_open_says_so(self, nats: Nats) -> None:
        (outcome,) = await publish(NatsPublisher(nats.url, subject="s"), [make_event()])
        assert outcome.is_outage
        assert "call open()" in (outcome.error or "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(request: pytest.FixtureRequest, files: Certificates) -> Iterator[Nats]:
    """A server with TLS, small messages, and users: bob and dave may publish to good.> only, carol may read no
    answers."""
    request.getfixturevalue("nats")  # skips where there is no NATS
    users = """{ users: [
      { user: root, password: "p@ss/word" }
      { user: bob, password: secret, permissions: { publish: ["good.>", "$JS.API.>"], subscribe: "_INBOX.>" } }
      { user: dave, password: secret, permissions: { publish: ["good.>"], subscribe: "_INBOX.>" } }
      { user: carol, password: secret, permissions: { publish: ">", subscribe: "nothing" } }
    ] }"""
    tls = f'{{ cert_file: "{files.server}", key_file: "{files.server_key}", ca_file: "{files.authority}" }}'
    with Nats(settings={"tls": tls, "authorization": users, "max_payload": "20000"}) as server:
        yield server


@pytest_asyncio.fixture
async def guarded_shop(guarded: Nats, files: Certificates) -> AsyncIterator[Desk]:
    trusted = ssl.create_default_context(cafile=str(files.authority))
    async with desk(guarded.url, tls=trusted, user="root", password="p@ss/word") as found:
        yield found


class TestAccess:
    async def test_tls_and_a_login(
        self, guarded: Nats, guarded_shop: Desk, files: Certificates, publisher: Open
    ) -> None:
        stream = await guarded_shop.stream()
        url = f"tls://root:p%40ss%2Fword@localhost:{guarded.port}"
        opened = await publisher(url, subject=stream, cafile=str(files.authority), certfile=str(files.client))
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        assert await guarded_shop.count(stream) == 1

    async def test_a_certificate_that_is_not_trusted_is_an_outage(self, guarded: Nats, publisher: Open) -> None:
        for scheme in ("tls", "nats"):
            with pytest.raises(Outage, match=r"TLS was refused \(.*certificate.*\); correct cafile"):
                await publisher(f"{scheme}://root:x@127.0.0.1:{guarded.port}", subject="s")

    async def test_a_certificate_for_another_name_is_an_outage(
        self, guarded: Nats, files: Certificates, publisher: Open
    ) -> None:
        with pytest.raises(Outage, match="TLS was refused"):
            await publisher(f"tls://127.1:{guarded.port}", subject="s", cafile=str(files.authority))

    async def test_a_server_without_tls_learns_no_password(self, nats: Nats, publisher: Open) -> None:
        for login in ("", "bob:secret@", "token@"):
            with pytest.raises(Outage, match="offers no TLS"):
                await publisher(f"tls://{login}127.0.0.1:{nats.port}", subject="s")

    async def test_a_wrong_password_is_an_outage(self, guarded: Nats, files: Certificates, publisher: Open) -> None:
        for login in ("bob:wrong@", "token@", ""):
            with pytest.raises(Outage, match=r"refuses this client: .*; correct its user and password"):
                await publisher(f"tls://{login}127.0.0.1:{guarded.port}", subject="s", cafile=str(files.authority))

    async def test_a_user_who_may_read_no_answers(self, guarded: Nats, files: Certificates, publisher: Open) -> None:
        with pytest.raises(Outage, match=r"refuses this user: permissions violation for subscription"):
            await publisher(f"tls://carol:secret@127.0.0.1:{guarded.port}", subject="s", cafile=str(files.authority))

    async def test_subjects_without_permission(
        self, guarded: Nats, guarded_shop: Desk, files: Certificates, publisher: Open
    ) -> None:
        good, bad = await guarded_shop.stream("good.>"), await guarded_shop.stream("Bad")
        url = f"tls://bob:secret@127.0.0.1:{guarded.port}"
        opened = await publisher(url, subject="good.a", cafile=str(files.authority))
        own, other = make_event(key="a", topic="Bad"), make_event(key="b")
        outcomes = await publish(opened, [own, make_event(key="a"), other])
        assert (outcomes[0].result, outcomes[0].charged) == (Result.RETRY, False)
        assert "give it the permission" in (outcomes[0].error or "")
        assert outcomes[1:] == [UNTRIED, PUBLISHED]
        opened = await publisher(url, subject="Bad", cafile=str(files.authority))
        assert (await publish(opened, [make_event()]))[0].is_outage
        assert await guarded_shop.count(bad) == 0
        await guarded_shop.manager.delete_stream(good)

    async def test_a_user_who_may_not_ask_about_streams_publishes(
        self, guarded: Nats, guarded_shop: Desk, files: Certificates, publisher: Open
    ) -> None:
        stream = await guarded_shop.stream("good.b")
        url = f"tls://dave:secret@127.0.0.1:{guarded.port}"
        opened = await publisher(url, subject="good.b", cafile=str(files.authority), connect_timeout="500ms")
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        with pytest.raises(Outage, match="does not tell about its streams"):
            await opened.examine()
        await guarded_shop.manager.delete_stream(stream)

    async def test_the_servers_limit_is_learnt(
        self, guarded: Nats, guarded_shop: Desk, files: Certificates, publisher: Open
    ) -> None:
        url = f"tls://root:p%40ss%2Fword@localhost:{guarded.port}"
        opened = await publisher(url, subject=await guarded_shop.stream(), cafile=str(files.authority))
        sizes = (20_000, 19_900, 15_000)
        outcomes = await publish(opened, [make_event(payload=b"x" * size, key=None) for size in sizes])
        # The limit is for the headers too.
        assert [each.result for each in outcomes] == [Result.REJECTED, Result.REJECTED, Result.PUBLISHED]
        assert "takes at most 20000" in (outcomes[0].error or "")


class TestExamined:
    async def test_a_stream_that_is_well(self, shop: Desk, publisher: Open) -> None:
        opened = await publisher(subject=await shop.stream(duplicate_window=60, max_age=3600))
        found = {each.check: each for each in await opened.examine()}
        assert [name for name, each in found.items() if each.state is not State.OK] == ["durability"]
        assert "has 1 copy" in found["durability"].sentence
        assert "1,048,576 bytes" in found["limits"].sentence

    async def test_a_stream_that_loses(self, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream(storage=StorageType.MEMORY, max_bytes=1_000_000, duplicate_window=1)
        found = {each.check: each for each in await (await publisher(subject=stream)).examine()}
        assert found["durability"].state is State.FAILED
        assert found["retention"].state is found["duplicates"].state is State.WARNING
        assert "max_bytes 1e+06" in found["retention"].sentence

    async def test_what_can_be_wrong_with_a_subject(self, shop: Desk, publisher: Open) -> None:
        (finding,) = await (await publisher(subject="nobody.took.it")).examine()
        assert "no stream takes subject 'nobody.took.it'" in finding.sentence
        stream = await shop.stream()
        (finding,) = await (await publisher(subject=stream, stream="other")).examine()
        assert "and not 'other'" in finding.sentence
        (finding,) = await (await publisher(subject=await shop.stream(no_ack=True))).examine()
        assert "confirms nothing" in finding.sentence


class TestOutages:
    async def test_away_at_the_start(self, publisher: Open) -> None:
        with pytest.raises(Outage, match=r"cannot be reached: .*; the relay tries again"):
            await publisher(f"nats://127.0.0.1:{free_port()}", subject="s")

    async def test_a_host_without_an_address(self, publisher: Open) -> None:
        with pytest.raises(Outage, match="cannot be reached"):
            await publisher("nats://nobody.invalid", subject="s")

    async def test_one_of_several_servers_is_enough(self, nats: Nats, shop: Desk, publisher: Open) -> None:
        url = f"nats://127.0.0.1:{free_port()},127.0.0.1:{nats.port}"
        assert await publish(await publisher(url, subject=await shop.stream()), [make_event()]) == [PUBLISHED]

    async def test_a_server_without_jetstream(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Nats, settings={"jetstream": "disabled"})
        opened = await publisher(server.url, subject="s")
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.is_outage
        with pytest.raises(Outage, match="has no JetStream"):
            await opened.examine()

    async def test_killed_in_the_middle_of_calls(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Nats)
        async with desk(server.url) as shop:
            stream = await shop.stream()
            opened = await publisher(server.url, subject=stream)
            events = numbered(20, 100)
            call = asyncio.create_task(publish(opened, events))
            await eventually(lambda: shop.count(stream))
        server.kill()
        outcomes = await call
        assert any(each.is_outage for each in outcomes)
        assert not [each for each in outcomes if each.result is Result.RETRY]
        rest = unpublished(events, outcomes)
        assert (await publish(opened, events[:1]))[0].is_outage
        server.start()
        await publish_rest(opened, rest)
        async with desk(server.url) as shop:
            assert_key_order(events, [each.event_id for each in await shop.read(stream)])

    async def test_paused_for_longer_than_it_may_be_silent(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Nats)
        async with desk(server.url) as shop:
            stream = await shop.stream()
        opened = await publisher(server.url, subject=stream, stuck="1s", connect_timeout="500ms")
        server.pause()
        # More than the sockets hold.
        events = [*numbered(5, 10), *(make_event(key=None, payload=b"0" * 900_000) for _ in range(10))]
        outcomes = await publish(opened, events)
        assert any(each.is_outage for each in outcomes)
        assert not [each for each in outcomes if each.result is not Result.UNTRIED]
        server.resume()
        await publish_rest(opened, events)
        async with desk(server.url) as shop:
            ids = {str(event.id) for event in events if event.key is not None}
            assert_key_order(events[:50], [each.event_id for each in await shop.read(stream) if each.event_id in ids])

    @pytest.mark.parametrize("direction", ["to_server", "to_client"])
    async def test_cut_in_the_middle_of_calls(self, direction: Any, nats: Nats, shop: Desk, publisher: Open) -> None:
        stream = await shop.stream()
        async with Proxy("127.0.0.1", nats.port) as proxy:
            opened = await publisher(f"nats://127.0.0.1:{proxy.port}", subject=stream)
            events = numbered(20, 60)
            rest = events
            for _ in range(3):
                await proxy.cut_after(30_000 if direction == "to_server" else 6_000, direction)
                outcomes = await publish(opened, rest)
                assert not [each for each in outcomes if each.result is Result.RETRY]
                assert PUBLISHED in outcomes
                assert any(each.is_outage for each in outcomes)
                rest = unpublished(rest, outcomes)
            await proxy.heal()
            await publish_rest(opened, rest)
            await opened.close()
        assert_key_order(events, [each.event_id for each in await shop.read(stream)])

    async def test_a_closed_publisher_leaves_nothing_behind(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Nats)
        async with desk(server.url) as shop:
            stream = await shop.stream()
        before = asyncio.all_tasks()
        opened = await publisher(server.url, subject=stream, stuck="200ms", connect_timeout="500ms")
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        server.pause()
        await publish(opened, [make_event(key=None, payload=b"0" * 900_000) for _ in range(10)])
        await opened.close()
        await eventually(lambda: asyncio.sleep(0, asyncio.all_tasks() == before))
        server.resume()
