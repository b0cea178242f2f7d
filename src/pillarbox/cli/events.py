"""``pillarbox events``."""

import base64
import json
import sys
from typing import Any, Final

from pillarbox.cli import output
from pillarbox.cli.hints import NotFound
from pillarbox.cli.output import Column
from pillarbox.cli.parser import command, commands
from pillarbox.cli.session import event_id, instant, open_store, run
from pillarbox.cli.settings import Settings
from pillarbox.errors import ConfigError
from pillarbox.event import Event, Status
from pillarbox.outbox import Outbox
from pillarbox.payload import JSON, serialise
from pillarbox.store import Filter, Found

COLUMNS: Final = (
    Column("id"),
    Column("stream", shrinks=True),
    Column("status"),
    Column("type", shrinks=True),
    Column("key", shrinks=True),
    Column("attempts", right=True),
    Column("created_at"),
)
_MOST: Final = 1_000_000_000
_TEXTS: Final = ("aggregate_type", "aggregate_id", "routing_key", "content_type", "schema_id", "schema_version")


def add(group: Any) -> None:
    """Register the commands."""
    parser = group.add_parser("events", help="list, show and add events")
    inner = commands(parser)
    listing = command(inner, "list", list_events, "list events, newest first")
    listing.add_argument("--status", choices=[each.value for each in Status], metavar="STATUS", help=", ".join(Status))
    add_filters(listing, "written")
    listing.add_argument("--oldest-first", action="store_true", help="in the order in which they were written")
    add_limit(listing)
    show = command(inner, "show", show_event, "show one event: its state, its errors, its headers")
    show.add_argument("id", metavar="ID")
    show.add_argument("--payload", action="store_true", help="its payload too, which may hold secrets")
    _add_add(inner)


def _add_add(inner: Any) -> None:
    parser = command(inner, "add", add_event, "write an event, in a transaction of its own")
    parser.add_argument("type", metavar="TYPE", help="for example order.created")
    parser.add_argument("payload", metavar="PAYLOAD", help="JSON, or what --content-type says; - reads standard input")
    for name in ("key", "topic", "stream", "tenant"):
        parser.add_argument(f"--{name}", metavar="TEXT")
    for name in _TEXTS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="TEXT")
    for name in ("aggregate_version", "max_attempts"):
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=int)
    parser.add_argument("--id", metavar="UUID", help="made if not given")
    parser.add_argument("--header", metavar="NAME=VALUE", action="append", default=[], help="may be given again")
    parser.add_argument("--occurred-at", metavar="INSTANT")
    parser.add_argument("--available-at", metavar="INSTANT", help="not before; a duration counts from now, as in 10m")


def add_filters(parser: Any, done: str) -> None:
    """What events can be chosen by."""
    for name in ("stream", "key", "type", "tenant"):
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"of this {name}")
    parser.add_argument("--since", metavar="INSTANT", help=f"{done} then or later; a duration counts back, as in 2h")
    parser.add_argument("--until", metavar="INSTANT", help=f"{done} before")


def add_limit(parser: Any) -> None:
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="at the most so many (50)")


def filter_of(chosen: Any, status: str | None = None) -> Filter:
    return Filter(
        stream=chosen.stream,
        status=None if status is None else Status(status),
        key=chosen.key,
        type=chosen.type,
        tenant=chosen.tenant,
        since=instant(chosen.since, "--since"),
        until=instant(chosen.until, "--until"),
    )


def limit_of(chosen: Any) -> int:
    if not 1 <= chosen.limit <= _MOST:
        raise ConfigError(f"--limit is {chosen.limit}; use 1 to {_MOST}")
    limit: int = chosen.limit
    return limit


def fields(found: Found) -> dict[str, Any]:
    """What a list says about an event, in the words of the record."""
    event = found.event
    return {
        "id": str(event.id),
        "seq": event.seq,
        "stream": event.stream,
        "tenant": event.tenant,
        "topic": event.topic,
        "type": event.type,
        "key": event.key,
        "status": event.status.value,
        "attempts": event.attempts,
        "created_at": output.instant(event.created_at),
        "next_attempt_at": output.instant(found.next_attempt_at),
        "published_at": output.instant(found.published_at),
        "last_error": found.last_error,
        "last_error_at": output.instant(found.last_error_at),
        "payload_bytes": found.payload_bytes,
    }


