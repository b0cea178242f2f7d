"""Checks of an exchange or a queue of RabbitMQ."""

from collections.abc import Sequence

from pillarbox.amqp import AmqpConnection
from pillarbox.finding import Finding, failed, ok, warning

_TYPE = "x-queue-type"


async def examine_address(connection: AmqpConnection, exchange: str, queue: str) -> Sequence[Finding]:
    """Give an exchange or a queue. What confirmed events are kept by is known of a queue only."""
    name = f"exchange {exchange!r}" if exchange else f"queue {queue!r}"
    reason = await connection.missing(exchange=exchange, queue=queue)
    if reason is not None:
        return [failed("address", f"{name}: {reason}", "create it, or give this user permission to use it")]
    found = [ok("address", f"{name} exists")]
    if not exchange:
        found.append(_durability(name, await connection.differs(queue, {_TYPE: "quorum"})))
    return found


def _durability(name: str, difference: str | None) -> Finding:
    if difference is None:
        return ok("durability", f"{name} is a quorum queue")
    if f"'{_TYPE}'" in difference and "'stream'" in difference:
        return ok("durability", f"{name} is a stream, which the server replicates")
    if f"'{_TYPE}'" in difference or "'durable'" in difference:
        return failed(
            "durability",
            f"{name} is no quorum queue: a node that is lost takes confirmed events with it",
            f"make it anew with {_TYPE}=quorum",
        )
    return warning("durability", f"the server does not tell whether {name} is a quorum queue", f"check its {_TYPE}")
