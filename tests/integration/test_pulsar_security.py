"""A Pulsar that refuses certificates, tokens and rights: a real broker with TLS, authentication and authorization."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pulsar as client_library
import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.conformance.source import Reader
from pillarbox.errors import Outage
from pillarbox.event import Status
from pillarbox.publisher import PUBLISHED, Result
from pillarbox.publishers.pulsar import PulsarPublisher
from pillarbox.sources.pulsar import PulsarSource
from pillarbox.store import Store
from servers import Pulsar
from servers.process import free_port
from tests.integration.certificates import Certificates, certificates
from tests.integration.relays import (
    SqlOutbox,
    attempts,
    counts,
    eventually,
    mixed,
    numbered,
    relay,
    settled,
    stream,
    until,
    worker_of,
)
from tests.pulsar_cluster import Cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.long]

SECRET = b"a secret of thirty-two bytes or more"


def a_token(subject: str) -> str:
    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    body = f"{encoded(json.dumps({'alg': 'HS256'}).encode())}.{encoded(json.dumps({'sub': subject}).encode())}"
    return f"{body}.{encoded(hmac.new(SECRET, body.encode(), hashlib.sha256).digest())}"


class Guarded(NamedTuple):
    """app may do what a test allows it. Without TLS and with it, everybody needs a token."""

    cluster: Cluster
    files: Certificates
    tls_port: int

    @property
    def tls(self) -> dict[str, Any]:
        return {"servers": f"127.0.0.1:{self.tls_port}", "tls": True, "tls_ca": str(self.files.authority)}

    def allow(self, topic: str, *rights: str) -> None:
        self.cluster.admin("POST", f"persistent/public/default/{topic}/permissions/app", list(rights))


@pytest.fixture(scope="module")
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    request.getfixturevalue("pulsar")  # skips where there is no Pulsar
    files = certificates(tmp_path_factory.mktemp("certificates"))
    port, auth = free_port(), "org.apache.pulsar"
    settings = {
        "authenticationEnabled": "true",
        "authenticationProviders": f"{auth}.broker.authentication.AuthenticationProviderToken",
        "tokenSecretKey": f"data:;base64,{base64.b64encode(SECRET).decode()}",
        "authorizationEnabled": "true",
        "superUserRoles": "admin",
        "brokerClientAuthenticationPlugin": f"{auth}.client.impl.auth.AuthenticationToken",
        "brokerClientAuthenticationParameters": f"token:{a_token('admin')}",
        "backlogQuotaCheckIntervalInSeconds": "1",
        "brokerServicePortTls": str(port),
        "tlsCertificateFilePath": str(files.server),
        "tlsKeyFilePath": str(files.server_key),
        "tlsTrustCertsFilePath": str(files.authority),
    }
    with Pulsar(settings=settings, admin_token=a_token("admin")) as server:
        login = client_library.AuthenticationToken(a_token("admin"))
        yield Guarded(Cluster(server, authentication=login), files, port)


async def test_tls_and_a_token(guarded: Guarded) -> None:
    topic = guarded.cluster.topic()
    guarded.allow(topic, "produce", "consume")
    login = {**guarded.tls, "topic": topic, "token": a_token("app")}
    publisher = PulsarPublisher(**login)
    await publisher.open()
    assert await publisher.publish(Batch.of([make_event(payload=b"1")])) == [PUBLISHED]
    await publisher.close()
    source = PulsarSource(**login)
    reader = Reader(source, 30.0)
    await source.open("cards", reader)
    assert [message.body for message in await reader.read(1)] == [b"1"]
    await source.close()


async def test_each_refusal_is_one_sentence(guarded: Guarded, tmp_path: Path) -> None:
    topic = guarded.cluster.topic()
    guarded.allow(topic, "produce", "consume")
    token, plain = a_token("app"), {"servers": guarded.cluster.servers}
    others = certificates(tmp_path)
    wrong: list[dict[str, Any]] = [
        plain,  # no token
        {**plain, "token": token + "tampered"},
        {**plain, "user": "app", "password": "tampered"},  # a kind of login that the broker does not take
        {**plain, "tls": True, "token": token},  # TLS to a port without it
        {"servers": guarded.tls["servers"], "token": token},  # the other way round
        {**guarded.tls, "token": token, "tls_ca": ""},  # only what the system trusts
        {**guarded.tls, "token": token, "tls_ca": str(others.authority)},
        {**guarded.tls, "token": token, "servers": f"127.0.0.2:{guarded.tls_port}"},  # nobody listens there
        {**guarded.tls, "token": token + "tampered"},
    ]
    for login in wrong:
        publisher = PulsarPublisher(**login, topic=topic, connect_timeout="1s")
        source = PulsarSource(**login, topic=topic, connect_timeout="1s")
        with pytest.raises(Outage, match=r"cannot be reached \(\w+\); .*credentials and certificates$") as caught:
            await publisher.open()
        with pytest.raises(Outage, match=r"cannot be read \(\w+\); .*credentials( and certificates)?$") as caught_too:
            await source.open("cards", Reader(source, 1.0))
        await publisher.close()
        await source.close()
        for said in (str(caught.value), str(caught_too.value), publisher.description, source.description):
            assert "tampered" not in said
            assert token not in said
            assert "\n" not in said
    assert not guarded.cluster.read(topic)


async def test_rights_that_are_missing(guarded: Guarded, tmp_path: Path) -> None:
    mine, other = guarded.cluster.topic(), guarded.cluster.topic()
    guarded.allow(mine, "produce")
    servers, file = guarded.cluster.servers, tmp_path / "token"
    file.write_text(a_token("app") + "\n")
    # A token in a file, a topic that it may write, and one that it may not
    app = PulsarPublisher(servers=servers, topic=mine, token_file=str(file))
    await app.open()
    fine, waiting = await app.publish(Batch.of([make_event(), make_event(topic=other)]))
    await app.close()
    assert fine == PUBLISHED
    assert (waiting.result, waiting.charged) == (Result.RETRY, False)
    assert (waiting.after_seconds or 0) >= 1
    assert "may not be written by this client; grant it the permission to produce" in str(waiting.error)
    # The default topic may not be written
    default = PulsarPublisher(servers=servers, topic=other, token=a_token("app"))
    await default.open()
    (down,) = await default.publish(Batch.of([make_event()]))
    await default.close()
    assert down.is_outage
    # And the right to write is not the right to read
    source = PulsarSource(servers=servers, topic=mine, token=a_token("app"))
    with pytest.raises(Outage, match=r"AuthorizationError.; grant this client the permission to consume"):
        await source.open("cards", Reader(source, 1.0))
    await source.close()


@pytest.mark.parametrize("kind", ["token", "certificate", "right"])
async def test_a_relay_that_is_refused_loses_and_charges_nothing(
    guarded: Guarded, sqlite: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    topic = guarded.cluster.topic(2)
    right: dict[str, Any] = {"servers": guarded.cluster.servers, "token": a_token("app")}
    wrong = {
        "token": {**right, "token": a_token("app") + "tampered"},
        "certificate": {**guarded.tls, "token": a_token("app"), "tls_ca": ""},
        "right": right,
    }[kind]
    if kind != "right":
        guarded.allow(topic, "produce")
    events = mixed(["a", "b"], 10)
    await store.add(events)
    first = PulsarPublisher(**wrong, topic=topic, connect_timeout="1s")
    async with relay(sqlite(), stream(first, max_attempts=1)):
        said = "permission to produce" if kind == "right" else "check the credentials and certificates"
        await until(lambda: said in caplog.text)
        assert await counts(store) == {Status.PENDING: 20}
        if kind == "right":
            guarded.allow(topic, "produce")
            await settled(store, {Status.PUBLISHED: 20})
    assert "tampered" not in caplog.text
    async with relay(sqlite(), stream(PulsarPublisher(**right, topic=topic), max_attempts=1)):
        await settled(store, {Status.PUBLISHED: 20})
    assert await attempts(store) == [1] * 20
    found = [record.headers["event_id"] for record in guarded.cluster.read(topic)]
    for key in ("a", "b"):
        wanted = [str(event.id) for event in events if event.key == key]
        assert [each for each in found if each in wanted] == wanted


@pytest.mark.parametrize("policy", ["producer_exception", "producer_request_hold"])
async def test_a_quota_costs_no_event_an_attempt(
    guarded: Guarded, sqlite: SqlOutbox, store: Store, policy: str
) -> None:
    # Given a topic that nobody reads, and that may keep little for those who should
    cluster = guarded.cluster
    namespace = cluster.namespace()
    topic = f"{namespace}/{cluster.topic(namespace=namespace)}"
    cluster.admin("PUT", f"persistent/{topic}/subscription/slow")
    cluster.admin("POST", f"namespaces/{namespace}/backlogQuota", {"limitSize": 2000, "policy": policy})
    to = PulsarPublisher(servers=cluster.servers, topic=topic, token=a_token("admin"), stuck="2s")
    sent = 0
    async with relay(sqlite(), stream(to, max_attempts=1)) as running:

        async def is_refused() -> bool:
            nonlocal sent
            await store.add(numbered("a", 1, first=sent + 1, headers={"long": "x" * 1000}))
            sent += 1
            worker = worker_of(running)
            return worker is not None and "used up its quota" in str(worker._destination.breaker.error)

        # When the quota is used up, then events wait
        await eventually(is_refused, seconds=60)
        assert (await counts(store)).keys() <= {Status.PUBLISHED, Status.PENDING}
        # And go on when somebody has raised it
        cluster.admin("POST", f"namespaces/{namespace}/backlogQuota", {"limitSize": 100_000_000, "policy": policy})
        await settled(store, {Status.PUBLISHED: sent}, seconds=60)
    assert await attempts(store) == [1] * sent
    found = dict.fromkeys(record.value for record in cluster.read(f"persistent://{topic}"))
    assert list(found) == [b'{"n": %d}' % n for n in range(1, sent + 1)]
