"""Checks of a Kafka topic: that it exists, what it takes, and whether it keeps what it confirms."""

from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import KafkaException

from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.publishers.kafka.topics import DESCRIBE_SECONDS, Topic, Topics, kafka_admin

_COPIES: Final = 3
_IN_SYNC: Final = 2


def examine_topic(topics: Topics, name: str) -> Sequence[Finding]:
    """Blocking. Raises UnreachableError."""
    topics.forget(name)
    topic = topics.get([name])[name]
    if topic.problem is not None:
        return [failed("address", topic.problem.sentence, "create the topic, or correct its name")]
    return [ok("address", f"topic {name!r} exists"), _limits(topic), *_durability(topics.admin, name)]


def _limits(topic: Topic) -> Finding:
    if topic.compacted:
        sentence = (
            f"topic {topic.name!r} is compacted: it keeps the last event of each key, and refuses events without a key"
        )
        return warning("limits", sentence, "use cleanup.policy=delete if consumers need every event")
    return ok("limits", f"topic {topic.name!r} takes batches of up to {topic.max_bytes:,} bytes")


def _durability(admin: Any, name: str) -> Sequence[Finding]:
    resource = kafka_admin.ConfigResource(kafka_admin.ResourceType.TOPIC, name)
    try:
        partitions = admin.list_topics(topic=name, timeout=DESCRIBE_SECONDS).topics[name].partitions
        (answer,) = admin.describe_configs([resource], request_timeout=DESCRIBE_SECONDS).values()
        settings = {name: entry.value for name, entry in answer.result().items()}
        in_sync = int(settings["min.insync.replicas"] or 1)
    except KafkaException as error:
        sentence = f"the brokers do not tell how many replicas topic {name!r} has: {error.args[0].str()}"
        return [warning("durability", sentence, "allow this client to describe the topic and its configuration")]
    copies = min((len(partition.replicas) for partition in partitions.values()), default=0)
    said = f"acks=all; topic {name!r} has {copies} replicas, min.insync.replicas={in_sync}"
    if copies < _IN_SYNC:
        return [
            failed(
                "durability",
                f"{said}: a broker that is lost takes confirmed events with it",
                f"give it {_COPIES} replicas and min.insync.replicas=2",
            )
        ]
    if in_sync < _IN_SYNC:
        return [
            warning("durability", f"{said}: an event is confirmed when one broker has it", "set min.insync.replicas=2")
        ]
    if settings.get("unclean.leader.election.enable") == "true":
        sentence = f"{said}: a replica that lags behind may lead, and confirmed events are gone then"
        return [failed("durability", sentence, "set unclean.leader.election.enable=false")]
    if copies <= in_sync:
        return [
            warning(
                "durability", f"{said}: one broker that is away stops all writes", f"give it {in_sync + 1} replicas"
            )
        ]
    return [ok("durability", said)]
