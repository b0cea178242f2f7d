"""``pillarbox events``: list, show, explain, replay and add events."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from pillarbox import operations
from pillarbox.cli import output
from pillarbox.cli.output import Column, Progress
from pillarbox.cli.parser import command, commands
from pillarbox.cli.session import event_id, open_store, operator, run
from pillarbox.cli.settings import Settings
from pillarbox.errors import ConfigError
from pillarbox.event import Event, Status
from pillarbox.operations.filters import FIELDS, instant
from pillarbox.operations.records import iso
from pillarbox.outbox import Outbox
from pillarbox.payload import JSON, serialise
from pillarbox.store import Filter, Found

_COLUMNS: Final = (
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
    parser = group.add_parser("events", help="list, show, explain, replay and add events")
    inner = commands(parser)
    listing = command(inner, "list", list_events, "list events, newest first")
    listing.add_argument("--status", choices=[each.value for each in Status], metavar="STATUS", help=", ".join(Status))
    add_filters(listing, "written")
    listing.add_argument("--oldest-first", action="store_true", help="oldest first instead")
    add_limit(listing)
    add_show(inner, show_event, "show one event: its state, its errors, its headers")
    explain = command(inner, "why", explain_event, "say why an event is not published yet, and what helps")
    explain.add_argument("id", metavar="ID")
    explain.add_argument("--stream", metavar="TEXT", help="needed if the id is in several streams")
    replay = command(inner, "replay", replay_events, "publish published events again, in order per key")
    add_filters(replay, "written")
    replay.add_argument("--all", action="store_true", help="every published event of the outbox")
    replay.add_argument(
        "--skip-since", metavar="INSTANT", help="without those replayed since then: the rest of an interrupted replay"
    )
    replay.add_argument("--dry-run", action="store_true", help="count the events, and change nothing")
    replay.add_argument("--by", metavar="NAME", help="your name in the audit (the user of this process)")
    _add_add(inner)


def add_show(inner: Any, run: Any, text: str) -> Any:
    """Register a command that shows one event; returns its parser."""
    show = command(inner, "show", run, text)
    show.add_argument("id", metavar="ID")
    show.add_argument("--stream", metavar="TEXT", help="needed if the id is in several streams")
    show.add_argument("--payload", action="store_true", help="with its payload, which may contain secrets")
    return show


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
    """The options that choose events; ``done`` says what the instants are about."""
    for name in FIELDS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="TEXT", help=f"of this {name.replace('_', ' ')}")
    parser.add_argument("--since", metavar="INSTANT", help=f"{done} then or later; a duration counts back, as in 2h")
    parser.add_argument("--until", metavar="INSTANT", help=f"{done} before")


def add_limit(parser: Any) -> None:
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="at most this many (50)")


def filter_of(chosen: Any) -> Filter:
    return operations.filter_from(vars(chosen), "--")


def limit_of(chosen: Any) -> int:
    if not 1 <= chosen.limit <= _MOST:
        raise ConfigError(f"--limit is {chosen.limit}; use 1 to {_MOST}")
    limit: int = chosen.limit
    return limit


def print_list(found: Sequence[Found], chosen: Any, columns: Sequence[Column], nothing: str) -> None:
    rows = [operations.list_record(each) for each in found]
    if chosen.json:
        output.print_json(rows)
    elif rows:
        output.print_table(columns, rows)
        for row in rows:
            if row["unreadable"]:
                print(f"{row['id']}: {row['unreadable']}")
    else:
        print(nothing)


def print_event(found: Found, chosen: Any) -> None:
    record = operations.event_record(found, payload=chosen.payload)
    if chosen.json:
        output.print_json(record)
        return
    errors, headers = record.pop("errors"), record.pop("headers")
    text, encoded = record.pop("payload", None), record.pop("payload_base64", None)
    output.print_record({name: value for name, value in record.items() if value is not False})
    for title, lines in (
        ("headers", [f"{name}: {value}" for name, value in headers.items()]),
        ("errors", [f"{line.get('at')}  attempt {line.get('attempts')}  {line.get('error')}" for line in errors]),
        ("payload", text.splitlines() if text else []),
        ("payload (not text) as base64", [encoded] if encoded else []),
    ):
        if lines:
            print(f"\n{title}")
            for line in lines:
                print(f"  {output.shown(line)}")


async def list_events(chosen: Any) -> int:
    where, limit = filter_of(chosen), limit_of(chosen)
    async with open_store(Settings.of(chosen)) as store:
        found = await store.find(where, limit, newest_first=not chosen.oldest_first)
    print_list(found, chosen, _COLUMNS, "no event matches")
    return 0


async def show_event(chosen: Any) -> int:
    wanted = event_id(chosen.id)
    async with open_store(Settings.of(chosen)) as store:
        found = await operations.find_event(store, wanted, chosen.stream)
    print_event(found, chosen)
    return 0


async def explain_event(chosen: Any) -> int:
    wanted = event_id(chosen.id)
    async with open_store(Settings.of(chosen)) as store:
        answer = await operations.why(store, wanted, chosen.stream, wait=asyncio.sleep)
    if chosen.json:
        output.print_json(answer._asdict())
    else:
        print(output.shown(answer.sentence))
        if answer.command:
            print(f"see: {output.shown(answer.command)}")
    return 3 if answer.cause in ("unknown", "elsewhere") else 0


async def replay_events(chosen: Any) -> int:
    where, by = filter_of(chosen), operator(chosen)
    if chosen.all == (where != Filter()):
        raise ConfigError("say which published events to replay: give filters such as --since 2h, or --all")
    skip = instant(chosen.skip_since, "--skip-since")
    async with open_store(Settings.of(chosen)) as store:
        if chosen.dry_run:
            found = 0
            async for _ in operations.published(store, where, skip_since=skip):
                found += 1
        else:
            begun = await store.clock()
            with Progress("replaying") as progress:
                try:
                    found = await operations.replay_published(store, where, by, progress, skip_since=skip)
                except BaseException:
                    since = iso(min(begun, skip) if skip else begun)
                    print(f"pillarbox: interrupted; for the rest add --skip-since {since}", file=sys.stderr)
                    raise
    if chosen.json:
        output.print_json({"dry_run": chosen.dry_run, "replayed": 0 if chosen.dry_run else found, "matching": found})
    elif not found:
        print("no published event matches; a stream with keep_published=0 keeps none, others keep them for a time")
    else:
        done = "would be replayed" if chosen.dry_run else "will be published again"
        print(f"{output.count(found, 'published event')} {done}")
    return 0


def add_event(chosen: Any) -> int:
    settings = Settings.of(chosen)
    # Read standard input outside of the event loop, which would keep Ctrl-C from ending the read.
    return run(_add(chosen, settings, _event(chosen)))


async def _add(chosen: Any, settings: Settings, event: Event) -> int:
    async with open_store(settings) as store:
        await store.add([event])
    if chosen.json:
        output.print_json({"id": str(event.id), "stream": event.stream})
    else:
        print(event.id)
    return 0


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
        data = data.strip()  # `echo` adds a line break
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
    except RecursionError:
        raise ConfigError("the payload is nested too deeply; flatten it, or give --content-type text/plain") from None
    except ValueError:
        raise ConfigError(
            "the payload is not JSON; quote it for the shell, as in '{\"id\": 7}', or give --content-type text/plain"
        ) from None
    # In a list: a text alone would not be checked as JSON.
    serialise([value])
