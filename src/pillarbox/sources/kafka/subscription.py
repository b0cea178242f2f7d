"""What a reader reads, and what the errors of its client mean for it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError

from pillarbox.errors import ConfigError, Outage
from pillarbox.sources.kafka.partition import Partition

# A new cluster, or one that has lost a broker, is not ready for the group yet.
COMING: Final = frozenset({
    KafkaError.LEADER_NOT_AVAILABLE, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR, KafkaError._WAIT_COORD,
})  # fmt: skip
AWAY: Final = COMING | {
    KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE,
    KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.REQUEST_TIMED_OUT,
}  # fmt: skip
UNKNOWN: Final = frozenset({
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
})  # fmt: skip
# The group is about to share its partitions anew: whoever gets them reads from the last commit.
MOVING: Final = frozenset({
    KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH, KafkaError.FENCED_MEMBER_EPOCH, KafkaError._ASSIGNMENT_LOST,
})  # fmt: skip


class Subscription(NamedTuple):
    """What a source reads, and where a new group begins."""

    config: Mapping[str, Any]
    topics: Sequence[str]
    group: str
    start: str
    description: str

    def explain(self, error: Any, topic: str, reason: str | None = None) -> ConfigError | Outage:
        """The error for one of the client. reason: why no broker can be reached, if it is known better."""
        where = self.description
        match error.code():
            case code if code in UNKNOWN:
                return ConfigError(f"topic {topic!r} does not exist on {where}; create it, or correct topic=")
            case KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return ConfigError(f"topic {topic!r} on {where} may not be read; allow this client to read it")
            case KafkaError.GROUP_AUTHORIZATION_FAILED:
                return ConfigError(
                    f"group {self.group!r} on {where} may not be used; allow this client to read the group"
                )
            case KafkaError.UNSUPPORTED_VERSION | KafkaError._UNSUPPORTED_FEATURE:
                return ConfigError(f"{where} does not support what a setting wants: {error.str()}")
        return Outage(f"{where} cannot be reached: {reason or error.str()}")

    def shut_out(self, error: Any) -> ConfigError:
        """The error for a client that the group does not take back."""
        remedy = (
            "give each process a group.instance.id of its own, or none"
            if "group.instance.id" in self.config
            else "correct what it says, and start the consumer again"
        )
        return ConfigError(
            f"{self.description} has shut this consumer of group {self.group!r} out: {error.str()}; {remedy}"
        )

    def gone(self, partition: Partition, offset: int | None) -> str:
        """What happened to a partition without the offset that is wanted, and the command that decides."""
        reset = (
            f"kafka-consumer-groups.sh --bootstrap-server {self.config['bootstrap.servers']} "
            f"--group {self.group} --topic {partition.topic}:{partition.number} --reset-offsets --to-earliest "
            "--execute"
        )
        where = f"offset {offset}" if offset is not None and offset >= 0 else "the offset that is wanted"
        return (
            f"partition {partition.number} of topic {partition.topic!r} does not have {where}: its retention has "
            f"deleted it, or the topic was made anew. To go on with what is there, stop the consumers of the group and "
            f"run: {reset}"
        )
