"""``pillarbox dead``: list, show, replay and discard dead letters of relays, or of one consumer."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from pillarbox import operations
from pillarbox.cli import output
from pillarbox.cli.events import add_filters, add_limit, add_show, filter_of, limit_of, print_event, print_list
from pillarbox.cli.output import Column, Progress
from pillarbox.cli.parser import command, commands
from pillarbox.cli.session import event_id, open_store, operator, run
from pillarbox.cli.settings import Settings
from pillarbox.errors import ConfigError
from pillarbox.store import Filter, Store

_DONE: Final = {"replay": "replayed", "discard": "discarded"}
_COLUMNS: Final = (
    Column("id"),
    Column("stream", shrinks=True),
    Column("type", shrinks=True),
    Column("key", shrinks=True),
    Column("holds_key", "holds key"),
    Column("attempts", right=True),
    Column("last_error_at", "died at"),
    Column("last_error", "error", shrinks=True),
)
# A consumer holds a key in its memory, and applies a dead letter again when it finds the time.
_COLUMNS_OF_CONSUMER: Final = tuple(
    Column("replay_at", "replay since") if column.name == "holds_key" else column for column in _COLUMNS
)
_NOTHING: Final = "no dead letter matches"


def add(group: Any) -> None:
    """Register the commands."""
    parser = group.add_parser("dead", help="list, show, replay and discard dead letters")
    inner = commands(parser)
    listing = command(inner, "list", list_dead, "list dead letters in order")
    add_filters(listing, "died")
    _add_consumer(listing)
    add_limit(listing)
    _add_consumer(add_show(inner, show_dead, "show one dead letter with the history of its errors"))
    for name, text in (
        ("replay", "give dead letters another run of attempts, in order per key"),
        ("discard", "give up dead letters for good; a key that waits for one goes on"),
    ):
        acting = command(inner, name, act, text)
        acting.add_argument("ids", metavar="ID", nargs="*", help="the ids of dead letters, instead of filters")
        add_filters(acting, "died")
        _add_consumer(acting)
        acting.add_argument("--all", action="store_true", help="every dead letter of relays, or of the consumer")
        acting.add_argument("--dry-run", action="store_true", help="list the dead letters, and change nothing")
        acting.add_argument("--by", metavar="NAME", help="your name in the audit (the user of this process)")
        acting.set_defaults(action=name)
        if name == "discard":
            acting.add_argument("--yes", action="store_true", help="do not ask")


def _add_consumer(parser: Any) -> None:
    parser.add_argument("--consumer", metavar="NAME", help="dead letters of this consumer, instead of those of relays")


def _columns(where: Filter) -> Sequence[Column]:
    return _COLUMNS_OF_CONSUMER if where.consumer else _COLUMNS


async def list_dead(chosen: Any) -> int:
    where, limit = filter_of(chosen), limit_of(chosen)
    async with open_store(Settings.of(chosen)) as store:
        found = await store.find_dead(where, limit)
        nothing = _NOTHING if found else _NOTHING + await _of_others(store, where)
    print_list(found, chosen, _columns(where), nothing)
    return 0


async def _of_others(store: Store, where: Filter) -> str:
    """Where dead letters are, if those of this consumer, or of the relays, are none."""
    others = await store.dead_consumers()
    if where.consumer in others:
        return ""
    names = ", ".join(f"{name} ({count:,})" for name, count in sorted(others.items()))
    return f"; consumers have some: {names}, see `pillarbox dead list --consumer NAME`" if names else ""


async def show_dead(chosen: Any) -> int:
    wanted = event_id(chosen.id)
    async with open_store(Settings.of(chosen)) as store:
        found = await operations.find_dead_letter(store, wanted, chosen.stream, chosen.consumer or "")
    print_event(found, chosen)
    return 0


def act(chosen: Any) -> int:
    where, by, settings = _where(chosen), operator(chosen), Settings.of(chosen)
    if chosen.dry_run:
        return run(_dry_run(chosen, where, settings))
    if chosen.action == "discard" and not chosen.yes:
        # Ask outside of the event loop, which would keep Ctrl-C from ending the question.
        _ask(run(_count(where, settings)))
    return run(_act(chosen, where, settings, by))


def _where(chosen: Any) -> Filter:
    where = filter_of(chosen)
    ids = list(dict.fromkeys(event_id(each) for each in chosen.ids))
    # With ids, --stream says which of the events with such an id is meant.
    place = Filter(consumer=where.consumer)
    filters = where != (replace(place, stream=where.stream) if ids else place)
    if sum((bool(ids), filters, chosen.all)) > 1:
        raise ConfigError("ids, filters and --all exclude each other; give one of them")
    if not (ids or filters or chosen.all):
        raise ConfigError(f"nothing says which dead letters to {chosen.action}; give ids, filters or --all")
    return replace(where, ids=ids) if ids else where


async def _dry_run(chosen: Any, where: Filter, settings: Settings) -> int:
    async with open_store(settings) as store:
        found = await operations.find_all_dead(store, where)
    print_list(found, chosen, _columns(where), _NOTHING)
    met = {each.event.id for each in found}
    return _missing([each for each in where.ids or () if each not in met], where)


async def _count(where: Filter, settings: Settings) -> int:
    async with open_store(settings) as store:
        return await operations.count_dead(store, where)


async def _act(chosen: Any, where: Filter, settings: Settings, by: str) -> int:
    change = operations.replay if chosen.action == "replay" else operations.discard
    async with open_store(settings) as store:
        with Progress("replaying" if chosen.action == "replay" else "discarding") as progress:
            changed, missing = await change(store, where, by, progress)
        others = "" if changed or not where.consumer else await _of_others(store, where)
    if chosen.json:
        output.print_json({_DONE[chosen.action]: changed})
    else:
        print(f"{_DONE[chosen.action]} {output.count(changed, 'dead letter')}{others}")
        if changed and chosen.action == "replay" and where.consumer:
            print(f"consumer {where.consumer!r} applies them again as soon as it runs; see `pillarbox consumers`")
    return _missing(missing, where)


def _missing(missing: Sequence[UUID], where: Filter) -> int:
    of = f" of consumer {where.consumer!r}" if where.consumer else " of a relay; for one of a consumer add --consumer"
    for each in missing:
        print(f"pillarbox: {each} is not a dead letter{of}", file=sys.stderr)
    return 3 if missing else 0


def _ask(total: int) -> None:
    if not total:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{output.count(total, 'dead letter')} would be lost for good; add --yes to confirm")
    sys.stderr.write(f"Give up {output.count(total, 'dead letter')} for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was discarded")
