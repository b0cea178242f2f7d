import asyncio
import base64
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import pytest_asyncio
from standardwebhooks import Webhook, WebhookVerificationError

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event
from pillarbox.finding import State
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result
from pillarbox.publishers.http import HttpPublisher
from pillarbox.urls import publisher_from_url
from proof.proxy import Proxy
from servers import Receiver
from servers.fixtures import OwnServer
from servers.process import free_port
from tests.integration.certificates import Certificates, certificates
from tests.integration.relays import until
from tests.integration.sites import Hang, endless, site, status

pytestmark = pytest.mark.asyncio

Open = Callable[..., Awaitable[HttpPublisher]]
SECRET = "whsec_" + base64.b64encode(b"a secret of 24 bytes ...").decode()
NEXT_SECRET = "whsec_" + base64.b64encode(b"another secret of 32 bytes ab+/~").decode()


@pytest_asyncio.fixture
async def publisher() -> AsyncIterator[Open]:
    """Opens publishers, and closes them with the test."""
    async with AsyncExitStack() as stack:

        async def make(*arguments: Any, **settings: Any) -> HttpPublisher:
            made = HttpPublisher(*arguments, **settings)
            stack.push_async_callback(made.close)
            await made.open()
            return made

        yield make


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


async def publish(publisher: HttpPublisher, events: Sequence[Event]) -> list[Outcome]:
    return list(await publisher.publish(Batch.of(events)))


async def publish_rest(publisher: HttpPublisher, events: Sequence[Event]) -> None:
    """Publish until nothing is left, as a relay would. No attempt may be charged."""
    async with asyncio.timeout(60):
        while events:
            outcomes = await publish(publisher, events)
            assert not [each for each in outcomes if each.result is Result.RETRY and each.charged]
            rest = [event for event, each in zip(events, outcomes, strict=True) if each is not PUBLISHED]
            if len(rest) == len(events):
                await asyncio.sleep(0.05)  # nothing tells a client that a real server is ready again
            events = rest


def numbered(keys: int, count: int) -> list[Event]:
    """Events whose payload is their place in their key."""
    return [make_event(key=f"k{key}", payload=b"%d" % n) for n in range(count) for key in range(keys)]


def assert_key_order(events: Sequence[Event], arrived: Sequence[str]) -> None:
    by_id = {str(event.id): event for event in events}
    first: dict[str | None, list[int]] = defaultdict(list)
    for each in dict.fromkeys(arrived):
        first[by_id[each].key].append(int(by_id[each].payload))
    assert set(by_id) == set(arrived), "events are missing"
    assert all(numbers == sorted(numbers) for numbers in first.values()), "a key's events arrived in another order"


