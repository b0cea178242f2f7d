import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event
from pillarbox.finding import State
from pillarbox.publisher import PUBLISHED, UNTRIED, Result
from pillarbox.publishers.redis import RedisPublisher
from pillarbox.urls import publisher_from_url
from proof.proxy import Proxy
from servers import Valkey
from servers.fixtures import OwnServer
from servers.process import free_port
from tests.integration.certificates import Certificates, certificates
from tests.integration.publishing import assert_key_order, numbered, publish, publish_rest, unpublished
from tests.integration.redis_desk import Desk, desk
from tests.integration.relays import eventually
from tests.integration.tls_front import tls_front

pytestmark = pytest.mark.asyncio

Open = Callable[..., Awaitable[RedisPublisher]]


@pytest_asyncio.fixture
async def shop(valkey: Valkey) -> AsyncIterator[Desk]:
    async with desk(valkey.url) as found:
        yield found


@pytest_asyncio.fixture
async def publisher(valkey: Valkey) -> AsyncIterator[Open]:
    """Opens publishers, and closes them with the test."""
    async with AsyncExitStack() as stack:

        async def make(url: str = valkey.url, **settings: Any) -> RedisPublisher:
            made = RedisPublisher(url, **settings)
            stack.push_async_callback(made.close)
            await made.open()
            return made

        yield make


