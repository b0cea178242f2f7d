"""The stream that takes a subject: what it does with messages, and whether it keeps what it confirms."""

from collections.abc import Sequence
from typing import Final

from nats.errors import Error, NoRespondersError
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import DiscardPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import NotFoundError, ServiceUnavailableError

from pillarbox.errors import Outage
from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.publishers.nats.connection import NatsConnection

_WINDOW_SECONDS: Final = 30.0  # twice the usual lease


async def stream_of(connection: NatsConnection, subject: str, seconds: float) -> StreamInfo | None:
    """The stream that takes this subject; None: there is none. Raises Outage when the server does not say."""
    manager = connection.client.jsm(timeout=seconds)
    name = connection.description
    try:
        return await manager.stream_info(await manager.find_stream_name_by_subject(subject))
    except NotFoundError:
        return None
    except (ServiceUnavailableError, NoRespondersError) as error:
        raise Outage(f"{name} has no JetStream for this user; turn it on, or correct the user") from error
    except (NatsTimeout, TimeoutError) as error:
        raise Outage(
            f"{name} does not tell about its streams; allow this user to publish to $JS.API.STREAM.>"
        ) from error
    except Error as error:
        raise Outage(f"{name} does not tell about its streams ({type(error).__name__})") from error


def never_confirms(config: StreamConfig) -> str | None:
    """Why this stream confirms no message; None: it does."""
    if config.no_ack:
        return f"stream {config.name!r} confirms nothing; make it anew without no_ack"
    if config.sealed:
        return f"stream {config.name!r} is sealed; make another one"
    return None


async def examine_subject(connection: NatsConnection, subject: str, expected: str, seconds: float) -> Sequence[Finding]:
    """The findings about the default subject. expected: the stream that the publisher names."""
    found = await stream_of(connection, subject, seconds)
    if found is None:
        return [failed("address", f"no stream takes subject {subject!r}", "make one, or add the subject to one")]
    config = found.config
    if expected and config.name != expected:
        return [
            failed(
                "address",
                f"stream {config.name!r} takes subject {subject!r}, and not {expected!r}",
                "correct stream= or subject=",
            )
        ]
    if (problem := never_confirms(config)) is not None:
        return [failed("address", problem, "correct the stream")]
    largest = config.max_msg_size or -1
    limit = connection.max_bytes if largest < 0 else min(largest, connection.max_bytes)
    return [
        ok("address", f"stream {config.name!r} takes subject {subject!r}"),
        _durability(config),
        _retention(config),
        _window(config),
        ok("limits", f"a message has at most {limit:,} bytes with its headers"),
    ]


def _durability(config: StreamConfig) -> Finding:
    name, copies = f"stream {config.name!r}", config.num_replicas or 1
    count = "1 copy" if copies == 1 else f"{copies} copies"
    if config.storage == StorageType.MEMORY:
        return failed(
            "durability", f"{name} is in memory: a restart loses confirmed events", "make it anew with file storage"
        )
    if copies < 3:
        return warning(
            "durability",
            f"{name} has {count}: unless the server syncs each message, power loss takes confirmed events with it",
            "use 3 replicas, or set sync_interval: always in the server's jetstream block",
        )
    return ok("durability", f"{name} has {copies} copies, and most of them have a message when it is confirmed")


def _retention(config: StreamConfig) -> Finding:
    name = f"stream {config.name!r}"
    limits = [
        f"{label} {value:g}"
        for label, value in (
            ("max_msgs", config.max_msgs),
            ("max_bytes", config.max_bytes),
            ("max_msgs_per_subject", config.max_msgs_per_subject),
        )
        if value is not None and value > 0
    ]
    if limits and config.discard != DiscardPolicy.NEW:
        return warning(
            "retention",
            f"{name} drops its oldest messages at {', '.join(limits)}, read or not",
            "set discard to new: the relay then waits until there is room",
        )
    if config.max_age:
        return ok("retention", f"{name} keeps messages for {config.max_age:g} s")
    return ok("retention", f"{name} drops no message that nobody has read")


def _window(config: StreamConfig) -> Finding:
    seconds = config.duplicate_window or 0.0
    sentence = f"stream {config.name!r} drops copies of an event for {seconds:g} s"
    if seconds < _WINDOW_SECONDS:
        return warning("duplicates", sentence, "set its duplicate window to at least twice the lease of the relay")
    return ok("duplicates", sentence)
