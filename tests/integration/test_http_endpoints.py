"""Endpoints of customers: each with its own circuit, and none that leads into the private network."""

import asyncio
import re
import socket
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from pillarbox import Outbox
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage, Reject
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result
from pillarbox.publishers.http import Endpoint, HttpPublisher
from pillarbox.publishers.http.guard import is_public
from pillarbox.relay import Fixed, Relay, Stream
from tests.integration.certificates import Certificates
from tests.integration.relays import eventually, until
from tests.integration.sites import Hang, Site, site, status
from tests.integration.test_http_publisher import SECRET, Open, files, publish, publisher

__all__ = ["files", "publisher"]  # fixtures
pytestmark = pytest.mark.asyncio


def mine(url: str, **settings: Any) -> Endpoint:
    return Endpoint(url, trusted=True, **settings)


def by_topic(*sites: Site) -> Callable[[Event], Endpoint]:
    """Topic 0 is the first site, and so on."""
    return lambda event: mine(sites[int(event.topic)].url)


def assert_waits(outcome: Outcome) -> None:
    """It waits, charges nobody, and is the matter of one endpoint."""
    assert (outcome.result, outcome.charged, outcome.ambiguous) == (Result.RETRY, False, False)
    assert outcome.after_seconds
    assert outcome.error


class TestChoice:
    async def test_each_event_goes_to_its_endpoint_and_a_key_keeps_its_order(self, publisher: Open) -> None:
        async with site() as first, site() as second:
            opened = await publisher(endpoints=by_topic(first, second))
            events = [make_event(key=f"k{n % 3}", topic=str(n % 2)) for n in range(30)]
            assert await publish(opened, events) == [PUBLISHED] * 30
            for number, each in enumerate((first, second)):
                for key in ("k0", "k1", "k2"):
                    wanted = [str(e.id) for e in events if (e.topic, e.key) == (str(number), key)]
                    assert [r.id for r in each.requests if r.headers["event-key"] == key] == wanted

    async def test_an_async_function_and_secrets_of_its_own(self, publisher: Open) -> None:
        async with site() as shop:

            async def choose(event: Event) -> Endpoint:
                return mine(shop.url, secret=SECRET)

            assert await publish(await publisher(endpoints=choose), [make_event()]) == [PUBLISHED]
        assert shop.requests[0].headers["webhook-signature"].startswith("v1,")

    @pytest.mark.parametrize(
        ("answer", "result", "sentence"),
        [
            (None, Result.REJECTED, "names no endpoint"),
            ("https://a.example", Result.RETRY, "returned a str"),
            (Reject("no such customer"), Result.REJECTED, "no such customer"),
            (Outage("the database of customers is away"), Result.UNTRIED, "the database of customers is away"),
            (KeyError("secret"), Result.RETRY, "failed with KeyError"),
        ],
    )
    async def test_what_a_function_can_say(self, publisher: Open, answer: Any, result: Result, sentence: str) -> None:
        def choose(event: Event) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        (outcome,) = await publish(await publisher(endpoints=choose), [make_event()])
        assert outcome.result is result
        assert sentence in (outcome.error or "")

    @pytest.mark.parametrize("url", ["", "nonsense", "ftp://a.example/", "https://[::1/", "https://a.example/#x"])
    async def test_a_url_that_is_none_rejects_the_event(self, publisher: Open, url: str) -> None:
        (outcome,) = await publish(await publisher(endpoints=lambda event: Endpoint(url)), [make_event()])
        assert outcome.result is Result.REJECTED
        assert "the URL of an endpoint" in (outcome.error or "")

    async def test_an_endpoint_shows_neither_its_path_nor_its_secret(self) -> None:
        endpoint = Endpoint("https://bob:pw@a.example/services/token?k=v", SECRET)
        assert repr(endpoint) == "Endpoint('https://a.example')"
        with pytest.raises(ConfigError):
            Endpoint("https://a.example", "whsec_short")


