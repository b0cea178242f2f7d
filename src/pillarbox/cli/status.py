"""``pillarbox status`` and ``pillarbox streams``."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from pillarbox.cli import output, secrets
from pillarbox.cli.hints import NotFound, hint
from pillarbox.cli.output import Column
from pillarbox.cli.parser import command, commands
from pillarbox.cli.session import open_store, operator, run, seconds
from pillarbox.cli.settings import Settings
from pillarbox.errors import ConfigError
from pillarbox.event import Mode, Status
from pillarbox.store import StreamStatus

_WAITING: Final = (Status.PENDING, Status.PROCESSING, Status.FAILED, Status.HELD)
_COLUMNS: Final = (
    Column("stream", shrinks=True),
    Column("mode"),
    Column("waiting", right=True),
    Column("oldest", right=True),
    Column("failed", right=True),
    Column("held", right=True),
    Column("dead", right=True),
    Column("published_last_hour", "published/h", right=True),
    Column("workers", right=True),
    Column("paused"),
    Column("destination", shrinks=True),
)
_STREAM_COLUMNS: Final = tuple(
    column for column in _COLUMNS if column.name in ("stream", "mode", "waiting", "oldest", "workers", "paused")
)


def add(group: Any) -> None:
    """Register the commands."""
    parser = command(group, "status", status, "show each stream: what waits, since when, and who serves it")
    parser.add_argument("--fail-if-older", metavar="DURATION", help="exit 1 if an event has waited for longer")
    parser.add_argument("--fail-if-dead", action="store_true", help="exit 1 if there are dead letters")
    streams = group.add_parser("streams", help="list, pause and resume streams")
    inner = commands(streams)
    command(inner, "list", list_streams, "list the streams that the outbox knows")
    for name, what in (("pause", "stop a stream on every relay"), ("resume", "let a paused stream go on")):
        parser = command(inner, name, steer, what)
        parser.add_argument("stream", metavar="STREAM")
        parser.add_argument("--by", metavar="NAME", help="whom the audit names (the user of this process)")
        parser.set_defaults(action=name)
        if name == "pause":
            parser.add_argument("--force", action="store_true", help="even if the outbox does not know it yet")


def status(chosen: Any) -> int:
    return run(_status(chosen, _COLUMNS))


def list_streams(chosen: Any) -> int:
    return run(_status(chosen, _STREAM_COLUMNS))


async def _status(chosen: Any, columns: Sequence[Column]) -> int:
    settings = Settings.of(chosen)
    limit = getattr(chosen, "fail_if_older", None)
    limit_seconds = None if limit is None else seconds(limit, "--fail-if-older")
    async with open_store(settings) as store:
        found = await store.streams()
        where = store.description
    rows = _rows(settings, found)
    if chosen.json:
        output.print_json(rows)
    elif not rows:
        print(f"{where} has no events and no streams yet")
    else:
        _print(columns, rows)
    late = [row for row in rows if limit_seconds is not None and (row["oldest_seconds"] or 0) > limit_seconds]
    dead = [row for row in rows if getattr(chosen, "fail_if_dead", False) and row["dead"]]
    for row in late:
        print(f"pillarbox: stream {row['stream']!r} has waited for {row['oldest_seconds']:.0f} s", file=sys.stderr)
    for row in dead:
        print(f"pillarbox: stream {row['stream']!r} has {output.count(row['dead'], 'dead letter')}", file=sys.stderr)
    return 1 if late or dead else 0


def _rows(settings: Settings, found: Sequence[StreamStatus]) -> list[dict[str, Any]]:
    configured = settings.streams()
    known = {each.stream: each for each in found}
    rows = []
    for name in sorted({*known, *(name for name, options in configured.items() if "to" in options)}):
        state = known.get(name) or StreamStatus(name, False, 0, {}, None, 0)
        options = configured.get(name)
        waiting = sum(state.counts.get(each, 0) for each in _WAITING)
        rows.append(
            {
                "stream": name,
                "mode": None if options is None else str(options.get("mode", Mode.ORDERED)),
                "destination": None if options is None or "to" not in options else secrets.place(options["to"]),
                "paused": state.paused,
                "workers": state.workers,
                "unserved": bool(waiting and not state.workers),
                "waiting": waiting,
                "oldest_seconds": None if state.oldest_seconds is None else round(state.oldest_seconds, 3),
                **{each.value: state.counts.get(each, 0) for each in Status},
                "published_last_hour": state.published_last_hour,
            }
        )
    return rows


def _print(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    marks: dict[tuple[int, str], bool] = {}
    lines = []
    for number, row in enumerate(rows):
        lines.append(row | {"oldest": output.duration(row["oldest_seconds"])})
        if row["unserved"]:
            lines[-1]["workers"] = "0 (unserved)"
            marks[number, "workers"] = True
        if row["dead"]:
            marks[number, "dead"] = True
        if row["paused"]:
            marks[number, "paused"] = False
    output.print_table(columns, lines, marks)


def steer(chosen: Any) -> int:
    return run(_steer(chosen))


async def _steer(chosen: Any) -> int:
    settings = Settings.of(chosen)
    by = operator(chosen)
    if not chosen.stream:
        raise ConfigError("STREAM is empty; `pillarbox streams list` shows what there is")
    async with open_store(settings) as store:
        known = {each.stream: each for each in await store.streams()}
        if chosen.stream not in known and not getattr(chosen, "force", False):
            meant = hint(chosen.stream, known, "`pillarbox streams list` shows what there is")
            if chosen.action == "pause":
                meant = f"add --force to pause it before its first event; {meant}"
            raise NotFound(f"the outbox knows no stream {chosen.stream!r}; {meant}")
        paused = chosen.action == "pause"
        changed = chosen.stream not in known or known[chosen.stream].paused != paused
        if changed:
            await (store.pause if paused else store.resume)(chosen.stream, by)
    if chosen.json:
        output.print_json({"stream": chosen.stream, "paused": paused, "changed": changed})
    elif changed:
        print(f"{'paused' if paused else 'resumed'} stream {chosen.stream!r}")
    else:
        print(f"stream {chosen.stream!r} was {'paused already' if paused else 'not paused'}")
    return 0
