"""Why a cluster has no transactions: its transaction log cannot be made or written. Blocking."""

from typing import Any, Final

from confluent_kafka import KafkaException

from pillarbox.finding import Finding, failed, ok
from pillarbox.publishers.kafka.topics import DESCRIBE_SECONDS, kafka_admin

_COPIES: Final = "transaction.state.log.replication.factor"
_IN_SYNC: Final = "transaction.state.log.min.isr"


def examine_transactions(admin: Any) -> Finding:
    """For ``pillarbox doctor``."""
    if problem := transaction_problem(admin):
        return failed("delivery", f"exactly once needs transactions: {problem}", "correct it before the relay starts")
    return ok(
        "delivery",
        "exactly once, for consumers with isolation.level=read_committed; a copy of this database needs "
        "`pillarbox identity --new` before its relays start",
    )


def transaction_problem(admin: Any) -> str:
    """A sentence with the remedy; empty if nothing is known to be wrong."""
    try:
        brokers = sorted(admin.list_topics(timeout=DESCRIBE_SECONDS).brokers)
        resource = kafka_admin.ConfigResource(kafka_admin.ResourceType.BROKER, str(brokers[0]))
        (answer,) = admin.describe_configs([resource], request_timeout=DESCRIBE_SECONDS).values()
        settings = {name: entry.value for name, entry in answer.result().items() if name in (_COPIES, _IN_SYNC)}
    except (KafkaException, IndexError):
        return ""
    for name in (_COPIES, _IN_SYNC):
        wanted = int(settings.get(name) or 0)
        if wanted > len(brokers):
            return (
                f"the brokers want {wanted} replicas of the transaction log ({name}={wanted}), and {len(brokers)} "
                "of them are there; start the others, or lower the setting of the brokers"
            )
    return ""
