"""The settings of a server: whether it keeps what it confirms, and its limits."""

from collections.abc import Mapping, Sequence
from typing import Final

from redis.exceptions import ResponseError

from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.publishers.redis.connection import RedisConnection, said

_NAMES: Final = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "maxmemory",
    "maxmemory-policy",
    "proto-max-bulk-len",
)
NOT_TOLD: Final = "the server does not tell its settings; allow this user CONFIG GET"


async def settings_of(connection: RedisConnection) -> Mapping[str, str]:
    """The settings that matter here; empty: the server does not tell them."""
    found: dict[str, str] = {}
    for name in _NAMES:
        try:
            answer = await connection.ask("CONFIG", "GET", name)
        except ResponseError:
            return {}
        words = [word.decode() if isinstance(word, bytes) else str(word) for word in answer]
        found.update(zip(words[::2], words[1::2], strict=True))
    return found


def durability_problems(settings: Mapping[str, str]) -> Sequence[str]:
    """What loses entries that the server has confirmed, each with its remedy."""
    problems = []
    if settings.get("appendonly") != "yes":
        problems.append("appendonly is no, so a restart loses confirmed events: set it to yes")
    elif settings.get("appendfsync") != "always":
        problems.append(
            f"appendfsync is {settings.get('appendfsync')}, so a crash of the machine loses the last confirmed events: "
            "set it to always"
        )
    elif settings.get("no-appendfsync-on-rewrite") == "yes":
        problems.append(
            "no-appendfsync-on-rewrite is yes, so nothing is synced during a rewrite of the append-only file: set it "
            "to no"
        )
    if (problem := eviction_problem(settings)) is not None:
        problems.append(problem)
    return problems


def eviction_problem(settings: Mapping[str, str]) -> str | None:
    policy = settings.get("maxmemory-policy", "")
    if settings.get("maxmemory", "0") == "0" or not policy.startswith("allkeys"):
        return None
    return f"maxmemory-policy is {policy}, so a full server deletes whole streams: set it to noeviction"


def max_bytes_of(settings: Mapping[str, str], most: int) -> int:
    """The largest entry. most: that the publisher's own settings allow."""
    told = settings.get("proto-max-bulk-len", "")
    return min(most, int(told)) if told.isdecimal() and told != "0" else most


async def examine_stream(connection: RedisConnection, stream: str, most: int) -> Sequence[Finding]:
    """The findings about the server, and about the default stream if there is one."""
    settings = await settings_of(connection)
    found = [] if not stream else [await _address(connection, stream)]
    if not settings:
        return [*found, warning("durability", NOT_TOLD.partition(";")[0], "allow this user CONFIG GET")]
    lost = [problem for problem in durability_problems(settings) if problem != eviction_problem(settings)]
    if lost:
        sentence, _, remedy = lost[0].rpartition(": ")
        found.append(failed("durability", sentence, remedy))
    else:
        found.append(ok("durability", "each entry is in the append-only file and on disk when it is confirmed"))
    if (problem := eviction_problem(settings)) is not None:
        sentence, _, remedy = problem.rpartition(": ")
        found.append(failed("eviction", sentence, remedy))
    elif settings.get("maxmemory", "0") == "0":
        found.append(warning("eviction", "maxmemory is 0: a stream can fill the machine's memory", "set maxmemory"))
    else:
        found.append(ok("eviction", "a full server refuses new entries, and the relay waits"))
    found.append(ok("limits", f"an entry has at most {max_bytes_of(settings, most):,} bytes"))
    return found


async def _address(connection: RedisConnection, stream: str) -> Finding:
    try:
        kind = await connection.ask("TYPE", stream)
    except ResponseError as error:
        return warning("address", f"the server does not tell about {stream!r}: {said(error)}", "allow this user TYPE")
    kind = kind.decode() if isinstance(kind, bytes) else str(kind)
    if kind == "stream":
        return ok("address", f"stream {stream!r} exists")
    if kind == "none":
        return ok("address", f"stream {stream!r} does not exist yet; the first event makes it")
    return failed("address", f"{stream!r} is a {kind} and no stream", "rename it, or name another stream")