def all_fields(found: Found, *, payload: bool) -> dict[str, Any]:
    """All that is known."""
    event = found.event
    more = {
        **{name: getattr(event, name) for name in _TEXTS},
        "aggregate_version": event.aggregate_version,
        "max_attempts": event.max_attempts,
        "occurred_at": output.instant(event.occurred_at),
        "available_at": output.instant(event.available_at),
        "processing_started_at": output.instant(found.processing_started_at),
        "lease_owner": found.lease_owner,
        "lease_until": output.instant(found.lease_until),
        "lease_token": found.lease_token,
        "holds_key": found.holds_key,
        "headers": dict(event.headers),
        "errors": [dict(line) for line in found.errors],
    }
    if payload:
        try:
            more["payload"] = event.payload.decode()
        except UnicodeDecodeError:
            more["payload_base64"] = base64.b64encode(event.payload).decode()
    return fields(found) | more


def print_list(found: Any, chosen: Any, columns: Any, nothing: str) -> None:
    rows = [fields(each) | {"holds_key": each.holds_key} for each in found]
    if chosen.json:
        output.print_json(rows)
    elif rows:
        output.print_table(columns, rows)
    else:
        print(nothing)


def print_event(found: Found, chosen: Any) -> None:
    everything = all_fields(found, payload=chosen.payload)
    if chosen.json:
        output.print_json(everything)
        return
    errors, headers = everything.pop("errors"), everything.pop("headers")
    text, encoded = everything.pop("payload", None), everything.pop("payload_base64", None)
    output.print_record({name: value for name, value in everything.items() if value is not False})
    for title, lines in (
        ("headers", [f"{name}: {value}" for name, value in headers.items()]),
        ("errors", [f"{line.get('at')}  attempt {line.get('attempts')}  {line.get('error')}" for line in errors]),
        ("payload", text.splitlines() if text else []),
        ("payload, which is not text, as base64", [encoded] if encoded else []),
    ):
        if lines:
            print(f"\n{title}")
            for line in lines:
                print(f"  {output.shown(line)}")


def list_events(chosen: Any) -> int:
    async def work() -> int:
        where, limit = filter_of(chosen, chosen.status), limit_of(chosen)
        async with open_store(Settings.of(chosen)) as store:
            found = await store.find(where, limit, newest_first=not chosen.oldest_first)
        print_list(found, chosen, COLUMNS, "no event matches")
        return 0

    return run(work())


def show_event(chosen: Any) -> int:
    async def work() -> int:
        wanted = event_id(chosen.id)
        async with open_store(Settings.of(chosen)) as store:
            found = await store.look(wanted)
            where = store.description
        if found is None:
            raise NotFound(
                f"{where} has no event {wanted}; it may have been pruned, or `pillarbox events list` shows it"
            )
        print_event(found, chosen)
        return 0

    return run(work())


def add_event(chosen: Any) -> int:
    settings = Settings.of(chosen)
    # Before the event loop starts, which would keep Ctrl-C from ending a read of standard input.
    event = _event(chosen)

    async def work() -> int:
        async with open_store(settings) as store:
            await store.add([event])
        if chosen.json:
            output.print_json({"id": str(event.id), "stream": event.stream})
        else:
            print(event.id)
        return 0

    return run(work())


def _event(chosen: Any) -> Event:
    headers = {}
    for header in chosen.header:
        name, equals, value = header.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header is {header!r}; write NAME=VALUE")
        headers[name] = value
    given = {name: getattr(chosen, name) for name in (*_TEXTS, "key", "stream", "aggregate_version", "max_attempts")}
    data = sys.stdin.buffer.read() if chosen.payload == "-" else chosen.payload.encode("utf-8", "surrogateescape")
    given["content_type"] = chosen.content_type or JSON
    if given["content_type"] == JSON:
        data = data.strip()  # a shell ends what it writes with a line break
        _check_json(data)
    return Outbox().event(
        chosen.type,
        data,
        **given,
        topic=chosen.topic or "",
        tenant=chosen.tenant or "default",
        id=None if chosen.id is None else event_id(chosen.id),
        headers=headers,
        occurred_at=instant(chosen.occurred_at, "--occurred-at"),
        available_at=instant(chosen.available_at, "--available-at", ahead=True),
    )


def _check_json(data: bytes) -> None:
    try:
        value = json.loads(data)
    except ValueError:
        raise ConfigError(
            "the payload is not JSON; quote it for the shell, as in '{\"id\": 7}', or give --content-type text/plain"
        ) from None
    # In a list: text by itself would not be looked at as JSON.
    serialise([value])