class TestMessages:
    async def test_the_reference_package_accepts_the_signature(self, publisher: Open) -> None:
        event = make_event(type="order.created", payload=b'{"name": "Zo\xc3\xab"}', headers={"region": "eu"})
        async with site() as shop:
            opened = await publisher(f"{shop.url}/hooks?tenant=7", secret=SECRET)
            assert await publish(opened, [event]) == [PUBLISHED]
            (request,) = shop.requests
        assert Webhook(SECRET).verify(request.body, request.headers) == {"name": "Zoë"}
        assert request.body == event.payload
        assert (request.path, request.query, request.id) == ("/hooks", "tenant=7", str(event.id))
        headers = request.headers
        assert headers["content-type"] == event.content_type
        assert (headers["event-type"], headers["event-key"], headers["region"]) == ("order.created", event.key, "eu")
        with pytest.raises(WebhookVerificationError):
            Webhook(NEXT_SECRET).verify(request.body, request.headers)

    async def test_while_a_secret_changes_both_are_accepted(self, publisher: Open) -> None:
        async with site() as shop:
            opened = await publisher(shop.url, secret=[SECRET, NEXT_SECRET])
            assert await publish(opened, [make_event(payload=b"{}")]) == [PUBLISHED]
            (request,) = shop.requests
        for secret in (SECRET, NEXT_SECRET):
            assert Webhook(secret).verify(request.body, request.headers) == {}

    async def test_without_a_secret_nothing_is_signed(self, publisher: Open) -> None:
        async with site() as shop:
            assert await publish(await publisher(shop.url), [make_event()]) == [PUBLISHED]
        assert "webhook-signature" not in shop.requests[0].headers

    async def test_each_attempt_has_its_own_time(self, publisher: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        async with site(status(500)) as shop:
            opened, event = await publisher(shop.url, secret=SECRET), make_event(payload=b"{}")
            for now in (1_700_000_000.0, 1_700_000_060.0):
                monkeypatch.setattr("pillarbox.publishers.http.client.time.time", lambda now=now: now)
                await publish(opened, [event])
        assert [each.headers["webhook-timestamp"] for each in shop.requests] == ["1700000000", "1700000060"]
        assert len({each.headers["webhook-signature"] for each in shop.requests}) == 2

    async def test_an_event_cannot_set_the_headers_of_the_request(self, publisher: Open) -> None:
        own = {
            "Host": "evil.example",
            "content_length": "1",
            "transfer-encoding": "chunked",
            "webhook_signature": "v1,forged",
            "Webhook-Id": "forged",
            "event-id": "forged",
            "proxy-authorization": "x",
        }
        event = make_event(headers=own)
        async with site() as shop:
            assert await publish(await publisher(shop.url), [event]) == [PUBLISHED]
            (request,) = shop.requests
        headers = request.headers
        assert headers["host"] == shop.url.removeprefix("http://")
        assert headers["content-length"] == str(len(event.payload))
        assert headers["event-id"] == request.id == str(event.id)
        assert not headers.keys() & {"transfer-encoding", "webhook-signature", "proxy-authorization"}

    async def test_names_and_values_that_http_cannot_hold_are_encoded(self, publisher: Open) -> None:
        own = {"naïve name": "x", "note": "two\r\nlines: ø", "tracestate": "a=b%20c"}
        async with site() as shop:
            assert await publish(await publisher(shop.url), [make_event(headers=own, key="ø")]) == [PUBLISHED]
        headers = shop.requests[0].headers
        assert headers["na%c3%afve%20name"] == "x"
        assert headers["note"] == "two%0D%0Alines:%20%C3%B8"
        assert headers["tracestate"] == "a=b%20c"
        assert headers["event-key"] == "%C3%B8"

    async def test_cloudevents(self, publisher: Open) -> None:
        event = make_event(type="order created", headers={"ce-source": "mine", "Content-Type": "mine"})
        async with site() as shop:
            opened = await publisher(shop.url, envelope="cloudevents", source="/shop")
            assert await publish(opened, [event]) == [PUBLISHED]
        headers = shop.requests[0].headers
        assert (headers["ce-id"], headers["ce-source"]) == (str(event.id), "/shop")
        assert headers["ce-type"] == "order%20created"
        assert headers["content-type"] == event.content_type

    async def test_a_login_in_the_url_is_sent_and_not_shown(self, publisher: Open) -> None:
        async with site() as shop:
            opened = await publisher(shop.url.replace("//", "//bob:p%40ss@"))
            assert await publish(opened, [make_event()]) == [PUBLISHED]
        assert shop.requests[0].headers["authorization"] == "Basic " + base64.b64encode(b"bob:p@ss").decode()
        assert opened.description == shop.url.replace("://", " ")

    async def test_a_second_login_rejects_the_event(self, publisher: Open) -> None:
        async with site() as shop:
            opened = await publisher(shop.url.replace("//", "//bob:p%40ss@"))
            (outcome,) = await publish(opened, [make_event(headers={"authorization": "Bearer x"})])
        assert outcome.result is Result.REJECTED
        assert "no form for a header" in (outcome.error or "")
        assert not shop.requests

    async def test_a_host_that_is_none_is_an_outage(self, publisher: Open) -> None:
        (outcome,) = await publish(await publisher("http://127.1/"), [make_event()])
        assert outcome.is_outage
        assert "its URL cannot be used" in (outcome.error or "")

    async def test_no_cookie_is_kept_and_connections_are(self, publisher: Open) -> None:
        async with site(status(204, set_cookie="a=b; Path=/")) as shop:
            opened = await publisher(shop.url)
            for _ in range(3):
                assert await publish(opened, [make_event()]) == [PUBLISHED]
        assert not [each for each in shop.requests if "cookie" in each.headers]
        assert len({each.connection for each in shop.requests}) == 1


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("https://", "names no host"),
            ("https://shop.example:99999/", "cannot be read"),
            ("https://shop.example/?secrt=a", "did you mean 'secret'"),
            ("https://shop.example/?code=a", "query=code%3D"),
            ("https://shop.example/?secret=abc", "begin with whsec_"),
            ("https://shop.example/?secret=whsec_ab*", "is not base64"),
            ("https://shop.example/?secret=whsec_YWJj", "has 3 bytes"),
            ("https://shop.example/?concurrency=no", "concurrency='no'"),
            ("https://shop.example/?concurrency=0", "use 1 or more"),
            ("https://shop.example/?max_bytes=0", "max_bytes=0"),
            ("https://shop.example/?timeout=never", "timeout"),
            ("https://shop.example/?headers=os:sep", "not a function"),
            ("https://shop.example/?envelope=xml", "envelope='xml'"),
            ("https://shop.example/?cafile=missing.pem", "cafile='missing.pem' cannot be read"),
            ("https://shop.example/?certfile=missing.pem", "certfile='missing.pem'"),
            ("https://shop.example/?keyfile=missing.pem", "keyfile= needs certfile="),
            ("https://shop.example/#part", "has a #"),
        ],
    )
    async def test_a_wrong_setting_names_its_remedy(self, url: str, sentence: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            publisher_from_url(url)

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({}, "give an HTTP publisher a URL"),
            ({"url": "https://a.example", "endpoints": lambda event: None}, "give an HTTP publisher a URL"),
            ({"secret": SECRET, "endpoints": lambda event: None}, "give each Endpoint its own"),
            ({"url": "https://a.example", "on_gone": print}, "on_gone= goes with endpoints="),
            ({"url": "ftp://a.example"}, "has no http"),
            ({"endpoints": lambda event: None, "ports": []}, "ports=[]"),
            ({"endpoints": lambda event: None, "networks": ["10.0.0.0/99"]}, "networks= has one"),
        ],
    )
    async def test_arguments(self, settings: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            HttpPublisher(**settings)

    async def test_a_url_with_all_it_may_have(self) -> None:
        async with site() as shop:
            publisher = publisher_from_url(
                f"{shop.url}/in?secret={NEXT_SECRET}&secret={SECRET.replace('=', '%3D')}"
                "&query=code%3D7%26a%3Db&timeout=3s"
            )
            await publisher.open()
            assert list(await publisher.publish(Batch.of([make_event(payload=b"{}")]))) == [PUBLISHED]
            await publisher.close()
        (request,) = shop.requests
        assert (request.path, request.query) == ("/in", "code=7&a=b")
        for secret in (SECRET, NEXT_SECRET):
            Webhook(secret).verify(request.body, request.headers)

    async def test_no_part_of_a_secret_is_shown(self) -> None:
        for url in ("https://a/?secret=whsec_hunter2*", "https://u:[hunter2@h/", "https://h:hunter2/"):
            with pytest.raises(ConfigError) as caught:
                publisher_from_url(url)
            assert "hunter2" not in str(caught.value)

    async def test_the_description_has_no_path(self) -> None:
        assert publisher_from_url("https://h/services/T00/token?query=a%3Db").description == "https h"


class TestAnswers:
    @pytest.mark.parametrize(
        ("answer", "result", "charged", "ambiguous", "sentence"),
        [
            (status(200), Result.PUBLISHED, True, False, ""),
            (status(202), Result.PUBLISHED, True, False, ""),
            (status(413), Result.REJECTED, True, False, "the body is too large"),
            (status(431), Result.REJECTED, True, False, "the headers are too large"),
            (status(301), Result.UNTRIED, True, False, "a redirect, which is not followed"),
            (status(401), Result.UNTRIED, True, False, "correct its secret or its login"),
            (status(403), Result.UNTRIED, True, False, "refuses this client"),
            (status(410), Result.UNTRIED, True, False, "wants no events any more"),
            (status(429), Result.UNTRIED, True, False, "asks for a pause"),
            (status(503), Result.RETRY, False, True, "its server is away"),
            (status(502), Result.RETRY, False, True, "its server is away"),
            (status(500), Result.RETRY, True, True, "answered 500"),
            (status(404), Result.RETRY, True, True, "answered 404"),
            (status(422), Result.RETRY, True, True, "answered 422"),
        ],
    )
    async def test_the_class_of_a_status(
        self, publisher: Open, answer: Any, result: Result, charged: bool, ambiguous: bool, sentence: str
    ) -> None:
        async with site(answer) as shop:
            (outcome,) = await publish(await publisher(shop.url), [make_event()])
        assert (outcome.result, outcome.charged, outcome.ambiguous) == (result, charged, ambiguous)
        assert outcome.is_outage == (result is Result.UNTRIED)
        assert sentence in (outcome.error or "")
        assert "never shown" not in (outcome.error or "")

    async def test_a_redirect_leads_nowhere(self, publisher: Open) -> None:
        async with site() as other, site(status(307, location=f"{other.url}/")) as shop:
            (outcome,) = await publish(await publisher(shop.url), [make_event()])
        assert outcome.is_outage
        assert not other.requests

    @pytest.mark.parametrize("code", [429, 503, 500])
    async def test_a_pause_that_it_asks_for_is_kept(self, publisher: Open, code: int) -> None:
        async with site(status(code, retry_after="120")) as shop:
            (outcome,) = await publish(await publisher(shop.url), [make_event()])
        assert outcome.is_outage
        assert outcome.after_seconds == 120

    async def test_a_pause_until_an_instant(self, publisher: Open) -> None:
        until = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
        async with site(status(503, retry_after=until)) as shop:
            (outcome,) = await publish(await publisher(shop.url), [make_event()])
        assert 500 < (outcome.after_seconds or 0) <= 600

    async def test_an_endless_answer_is_cut_and_its_status_counts(self, publisher: Open) -> None:
        async with site(endless(200)) as shop:
            opened = await publisher(shop.url)
            assert await publish(opened, [make_event()]) == [PUBLISHED]
            shop.answer = endless(500)
            (outcome,) = await publish(opened, [make_event()])
            assert (outcome.result, outcome.ambiguous) == (Result.RETRY, True)
        assert len({each.connection for each in shop.requests}) == 2

    async def test_an_answer_that_dribbles_is_not_waited_for(self, publisher: Open) -> None:
        stop = asyncio.Event()

        async def dribble(request: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await stop.wait()

        async with site(dribble) as shop:
            assert await publish(await publisher(shop.url, timeout="1h"), [make_event()]) == [PUBLISHED]
            stop.set()

    async def test_something_else_than_http(self, publisher: Open) -> None:
        async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(garble, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            (outcome,) = await publish(await publisher(f"http://127.0.0.1:{port}"), [make_event()])
        assert (outcome.result, outcome.charged) == (Result.RETRY, False)
        assert "did not answer in HTTP" in (outcome.error or "")

    async def test_silence_charges_nobody(self, publisher: Open) -> None:
        async with site(Hang()) as shop:
            events = numbered(6, 2)
            outcomes = await publish(await publisher(shop.url, timeout="300ms"), events)
        assert {(each.result, each.charged, each.ambiguous) for each in outcomes[:6]} == {(Result.RETRY, False, True)}
        assert outcomes[6:] == [UNTRIED] * 6

    async def test_an_event_that_alone_has_no_answer_is_charged(self, publisher: Open) -> None:
        hang = Hang()

        async def answer(request: Any, send: Any) -> None:
            await (hang if request.headers["event-key"] == "k0" else status(204))(request, send)

        async with site(answer) as shop:
            opened = await publisher(shop.url, timeout="1s")
            call = asyncio.create_task(publish(opened, numbered(1, 1)))
            while not call.done():
                assert await publish(opened, [make_event()]) == [PUBLISHED]
        (outcome,) = await call
        assert (outcome.result, outcome.charged, outcome.ambiguous) == (Result.RETRY, True, True)
        assert "did not answer within 1 s" in (outcome.error or "")

    async def test_bodies_above_the_limit_are_not_sent(self, publisher: Open) -> None:
        async with site() as shop:
            opened = await publisher(shop.url, max_bytes=100)
            outcomes = await publish(opened, [make_event(payload=b"x" * 101), make_event(payload=b"x" * 100)])
        assert [each.result for each in outcomes] == [Result.REJECTED, Result.PUBLISHED]
        assert "101 bytes and max_bytes is 100" in (outcomes[0].error or "")
        assert len(shop.requests) == 1

    async def test_a_large_body(self, publisher: Open) -> None:
        async with site() as shop:
            event = make_event(payload=b"x" * 3_000_000)
            assert await publish(await publisher(shop.url, max_bytes=4_000_000), [event]) == [PUBLISHED]
        assert shop.requests[0].body == event.payload

    async def test_a_header_builder_that_fails_rejects_the_event(self, publisher: Open) -> None:
        async with site() as shop:
            opened = await publisher(shop.url, headers=lambda event: [("h", b"\xff secret")])
            (outcome,) = await publish(opened, [make_event()])
        assert outcome.result is Result.REJECTED
        assert "UnicodeDecodeError" in (outcome.error or "")
        assert "secret" not in (outcome.error or "")

    async def test_a_publisher_that_is_not_open_says_so(self) -> None:
        (outcome,) = await publish(HttpPublisher("https://a.example"), [make_event()])
        assert outcome.is_outage
        assert "call open()" in (outcome.error or "")


class TestAccess:
    async def test_tls(self, files: Certificates, publisher: Open) -> None:
        async with site(files=files, client_certificates=True) as shop:
            opened = await publisher(shop.url, cafile=str(files.authority), certfile=str(files.client))
            assert await publish(opened, [make_event()]) == [PUBLISHED]

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    async def test_a_certificate_that_is_not_trusted(self, files: Certificates, publisher: Open, host: str) -> None:
        async with site(files=files) as shop:
            opened = await publisher(shop.url.replace("127.0.0.1", host))
            (outcome,) = await publish(opened, [make_event()])
        assert outcome.is_outage
        assert re.search(r"TLS was refused \(.*certificate.*\); correct the certificates", outcome.error or "")
        assert not shop.requests

    async def test_a_certificate_for_another_name(self, tmp_path: Any, publisher: Open) -> None:
        files = certificates(tmp_path, names=["elsewhere.example"])
        async with site(files=files) as shop:
            opened = await publisher(shop.url.replace("127.0.0.1", "localhost"), cafile=str(files.authority))
            (outcome,) = await publish(opened, [make_event()])
        assert outcome.is_outage
        assert "TLS was refused (Hostname mismatch" in (outcome.error or "")

    async def test_a_client_without_its_certificate(self, files: Certificates, publisher: Open) -> None:
        async with site(files=files, client_certificates=True) as shop:
            (outcome,) = await publish(await publisher(shop.url, cafile=str(files.authority)), [make_event()])
        assert outcome.is_outage or (outcome.result is Result.RETRY and not outcome.charged)
        assert outcome.error
        assert not shop.requests

    async def test_https_where_there_is_none(self, publisher: Open) -> None:
        async with site() as shop:
            (outcome,) = await publish(await publisher(shop.url.replace("http:", "https:")), [make_event()])
        assert outcome.is_outage
        assert "TLS was refused" in (outcome.error or "")

    async def test_what_the_doctor_sees(self, publisher: Open) -> None:
        async with site() as shop:
            found = await (await publisher(shop.url)).examine()
            assert [(each.check, each.state) for each in found] == [
                ("limits", State.OK),
                ("address", State.OK),
                ("signature", State.WARNING),
            ]
        found = await (await publisher(f"http://127.0.0.1:{free_port()}", secret=SECRET)).examine()
        assert [(each.check, each.state) for each in found] == [("limits", State.OK), ("address", State.FAILED)]
        assert not shop.requests
        with pytest.raises(Outage, match="is not open"):
            await HttpPublisher(shop.url).examine()


class TestOutages:
    async def test_away(self, publisher: Open) -> None:
        (outcome,) = await publish(await publisher(f"http://127.0.0.1:{free_port()}"), [make_event()])
        assert outcome.is_outage
        assert "cannot be reached: Connection refused" in (outcome.error or "")

    async def test_a_host_without_an_address(self, publisher: Open) -> None:
        (outcome,) = await publish(await publisher("http://nobody.invalid"), [make_event()])
        assert outcome.is_outage
        assert "its host has no address" in (outcome.error or "")

    async def test_killed_in_the_middle_of_calls(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Receiver)
        opened, events = await publisher(server.url), numbered(20, 20)
        call = asyncio.create_task(publish(opened, events))
        await until(server.count)
        server.kill()
        outcomes = await call
        assert UNTRIED in outcomes or any(each.is_outage for each in outcomes)
        assert not [each for each in outcomes if each.result is Result.RETRY and each.charged]
        assert (await publish(opened, events[:1]))[0].is_outage
        server.start()
        await publish_rest(
            opened, [event for event, each in zip(events, outcomes, strict=True) if each is not PUBLISHED]
        )
        assert_key_order(events, [each.headers["webhook-id"] for each in server.taken()])

    async def test_paused_for_longer_than_it_may_be_silent(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Receiver)
        opened, events = await publisher(server.url, timeout="500ms"), numbered(5, 10)
        server.pause()
        outcomes = await publish(opened, events)
        assert not [each for each in outcomes if each is PUBLISHED or (each.result is Result.RETRY and each.charged)]
        server.resume()
        await publish_rest(opened, events)
        assert_key_order(events, [each.headers["webhook-id"] for each in server.taken()])

    async def test_cut_in_the_middle_of_calls(self, own_server: OwnServer, publisher: Open) -> None:
        server = own_server(Receiver)
        async with Proxy("127.0.0.1", server.port) as proxy:
            opened, events = await publisher(f"http://127.0.0.1:{proxy.port}"), numbered(20, 20)
            rest = events
            for direction in ("to_server", "to_client", "to_server"):
                await proxy.cut_after(700 if direction == "to_server" else 200, direction)
                outcomes = await publish(opened, rest)
                assert not [each for each in outcomes if each.result is Result.RETRY and each.charged]
                assert {each.result for each in outcomes} - {Result.PUBLISHED}
                rest = [event for event, each in zip(rest, outcomes, strict=True) if each is not PUBLISHED]
            await proxy.heal()
            await publish_rest(opened, rest)
        assert_key_order(events, [each.headers["webhook-id"] for each in server.taken()])