class TestCircuits:
    async def test_one_that_is_away_harms_no_other(self, publisher: Open, caplog: pytest.LogCaptureFixture) -> None:
        async with site() as well, site(status(503)) as ill:
            opened = await publisher(endpoints=by_topic(well, ill))
            bad, good, behind = make_event(topic="1", key="a"), make_event(topic="0"), make_event(topic="0", key="a")
            first = await publish(opened, [bad, good, behind])
            assert_waits(first[0])
            assert first[1:] == [PUBLISHED, UNTRIED]
            (later,) = await publish(opened, [make_event(topic="1")])
            assert_waits(later)
            assert "is down" in (later.error or "")
            assert len(ill.requests) == 1
        assert [each.__dict__.get("action") for each in caplog.records].count("circuit_opened") == 1

    @pytest.mark.parametrize("code", [301, 401, 403, 429, 502, 503])
    async def test_answers_that_open_it(self, publisher: Open, code: int) -> None:
        async with site(status(code)) as ill:
            opened = await publisher(endpoints=by_topic(ill))
            for _ in range(3):
                (outcome,) = await publish(opened, [make_event(topic="0")])
                assert_waits(outcome)
            assert len(ill.requests) == 1

    async def test_refusals_charge_four_events_and_then_open_it(self, publisher: Open) -> None:
        async with site(status(500)) as ill:
            opened = await publisher(endpoints=by_topic(ill))
            outcomes = [(await publish(opened, [make_event(topic="0")]))[0] for _ in range(7)]
            assert [each.charged for each in outcomes] == [True] * 4 + [False] * 3
            assert not [each for each in outcomes if each.ambiguous]
            assert len(ill.requests) == 5

    async def test_a_pause_that_it_asks_for(self, publisher: Open) -> None:
        async with site(status(429, retry_after="600")) as ill:
            opened = await publisher(endpoints=by_topic(ill))
            await publish(opened, [make_event(topic="0")])
            (outcome,) = await publish(opened, [make_event(topic="0")])
            assert 590 < (outcome.after_seconds or 0) <= 600

    async def test_it_closes_when_a_probe_is_answered(self, publisher: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pillarbox.publishers.http.state._FIRST_SECONDS", 0.0)
        async with site(status(503)) as shop:
            opened = await publisher(endpoints=by_topic(shop))
            await publish(opened, [make_event(topic="0")])
            shop.answer = status(204)
            probe = make_event(topic="0")
            await publish_until(opened, probe)
            assert shop.ids.count(str(probe.id)) == 1
            assert await publish(opened, [make_event(topic="0") for _ in range(10)]) == [PUBLISHED] * 10

    async def test_one_that_is_gone_is_told_of_and_its_events_are_dead(self, publisher: Open) -> None:
        gone = list[str]()

        async def on_gone(endpoint: Endpoint) -> None:
            gone.append(endpoint.url)

        async with site(status(410)) as shop:
            (outcome,) = await publish(
                await publisher(endpoints=by_topic(shop), on_gone=on_gone), [make_event(topic="0")]
            )
        assert outcome.result is Result.REJECTED
        assert gone == [shop.url]

    async def test_a_function_on_gone_that_fails_is_logged(
        self, publisher: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        def on_gone(endpoint: Endpoint) -> None:
            raise KeyError("secret")

        async with site(status(410)) as shop:
            (outcome,) = await publish(
                await publisher(endpoints=by_topic(shop), on_gone=on_gone), [make_event(topic="0")]
            )
        assert outcome.result is Result.REJECTED
        assert "on_gone_failed" in [each.__dict__.get("action") for each in caplog.records]


async def publish_until(opened: HttpPublisher, event: Event) -> None:
    async def ask() -> bool:
        return await publish(opened, [event]) == [PUBLISHED]

    await eventually(ask)  # nothing tells that a request in the background has ended


class TestSlowEndpoints:
    async def test_one_that_hangs_holds_up_no_other(self, publisher: Open) -> None:
        hang = Hang()
        async with site() as well, site(hang) as ill:
            opened = await publisher(endpoints=by_topic(well, ill), timeout="1h", patience="1s")
            for _ in range(3):  # each call ends, though no request to the other one ever does
                events = [make_event(topic=str(n % 2)) for n in range(40)]
                outcomes = await publish(opened, events)
                assert outcomes[::2] == [PUBLISHED] * 20
                for outcome in outcomes[1::2]:
                    assert_waits(outcome)
            assert len(well.requests) == 60
            assert hang.waiting == len(ill.requests) == 4
            hang.release()

    async def test_a_busy_one_is_waited_for(self, publisher: Open) -> None:
        async with site() as busy:
            opened = await publisher(endpoints=by_topic(busy), patience="1s", concurrency=1)
            assert await publish(opened, [make_event(topic="0") for _ in range(60)]) == [PUBLISHED] * 60

    async def test_its_answer_counts_when_it_comes(self, publisher: Open) -> None:
        hang = Hang()
        async with site(hang) as shop:
            opened = await publisher(endpoints=by_topic(shop), timeout="1h", patience="50ms")
            events = [make_event(topic="0", key="a", payload=b"%d" % n) for n in range(3)]
            first = await publish(opened, events)
            assert_waits(first[0])
            assert first[1:] == [UNTRIED, UNTRIED]
            assert_waits((await publish(opened, events[:1]))[0])
            hang.release()
            await publish_until(opened, events[0])
            for event in events[1:]:
                await publish_until(opened, event)
            assert shop.ids == [str(event.id) for event in events]

    async def test_its_silence_opens_its_circuit(self, publisher: Open) -> None:
        hang = Hang()
        async with site(hang) as shop:
            opened = await publisher(endpoints=by_topic(shop), timeout="300ms", patience="50ms")
            event = make_event(topic="0")

            async def ask() -> bool:
                return "did not answer within 0.3 s" in ((await publish(opened, [event]))[0].error or "")

            await eventually(ask)
            (outcome,) = await publish(opened, [make_event(topic="0")])
            assert_waits(outcome)
            assert "is down" in (outcome.error or "")
            hang.release()

    async def test_a_close_ends_what_hangs(self, publisher: Open) -> None:
        hang = Hang()
        async with site(hang) as shop:
            opened = await publisher(endpoints=by_topic(shop), timeout="1h", patience="50ms")
            await publish(opened, [make_event(topic="0")])
            async with asyncio.timeout(10):
                await opened.close()
            hang.release()

    async def test_through_a_relay(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pillarbox.publishers.http.state._AGAIN_SECONDS", 0.1)
        hang = Hang()
        async with site() as well, site(hang) as ill:
            to = HttpPublisher(endpoints=by_topic(well, ill), timeout="1h", patience="100ms")
            relay = Relay(f"sqlite:///{tmp_path}/shop.db", [Stream("default", to=to, retry=Fixed(0.2))])
            await relay.store.migrate()
            outbox = Outbox()
            with sqlite3.connect(tmp_path / "shop.db") as connection:
                for n in range(400):
                    outbox.add(connection, "order.created", {"n": n}, key=n % 40, topic=str(n % 2))
            async with relay:
                await until(lambda: len(well.requests) == 200)
                assert hang.waiting == len(ill.requests) <= 4
                hang.release()
                await until(lambda: len(ill.requests) >= 200)
                await relay.drain()
            for each in (well, ill):
                assert len(set(each.ids)) == 200
                by_key: dict[str, list[int]] = {}
                for request in each.requests:
                    by_key.setdefault(request.headers["event-key"], []).append(int(request.body.split(b":")[1][:-1]))
                assert all(numbers == sorted(numbers) for numbers in by_key.values())


PRIVATE = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.8.8.8", "168.63.129.16",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192",
    "192.168.1.1", "198.18.0.1", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a00:1",
    "2001::1", "2001:db8::1", "2002:7f00:1::", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "ff02::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "172.32.0.1", "192.0.1.1", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e"]


class TestAddresses:
    async def test_what_is_public(self) -> None:
        assert not [each for each in PRIVATE if is_public(each)]
        assert all(map(is_public, PUBLIC))

    @pytest.mark.parametrize(
        "host",
        [
            "127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]", "169.254.169.254", "10.0.0.1", "[fd00:ec2::254]",
        ],
    )  # fmt: skip
    async def test_a_customer_cannot_name_a_private_address(
        self, publisher: Open, files: Certificates, host: str
    ) -> None:
        async with site(files=files) as inside:
            port = int(inside.url.rpartition(":")[2])
            opened = await publisher(
                endpoints=lambda event: Endpoint(f"https://{host}:{port}/"), ports=[port], cafile=str(files.authority)
            )
            (outcome,) = await publish(opened, [make_event()])
            assert outcome.result is Result.REJECTED
            # The client itself refuses to ask for the address of a number.
            assert re.search("it leads to a private or reserved address|its URL cannot be used", outcome.error or "")
            assert not inside.requests

    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("http://shop.example/", "it has no https"),
            ("https://shop.example:22/", "its port 22 is not one of ports=[443]"),
        ],
    )
    async def test_a_customer_needs_https_and_a_port_of_the_list(
        self, publisher: Open, url: str, sentence: str
    ) -> None:
        (outcome,) = await publish(await publisher(endpoints=lambda event: Endpoint(url)), [make_event()])
        assert outcome.result is Result.REJECTED
        assert sentence in (outcome.error or "")

    async def test_private_networks_can_be_allowed(self, publisher: Open, files: Certificates) -> None:
        async with site(files=files) as inside:
            port = int(inside.url.rpartition(":")[2])
            opened = await publisher(
                endpoints=lambda event: Endpoint(inside.url, SECRET),
                ports=[port],
                networks=["127.0.0.0/8"],
                cafile=str(files.authority),
            )
            assert await publish(opened, [make_event()]) == [PUBLISHED]

    async def test_a_name_that_leads_elsewhere_the_second_time(
        self, publisher: Open, files: Certificates, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every question about the name has another answer: a public address, and then a private one."""
        asked = 0
        resolve = socket.getaddrinfo

        def rebind(host: Any, port: Any, *arguments: Any, **settings: Any) -> Any:
            nonlocal asked
            if host != "rebind.example":
                return resolve(host, port, *arguments, **settings)
            asked += 1
            address = "192.0.1.1" if asked == 1 else "127.0.0.1"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        monkeypatch.setattr(socket, "getaddrinfo", rebind)
        connected = list[Any]()
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def note(sock: socket.socket, address: Any) -> None:
            connected.append(address[0])
            if address[0] != "127.0.0.1":
                raise ConnectionRefusedError(111, "Connection refused")  # nothing may leave this machine
            await connect(sock, address)

        monkeypatch.setattr(loop, "sock_connect", note)
        async with site(files=files) as inside:
            port = int(inside.url.rpartition(":")[2])
            opened = await publisher(
                endpoints=lambda event: Endpoint(f"https://rebind.example:{port}/"), ports=[port], timeout="5s"
            )
            (first,) = await publish(opened, [make_event()])
            assert_waits(first)
            assert connected == ["192.0.1.1"]
            await opened.close()
            await opened.open()
            (second,) = await publish(opened, [make_event()])
            assert second.result is Result.REJECTED
            assert (asked, connected) == (2, ["192.0.1.1"])
            assert not inside.requests

    async def test_the_connection_of_a_trusted_endpoint_is_used_for_no_other(
        self, publisher: Open, files: Certificates
    ) -> None:
        async with site(files=files) as inside:
            port = int(inside.url.rpartition(":")[2])

            def choose(event: Event) -> Endpoint:
                return Endpoint(inside.url, trusted=event.topic == "0")

            opened = await publisher(endpoints=choose, ports=[port], cafile=str(files.authority))
            assert await publish(opened, [make_event(topic="0")]) == [PUBLISHED]
            (outcome,) = await publish(opened, [make_event(topic="1")])
            assert outcome.result is Result.REJECTED

    async def test_a_redirect_into_the_private_network_is_not_followed(
        self, publisher: Open, files: Certificates
    ) -> None:
        async with site() as inside, site(status(302, location=f"{inside.url}/"), files=files) as outside:
            port = int(outside.url.rpartition(":")[2])
            opened = await publisher(
                endpoints=lambda event: Endpoint(outside.url),
                ports=[port],
                networks=["127.0.0.0/8"],
                cafile=str(files.authority),
            )
            (outcome,) = await publish(opened, [make_event()])
            assert_waits(outcome)
            assert outside.requests
            assert not inside.requests
