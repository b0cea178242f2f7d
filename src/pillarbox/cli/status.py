"""``pillarbox status`` and ``pillarbox streams``."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from pillarbox import operations
from pillarbox.cli import output
from pillarbox.cli.consumers import print_consumers
from pillarbox.cli.destinations import place
from pillarbox.cli.output import Column
from pillarbox.cli.parser import command, commands
from pillarbox.cli.session import open_store, operator
from pillarbox.cli.settings import Settings
from pillarbox.durations import seconds_of
from pillarbox.errors import ConfigError
from pillarbox.event import Mode, Status
from pillarbox.operations import PlannedStream, StreamRow

_COLUMNS: Final = (
    Column("stream", shrinks=True),
    Column("mode"),
    Column("waiting", right=True),
    Column("oldest", right=True),
    Column("failed", right=True),
    Column("held", right=True),
    Column("dead", right=True),
    Column("workers", right=True),
    Column("paused"),
    Column("destination", shrinks=True),
)
_STREAM_COLUMNS: Final = tuple(
    column for column in _COLUMNS if column.name in ("stream", "mode", "waiting", "oldest", "workers", "paused")
)


def add(group: Any) -> None:
    """Register the commands."""
    parser = command(group, "status", status, "show each stream and each consumer: what waits, and their workers")
    parser.add_argument("--fail-if-older", metavar="DURATION", help="exit 1 if an event has waited for longer")
    parser.add_argument("--fail-if-dead", action="store_true", help="exit 1 if there are dead letters")
    streams = group.add_parser("streams", help="list, pause and resume streams")
    inner = commands(streams)
    command(inner, "list", list_streams, "list the streams of the outbox")
    for name, what in (("pause", "stop a stream on every relay"), ("resume", "let a paused stream go on")):
        parser = command(inner, name, steer, what)
        parser.add_argument("stream", metavar="STREAM")
        parser.add_argument("--by", metavar="NAME", help="your name in the audit (the user of this process)")
        parser.set_defaults(action=name)
        if name == "pause":
            parser.add_argument("--force", action="store_true", help="also a stream that the outbox does not know yet")


async def status(chosen: Any) -> int:
    return await _status(chosen, _COLUMNS)


async def list_streams(chosen: Any) -> int:
    return await _status(chosen, _STREAM_COLUMNS)


async def _status(chosen: Any, columns: Sequence[Column]) -> int:
    settings = Settings.of(chosen)
    limit = getattr(chosen, "fail_if_older", None)
    limit_seconds = None if limit is None else seconds_of("--fail-if-older", limit)
    async with open_store(settings) as store:
        rows = await operations.status(store, _plans(settings))
        consumers = await operations.consumer_status(store) if columns is _COLUMNS else []
        where = store.description
    if chosen.json:
        output.print_json([operations.stream_record(row) for row in rows])
    elif not rows and not consumers:
        print(f"{where} has no events and no streams yet")
    else:
        if rows:
            _print(columns, rows)
        if columns is _COLUMNS:
            _print_details(rows)
        if consumers:
            if rows:
                print()
            print_consumers(consumers)
    late = [row for row in rows if limit_seconds is not None and (row.oldest_seconds or 0) > limit_seconds]
    wants_dead = getattr(chosen, "fail_if_dead", False)
    dead = {f"stream {row.stream!r}": row.counts[Status.DEAD] for row in rows if wants_dead and row.counts[Status.DEAD]}
    dead |= {f"consumer {row.consumer!r}": row.dead for row in consumers if wants_dead and row.dead}
    for row in late:
        waited = f"{row.oldest_seconds:.0f} s"
        print(f"pillarbox: the oldest event of stream {row.stream!r} has waited for {waited}", file=sys.stderr)
    for name, count in dead.items():
        print(f"pillarbox: {name} has {output.count(count, 'dead letter')}", file=sys.stderr)
    return 1 if late or dead else 0


def _plans(settings: Settings) -> dict[str, PlannedStream]:
    return {
        name: PlannedStream(Mode(options.get("mode", Mode.ORDERED)), place(options["to"]) if "to" in options else None)
        for name, options in settings.streams().items()
    }


def _print(columns: Sequence[Column], rows: Sequence[StreamRow]) -> None:
    marks: dict[tuple[int, str], bool] = {}
    lines = []
    for number, row in enumerate(rows):
        record = operations.stream_record(row)
        # A count that ended at its limit means at least that many.
        record |= {each.value: f"{row.counts[each]:,}+" for each in row.at_least}
        waiting = f"{row.waiting:,}{'+' if row.may_be_more else ''}"
        lines.append(record | {"waiting": waiting, "oldest": output.duration(row.oldest_seconds)})
        if row.is_unserved:
            lines[-1]["workers"] = "0 (unserved)"
            marks[number, "workers"] = True
        if row.counts[Status.DEAD]:
            marks[number, "dead"] = True
        if row.paused:
            marks[number, "paused"] = False
    output.print_table(columns, lines, marks)


def _print_details(rows: Sequence[StreamRow]) -> None:
    """The live workers by name, and why events wait."""
    lines = []
    for row in rows:
        names = ", ".join(f"{each.name} ({each.shards} shards)" for each in row.workers if each.live)
        if names:
            lines.append(f"{row.stream}: served by {names}")
        lines += [f"{row.stream}: events wait because {reason}" for reason in row.reasons]
    if lines:
        print()
    for line in lines:
        print(output.shown(line))


async def steer(chosen: Any) -> int:
    settings = Settings.of(chosen)
    by = operator(chosen)
    if not chosen.stream:
        raise ConfigError("STREAM is empty; `pillarbox streams list` shows all streams")
    async with open_store(settings) as store:
        if chosen.action == "pause":
            done = await operations.pause(store, chosen.stream, by, force=chosen.force)
        else:
            done = await operations.resume(store, chosen.stream, by)
    if chosen.json:
        output.print_json(done._asdict())
    elif done.changed:
        print(f"{'paused' if done.paused else 'resumed'} stream {chosen.stream!r}")
    else:
        print(f"stream {chosen.stream!r} was {'already paused' if done.paused else 'not paused'}")
    return 0