class TestMessages:
    async def test_fields_and_body(self, shop: Desk, publisher: Open) -> None:
        stream = shop.stream()
        own = {"region": "ø\r\nx", "payload": "mine", "event_key": "mine"}
        event = make_event(type="order.created", headers=own, key="Zoë 7", payload=b"\x00\r\n\xff")
        assert await publish(await publisher(stream=stream), [event]) == [PUBLISHED]
        (found,) = await shop.read(stream)
        assert (found.event_id, found.body) == (str(event.id), event.payload)
        assert found.fields["event_type"] == b"order.created"
        assert found.fields["event_key"] == "Zoë 7".encode()
        assert found.fields["region"] == "ø\r\nx".encode()

    async def test_cloudevents(self, shop: Desk, publisher: Open) -> None:
        binary, structured = shop.stream(), shop.stream()
        event = make_event(headers={"ce_source": "mine", "Content-Type": "mine"})
        opened = await publisher(stream=binary, envelope="cloudevents", source="/shop")
        assert await publish(opened, [event]) == [PUBLISHED]
        ((_, fields),) = await shop.client.xrange(binary)
        assert (fields[b"ce_source"], fields[b"ce_id"].decode()) == (b"/shop", str(event.id))
        assert (fields[b"content-type"].decode(), fields[b"payload"]) == (event.content_type, event.payload)
        opened = await publisher(stream=structured, envelope="cloudevents_structured")
        assert await publish(opened, [event]) == [PUBLISHED]
        ((_, fields),) = await shop.client.xrange(structured)
        assert fields[b"content-type"].startswith(b"application/cloudevents+json")
        assert fields[b"payload"].startswith(b'{"specversion":"1.0"')

    async def test_the_stream_is_the_topic(self, shop: Desk, publisher: Open) -> None:
        default, own = shop.stream(), shop.stream()
        events = [make_event(key="a"), make_event(key="a", topic=own), make_event(key="a"), make_event(topic=own)]
        assert await publish(await publisher(stream=default), events) == [PUBLISHED] * 4
        assert [each.event_id for each in await shop.read(default)] == [str(events[0].id), str(events[2].id)]
        assert {each.event_id for each in await shop.read(own)} == {str(events[1].id), str(events[3].id)}

    async def test_an_envelope_of_ones_own(self, shop: Desk, publisher: Open) -> None:
        stream = shop.stream()
        fields: Any = {"event_id": b"1", "payload": b"x"}
        opened = await publisher(stream=stream, envelope=lambda event: fields)
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        assert await shop.count(stream) == 1
        fields["payload"] = ["no", "bytes"]
        bad, other = await publish(opened, [make_event(key="a"), make_event(key="a")])
        assert (bad.result, other) == (Result.REJECTED, UNTRIED)
        assert "'payload' is a list" in (bad.error or "")

    async def test_a_call_of_many_large_events_keeps_order(self, shop: Desk, publisher: Open) -> None:
        stream = shop.stream()
        events = [make_event(key=f"k{n % 3}", payload=b"%07d" % n * 20_000) for n in range(30)]
        events += [make_event(key=f"k{n % 3}", payload=b"%07d" % n) for n in range(30, 2500)]
        assert set(await publish(await publisher(stream=stream), events)) == {PUBLISHED}
        assert [each.event_id for each in await shop.read(stream)] == [str(event.id) for event in events]

    async def test_a_stream_keeps_all_unless_it_is_told_otherwise(self, shop: Desk, publisher: Open) -> None:
        kept, cut = shop.stream(), shop.stream()
        events = [make_event(key=None) for _ in range(1000)]
        await publish(await publisher(stream=kept), events)
        await publish(await publisher(stream=cut, maxlen=100), events)
        assert await shop.count(kept) == 1000
        assert 100 <= await shop.count(cut) < 300


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("redis://localhost", "a Redis publisher a stream"),
            ("redis://localhost?steam=a", "did you mean 'stream'"),
            ("redis://localhost?stream=a&connections=no", "connections='no'"),
            ("redis://localhost?stream=a&connections=0", "use 1 or more"),
            ("redis://localhost?stream=a&max_bytes=0", "max_bytes=0"),
            ("redis://localhost?stream=a&durable=yes", "write true or false"),
            ("redis://localhost?stream=a&replicas=-1", "replicas='-1'"),
            ("redis://localhost?stream=a&stuck=never", "stuck"),
            ("redis://localhost?stream=a&envelope=row", "did you mean 'raw'"),
            ("redis://localhost?stream=a&headers=os:sep", "not a function"),
            ("redis://localhost?stream=a&cafile=x.pem", "write rediss"),
            ("rediss://localhost?stream=a&cafile=missing.pem", "cafile='missing.pem' cannot be read"),
            ("rediss://localhost?stream=a&keyfile=missing.pem", "keyfile= needs certfile="),
            ("redis://?stream=a", "names no host"),
            ("redis://localhost/shop?stream=a", "more than a database number"),
            ("redis://localhost:port?stream=a", "cannot be read"),
            ("valkeys://localhost?stream=a&certfile=missing.pem", "certfile='missing.pem'"),
        ],
    )
    async def test_a_wrong_setting_names_its_remedy(self, url: str, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            publisher_from_url(url)

    async def test_no_part_of_a_password_is_shown(self) -> None:
        for url in ("redis://u:hunter2/@h?stream=a", "redis://u:hunter2#@h?stream=a", "redis://u:[hunter2@h?stream=a"):
            with pytest.raises(ConfigError) as caught:
                publisher_from_url(url)
            assert "hunter2" not in str(caught.value)

    async def test_the_description_has_no_login(self) -> None:
        assert publisher_from_url("valkey://u:hunter2@h/3?stream=a").description == "redis h:6379/3"


class TestRefusals:
    async def test_a_default_stream_that_is_another_type_is_an_outage(self, shop: Desk, publisher: Open) -> None:
        stream, event = shop.stream(), make_event()
        await shop.client.set(stream, "text")
        opened = await publisher(stream=stream)
        (outcome,) = await publish(opened, [event])
        assert outcome.is_outage
        assert "is no stream; rename it" in (outcome.error or "")
        await shop.client.delete(stream)
        assert await publish(opened, [event]) == [PUBLISHED]

    async def test_an_own_stream_that_is_another_type_waits_and_harms_nobody(
        self, shop: Desk, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        default, wrong = shop.stream(), shop.stream()
        await shop.client.set(wrong, "text")
        # The second event of key a goes to the good stream, and must not overtake the first.
        events = [make_event(key="a", topic=wrong), make_event(key="a"), make_event(key="b"), make_event(key=None)]
        first, *rest = await publish(await publisher(stream=default), events)
        assert (first.result, first.charged, first.ambiguous) == (Result.RETRY, False, True)
        assert first.after_seconds == 1
        assert rest == [UNTRIED, PUBLISHED, PUBLISHED]
        assert [each.__dict__["action"] for each in caplog.records if "action" in each.__dict__] == ["topic_missing"]

    async def test_full_memory_is_an_outage_and_loses_nothing(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey, settings={"maxmemory": "4mb", "maxmemory-policy": "noeviction"})
        opened = await publisher(server.url, stream="s")
        events = [make_event(key="a", payload=b"x" * 100_000) for _ in range(60)]
        outcomes = await publish(opened, events)
        stored = outcomes.count(PUBLISHED)
        assert 0 < stored < 60
        assert outcomes[stored].is_outage
        assert "has no memory left" in (outcomes[stored].error or "")
        assert set(outcomes[stored + 1 :]) <= {UNTRIED, outcomes[stored]}
        async with desk(server.url) as shop:
            assert await shop.count("s") == stored
            await shop.client.config_set("maxmemory", "100mb")
            await publish_rest(opened, unpublished(events, outcomes))
            assert [each.event_id for each in await shop.read("s")] == [str(event.id) for event in events]

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"appendonly": "no"}, "appendonly is no, so a restart loses"),
            ({"appendfsync": "everysec"}, "appendfsync is everysec"),
            ({"no-appendfsync-on-rewrite": "yes"}, "no-appendfsync-on-rewrite is yes"),
            ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, "deletes whole streams: set it to noeviction"),
        ],
    )
    async def test_a_server_that_loses_is_refused_unless_that_is_accepted(
        self, settings: dict[str, str], sentence: str, own_server: OwnServer, publisher: Open
    ) -> None:
        server = own_server(Valkey, settings=settings)
        with pytest.raises(ConfigError, match=f"{sentence}.*or accept it with durable=false"):
            await publisher(server.url, stream="s")
        opened = await publisher(server.url, stream="s", durable=False)
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        failures = [each for each in await opened.examine() if each.state is State.FAILED]
        assert len(failures) == 1
        assert failures[0].check in ("durability", "eviction")

    async def test_a_server_that_loses_from_now_on_is_an_outage(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey)
        opened = await publisher(server.url, stream="s")
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        server.kill()
        server.settings = {"appendfsync": "everysec"}
        server.start()
        outcomes = [await publish(opened, [make_event()]) for _ in range(2)]
        assert all(each.is_outage for (each,) in outcomes)
        assert "appendfsync is everysec" in (outcomes[-1][0].error or "")

    async def test_what_is_too_large_is_rejected(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey, settings={"proto-max-bulk-len": "2mb"})
        opened = await publisher(server.url, stream="s")
        events = [make_event(key="a", payload=b"x" * 2_100_000), make_event(key="a"), make_event(key="b")]
        large, behind, other = await publish(opened, events)
        assert (large.result, behind, other) == (Result.REJECTED, UNTRIED, PUBLISHED)
        assert "at most 2097152 are sent" in (large.error or "")
        (outcome,) = await publish(opened, [make_event(topic="ø" * 600)])
        assert outcome.result is Result.REJECTED

    async def test_a_replica_is_an_outage(self, valkey: Valkey, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey, settings={"replicaof": f"127.0.0.1 {valkey.port}"})
        opened = await publisher(server.url, stream="s")
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.is_outage
        assert "takes no entries now" in (outcome.error or "")

    async def test_a_node_of_a_cluster_is_an_outage(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey, settings={"cluster-enabled": "yes"})
        opened = await publisher(server.url, stream="s")
        (outcome,) = await publish(opened, [make_event()])
        assert outcome.is_outage
        assert "takes no entries now" in (outcome.error or "")

    async def test_replicas(self, own_server: OwnServer, publisher: Open) -> None:
        primary = own_server(Valkey, settings={"repl-diskless-sync-delay": "0"})
        opened = await publisher(primary.url, stream="s", replicas=1, stuck="200ms")
        event = make_event()
        (outcome,) = await publish(opened, [event])
        assert outcome.is_outage
        assert "0 of 1 replicas" in (outcome.error or "")
        replica = own_server(Valkey, settings={"replicaof": f"127.0.0.1 {primary.port}"})
        await publish_rest(opened, [event])
        async with desk(replica.url) as shop:
            assert {each.event_id for each in await shop.read("s")} == {str(event.id)}

    async def test_a_header_builder_that_fails_rejects_the_event(self, shop: Desk, publisher: Open) -> None:
        def fail(event: Event) -> list[tuple[str, bytes]]:
            raise RuntimeError("secret")

        (outcome,) = await publish(await publisher(stream=shop.stream(), headers=fail), [make_event()])
        assert outcome.result is Result.REJECTED
        assert "RuntimeError" in (outcome.error or "")
        assert "secret" not in (outcome.error or "")

    async def test_events_without_a_stream_wait(self, publisher: Open) -> None:
        (outcome,) = await publish(await publisher(stream="*"), [make_event()])
        assert (outcome.result, outcome.charged) == (Result.RETRY, False)
        assert "no topic" in (outcome.error or "")

    async def test_a_publisher_that_is_not_open_says_so(self, valkey: Valkey) -> None:
        (outcome,) = await publish(RedisPublisher(valkey.url, stream="s"), [make_event()])
        assert outcome.is_outage
        assert "call open()" in (outcome.error or "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture
async def tls_port(valkey: Valkey, files: Certificates) -> AsyncIterator[int]:
    async with tls_front(valkey.port, files) as port:
        yield port


@pytest_asyncio.fixture
async def guarded_shop(valkey: Valkey) -> AsyncIterator[Desk]:
    """With the users bob, who may write streams good:*, and dave, who may not ask for settings either."""
    async with desk(valkey.url) as found:
        words = ("~good:*", "+@all")
        await found.client.execute_command("ACL", "SETUSER", "bob", "on", ">p@ss/word", *words)
        await found.client.execute_command("ACL", "SETUSER", "dave", "on", ">secret", *words, "-config")
        yield found


class TestAccess:
    async def test_tls_and_a_login(
        self, guarded_shop: Desk, tls_port: int, files: Certificates, publisher: Open
    ) -> None:
        opened = await publisher(
            f"rediss://bob:p%40ss%2Fword@localhost:{tls_port}/2",
            stream="good:tls",
            cafile=str(files.authority),
            certfile=str(files.client),
        )
        assert await publish(opened, [make_event()]) == [PUBLISHED]

    async def test_a_certificate_that_is_not_trusted_is_an_outage(
        self, valkey: Valkey, tls_port: int, publisher: Open
    ) -> None:
        with pytest.raises(Outage, match=r"TLS was refused \(.*certificate.*\); correct cafile"):
            await publisher(f"rediss://127.0.0.1:{tls_port}", stream="s")

    async def test_a_certificate_for_another_name_is_an_outage(
        self, valkey: Valkey, tls_port: int, files: Certificates, publisher: Open
    ) -> None:
        with pytest.raises(Outage, match="TLS was refused"):
            await publisher(f"rediss://127.1:{tls_port}", stream="s", cafile=str(files.authority))

    async def test_tls_to_a_port_without_it_is_an_outage(self, valkey: Valkey, publisher: Open) -> None:
        with pytest.raises(Outage, match="did not answer within 1 s"):
            await publisher(f"rediss://127.0.0.1:{valkey.port}", stream="s", connect_timeout="1s")

    async def test_a_wrong_password_is_an_outage(self, valkey: Valkey, guarded_shop: Desk, publisher: Open) -> None:
        with pytest.raises(Outage, match=r"refuses this client: .*; correct its user and password"):
            await publisher(f"redis://bob:wrong@127.0.0.1:{valkey.port}", stream="s")

    async def test_no_password_where_one_is_needed(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey)
        opened = await publisher(server.url, stream="s")
        async with desk(server.url) as shop:
            await shop.client.config_set("requirepass", "secret")
            # Connections that are open stay logged in; new ones have to log in.
            await shop.client.client_kill_filter(_type="normal", skipme=True)
        first, second = [(await publish(opened, [make_event()]))[0] for _ in range(2)]
        assert first.is_outage
        assert second.is_outage
        assert "uthentication" in (second.error or "")

    async def test_a_database_that_is_not_there(self, valkey: Valkey, publisher: Open) -> None:
        with pytest.raises(Outage, match=r"refuses the connection: .*DB index"):
            await publisher(f"redis://127.0.0.1:{valkey.port}/99", stream="s")

    async def test_streams_without_permission(self, valkey: Valkey, guarded_shop: Desk, publisher: Open) -> None:
        url = f"redis://bob:p%40ss%2Fword@127.0.0.1:{valkey.port}"
        opened = await publisher(url, stream="good:a")
        events = [make_event(key="a", topic="bad"), make_event(key="a"), make_event(key="b")]
        own, behind, other = await publish(opened, events)
        assert (own.result, own.charged, behind, other) == (Result.RETRY, False, UNTRIED, PUBLISHED)
        assert "give it the permission" in (own.error or "")
        (outcome,) = await publish(await publisher(url, stream="bad"), [make_event()])
        assert outcome.is_outage
        assert await guarded_shop.client.exists("bad") == 0

    async def test_a_server_that_tells_no_settings(self, valkey: Valkey, guarded_shop: Desk, publisher: Open) -> None:
        url = f"redis://dave:secret@127.0.0.1:{valkey.port}"
        with pytest.raises(ConfigError, match="does not tell its settings; allow this user CONFIG GET"):
            await publisher(url, stream="good:b")
        opened = await publisher(url, stream="good:b", durable=False)
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        (address, durability) = await opened.examine()
        assert (address.state, durability.state) == (State.OK, State.WARNING)


class TestExamined:
    async def test_what_is_said_of_a_server_and_a_stream(self, shop: Desk, publisher: Open) -> None:
        stream = shop.stream()
        opened = await publisher(stream=stream)
        found = {each.check: each for each in await opened.examine()}
        assert "does not exist yet" in found["address"].sentence
        assert found["durability"].state is State.OK
        assert found["eviction"].state is State.WARNING
        assert "16,777,216 bytes" in found["limits"].sentence
        await publish(opened, [make_event()])
        assert "exists" in (await opened.examine())[0].sentence
        await shop.client.delete(stream)
        await shop.client.set(stream, "text")
        assert "is a string and no stream" in (await opened.examine())[0].sentence


class TestOutages:
    async def test_away_at_the_start(self, publisher: Open) -> None:
        with pytest.raises(Outage, match="cannot be reached: Connection refused; the relay tries again"):
            await publisher(f"redis://127.0.0.1:{free_port()}", stream="s")

    async def test_a_host_without_an_address(self, publisher: Open) -> None:
        with pytest.raises(Outage, match="cannot be reached"):
            await publisher("redis://nobody.invalid", stream="s")

    async def test_silent_at_the_start(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey)
        server.pause()
        with pytest.raises(Outage, match=r"did not answer within 0\.3 s"):
            await publisher(server.url, stream="s", connect_timeout="300ms")
        server.resume()

    async def test_killed_in_the_middle_of_calls(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey)
        opened = await publisher(server.url, stream="s")
        events = [make_event(key=f"k{n % 20}", payload=b"%05d" % (n // 20) * 4_000) for n in range(1000)]
        call = asyncio.create_task(publish(opened, events))
        async with desk(server.url) as shop:
            await eventually(lambda: shop.count("s"))
        server.kill()
        outcomes = await call
        assert any(each.is_outage for each in outcomes)
        assert not [each for each in outcomes if each.result is Result.RETRY]
        assert (await publish(opened, events[:1]))[0].is_outage
        server.start()
        await publish_rest(opened, unpublished(events, outcomes))
        numbers = [event._replace(payload=event.payload[:5]) for event in events]
        async with desk(server.url) as shop:
            assert_key_order(numbers, [each.event_id for each in await shop.read("s")])

    async def test_paused_for_longer_than_it_may_be_silent(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey)
        opened = await publisher(server.url, stream="s", stuck="500ms", connect_timeout="300ms")
        server.pause()
        # More than the sockets hold.
        events = [*numbered(5, 10), *(make_event(key="large", payload=b"%d" % n * 9_000_000) for n in range(2))]
        outcomes = await publish(opened, events)
        assert any(each.is_outage for each in outcomes)
        assert not [each for each in outcomes if each.result is not Result.UNTRIED]
        server.resume()
        await publish_rest(opened, events)
        async with desk(server.url) as shop:
            small = {str(event.id) for event in events[:50]}
            assert_key_order(events[:50], [each.event_id for each in await shop.read("s") if each.event_id in small])

    @pytest.mark.parametrize("direction", ["to_server", "to_client"])
    async def test_cut_in_the_middle_of_calls(
        self, direction: Any, valkey: Valkey, shop: Desk, publisher: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pillarbox.publishers.redis.sender.CHUNK_EVENTS", 50)
        stream = shop.stream()
        async with Proxy("127.0.0.1", valkey.port) as proxy:
            opened = await publisher(f"redis://127.0.0.1:{proxy.port}", stream=stream)
            events = numbered(20, 60)
            rest = events
            for _ in range(3):
                # In the answers, the cut is often behind a transaction that was stored.
                await proxy.cut_after(60_000 if direction == "to_server" else 3_000, direction)
                outcomes = await publish(opened, rest)
                assert not [each for each in outcomes if each.result is Result.RETRY]
                assert any(each.is_outage for each in outcomes)
                rest = unpublished(rest, outcomes)
            assert len(rest) < len(events)
            await proxy.heal()
            await publish_rest(opened, rest)
            await opened.close()
        assert_key_order(events, [each.event_id for each in await shop.read(stream)])

    async def test_a_closed_publisher_leaves_nothing_behind(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Valkey)
        before = asyncio.all_tasks()
        opened = await publisher(server.url, stream="s", stuck="200ms", connect_timeout="500ms")
        assert await publish(opened, [make_event()]) == [PUBLISHED]
        server.pause()
        await publish(opened, [make_event(payload=b"0" * 9_000_000)])
        await opened.close()
        assert asyncio.all_tasks() == before
        server.resume()
        async with desk(server.url) as shop:

            async def is_alone() -> bool:
                return len(await shop.client.client_list(_type="normal")) == 1

            await eventually(is_alone)
