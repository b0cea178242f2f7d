"""A Kafka cluster that refuses certificates, passwords and rights: a real broker with TLS, SASL and an authorizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import admin as confluent_admin

from pillarbox.batch import Batch, Part
from pillarbox.conformance.source import Reader
from pillarbox.errors import Outage
from pillarbox.event import Status
from pillarbox.publisher import PUBLISHED, Outcome, Place, Result
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.sources.kafka import KafkaSource
from pillarbox.store import Store, new_ticket
from servers import Kafka
from servers.fixtures import OwnServer
from tests.integration.certificates import Certificates, certificates
from tests.integration.relays import CircuitState, SqlOutbox, attempts, counts, numbered, relay, settled, stream
from tests.integration.relays import until as until_true
from tests.integration.test_kafka_publisher import Cluster, an_event

pytestmark = [pytest.mark.asyncio, pytest.mark.long]

kafka_admin: Any = confluent_admin  # its types leave out what it exports


class Guarded:
    """A broker that takes TLS with certificates of its own authority, passwords, and only what an ACL allows."""

    def __init__(self, own_server: OwnServer, folder: Path) -> None:
        self.files = certificates(folder)
        keys = folder / "keystore.pem"
        keys.write_bytes(self.files.server_key.read_bytes() + self.files.server.read_bytes())
        self.server = own_server(
            Kafka,
            settings={
                "listener.security.protocol.map": "PLAINTEXT:SASL_SSL,CONTROLLER:PLAINTEXT",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(keys),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.files.authority),
                "listener.name.plaintext.ssl.client.auth": "required",
                # A lone broker talks to itself, too, to check transactions. Without this name it takes the listener's
                # name for its protocol, and speaks without TLS.
                "inter.broker.listener.name": "PLAINTEXT",
                "sasl.enabled.mechanisms": "PLAIN",
                "sasl.mechanism.inter.broker.protocol": "PLAIN",
                "listener.name.plaintext.plain.sasl.jaas.config": (
                    "org.apache.kafka.common.security.plain.PlainLoginModule required "
                    'username="admin" password="pw" user_admin="pw" user_app="pw";'
                ),
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:admin;User:ANONYMOUS",
            },
        )
        self.login = self.properties(self.files, user="admin")
        self.cluster = Cluster(self.server, **self.login)
        self._admin: Any = kafka_admin.AdminClient(
            {"bootstrap.servers": self.server.bootstrap_servers, "log_level": 0, **self.login}
        )
        self.topic = self.cluster.topic()

    def properties(self, files: Certificates, *, user: str = "app", password: str = "pw") -> dict[str, str]:
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(files.authority),
            "ssl.certificate.location": str(files.client),
            "ssl.key.location": str(files.client),
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": password,
        }

    def publisher(self, properties: dict[str, str] | None = None, topic: str | None = None) -> KafkaPublisher:
        return KafkaPublisher(
            servers=self.server.bootstrap_servers,
            topic=topic or self.topic,
            properties=properties or self.properties(self.files),
        )

    def allow(self, *operations: str, topic: str | None = None) -> None:
        for answer in self._admin.create_acls([self._rule(each, topic) for each in operations]).values():
            answer.result()

    def forbid(self, *operations: str) -> None:
        rules = [self._rule(each, None, kafka_admin.AclBindingFilter) for each in operations]
        for answer in self._admin.delete_acls(rules).values():
            assert answer.result()

    def _rule(self, operation: str, topic: str | None, kind: Any = kafka_admin.AclBinding) -> Any:
        return kind(
            kafka_admin.ResourceType.TOPIC,
            topic or self.topic,
            kafka_admin.ResourcePatternType.LITERAL,
            "User:app",
            "*",
            kafka_admin.AclOperation[operation],
            kafka_admin.AclPermissionType.ALLOW,
        )


@pytest.fixture
def guarded(own_server: OwnServer, tmp_path: Path) -> Guarded:
    return Guarded(own_server, tmp_path)


async def refused(publisher: KafkaPublisher) -> str:
    """What a publisher says that cannot connect: an outage, so that a relay waits and charges nothing."""
    with pytest.raises(Outage) as caught:
        await publisher.open()
    await publisher.close()
    said = str(caught.value)
    assert "\n" not in said
    assert "pw" not in said
    assert "guess" not in said
    return said


async def published(publisher: KafkaPublisher, *topics: str) -> Sequence[Outcome]:
    await publisher.open()
    try:
        return await publisher.publish(Batch.of([an_event(n, topic=topic) for n, topic in enumerate(topics)]))
    finally:
        await publisher.close()


async def test_each_refusal_is_one_sentence_with_its_reason(guarded: Guarded, tmp_path: Path) -> None:
    guarded.allow("WRITE")
    right = guarded.properties(guarded.files)
    assert await published(guarded.publisher(), "") == [PUBLISHED]

    (tmp_path / "other").mkdir()
    others = certificates(tmp_path / "other")
    # the client trusts another authority than the one that signed the broker's certificate
    said = await refused(guarded.publisher(right | {"ssl.ca.location": str(others.authority)}))
    assert "certificate" in said
    # a consumer is told the same
    untrusting = right | {"ssl.ca.location": str(others.authority)}
    source = KafkaSource(servers=guarded.server.bootstrap_servers, topic=guarded.topic, properties=untrusting)
    with pytest.raises(Outage, match=r"cannot be reached: .*certificate") as caught:
        await source.open("cards", Reader(source, 1.0))
    await source.close()
    assert "\n" not in str(caught.value)
    # the broker does not trust the client's certificate, or gets none
    foreign = {"ssl.certificate.location": str(others.client), "ssl.key.location": str(others.client)}
    assert "SSL" in await refused(guarded.publisher(right | foreign))
    none = {name: value for name, value in right.items() if name not in foreign}
    assert "SSL" in await refused(guarded.publisher(none))
    # the client speaks without TLS: the broker only hangs up
    assert "cannot be reached" in await refused(guarded.publisher(right | {"security.protocol": "sasl_plaintext"}))
    # a wrong password, and an unknown user
    assert "Authentication failed" in await refused(guarded.publisher(right | {"sasl.password": "guess"}))
    assert "Authentication failed" in await refused(guarded.publisher(right | {"sasl.username": "nobody"}))


async def test_a_user_without_rights_is_charged_nothing(guarded: Guarded) -> None:
    other = guarded.cluster.topic()
    # no rights at all: neither on the topics nor on the cluster
    down, waiting = await published(guarded.publisher(), "", other)
    assert down.is_outage
    assert (waiting.result, waiting.charged) == (Result.RETRY, False)
    for outcome, topic in ((down, guarded.topic), (waiting, other)):
        assert f"topic {topic!r} on kafka {guarded.server.bootstrap_servers} may not be written" in str(outcome.error)
    # the right to see a topic is not the right to write, and a producer needs one of the cluster's topics to begin
    guarded.allow("DESCRIBE")
    (down,) = await published(guarded.publisher(), "")
    assert down.is_outage
    assert "refuses this client" in str(down.error) or "may not be written" in str(down.error)
    # one topic may be written and the other one not
    guarded.allow("WRITE")
    fine, waiting = await published(guarded.publisher(), "", other)
    assert fine == PUBLISHED
    assert (waiting.result, waiting.charged) == (Result.RETRY, False)
    assert f"topic {other!r}" in str(waiting.error)


async def test_a_relay_waits_while_its_user_may_not_write(guarded: Guarded, sqlite: SqlOutbox, store: Store) -> None:
    guarded.allow("WRITE")
    circuit = CircuitState()
    await store.add(numbered("a", 20))
    async with relay(sqlite(), stream(guarded.publisher(), max_attempts=1), observers=[circuit]):
        await settled(store, {Status.PUBLISHED: 20})
        guarded.forbid("WRITE")
        await store.add(numbered("a", 20, first=21))
        await until_true(lambda: circuit.state == "open")
        assert await counts(store) == {Status.PUBLISHED: 20, Status.PENDING: 20}
        guarded.allow("WRITE")
        await settled(store, {Status.PUBLISHED: 40}, seconds=60)
    assert await attempts(store) == [1] * 40
    assert [record.value for record in guarded.cluster.read(guarded.topic)] == [b'{"n": %d}' % n for n in range(1, 41)]


async def test_a_relay_with_a_wrong_password_loses_and_charges_nothing(
    guarded: Guarded, sqlite: SqlOutbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.allow("WRITE")
    await store.add(numbered("a", 20))
    wrong = guarded.publisher(guarded.properties(guarded.files, password="guess"))
    async with relay(sqlite(), stream(wrong, max_attempts=1)):
        await until_true(lambda: "Authentication failed" in caplog.text)
        assert await counts(store) == {Status.PENDING: 20}
    assert "guess" not in caplog.text
    async with relay(sqlite(), stream(guarded.publisher(), max_attempts=1)):
        await settled(store, {Status.PUBLISHED: 20})
    assert await attempts(store) == [1] * 20
    assert len(guarded.cluster.read(guarded.topic)) == 20


async def test_the_rights_for_exactly_once_are_named(guarded: Guarded) -> None:
    guarded.allow("WRITE")
    publisher = KafkaPublisher(
        servers=guarded.server.bootstrap_servers,
        topic=guarded.topic,
        properties=guarded.properties(guarded.files),
        delivery="exactly-once",
    )
    place = Place("shop", "orders", 0, 4, 1)

    def allow(kind: str, *operations: str) -> None:
        for operation in operations:
            rule = kafka_admin.AclBinding(
                kafka_admin.ResourceType[kind],
                "shop.",
                kafka_admin.ResourcePatternType.PREFIXED,
                "User:app",
                "*",
                kafka_admin.AclOperation[operation],
                kafka_admin.AclPermissionType.ALLOW,
            )
            for answer in guarded._admin.create_acls([rule]).values():
                answer.result()

    await publisher.open()
    try:
        with pytest.raises(Outage, match=r"progress topic 'shop.orders.progress'.*kafka-topics --create --topic shop."):
            await publisher.recover(place)
        allow("TOPIC", "CREATE", "READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS")
        with pytest.raises(Outage, match=r"does not allow this client transactions; run: .*--transactional-id shop\."):
            await publisher.recover(place)
        allow("TRANSACTIONAL_ID", "WRITE", "DESCRIBE")
        assert await publisher.recover(place) == b""
        events = [an_event(n) for n in range(3)]
        ticket = new_ticket(events, None)
        batch = Batch(place.stream, [Part(place.shard, place.token, events, ticket)])
        assert await publisher.publish(batch) == [PUBLISHED] * 3
        assert await publisher.recover(place) == ticket
    finally:
        await publisher.close()
