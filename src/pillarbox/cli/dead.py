"""``pillarbox dead``: what will not be tried again, until an operator acts."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final
from uuid import UUID

from pillarbox.cli import output
from pillarbox.cli.events import add_filters, add_limit, filter_of, limit_of, print_event, print_list
from pillarbox.cli.hints import NotFound
from pillarbox.cli.output import Column, Progress
from pillarbox.cli.parser import command, commands
from pillarbox.cli.session import event_id, open_store, operator, run
from pillarbox.cli.settings import Settings
from pillarbox.errors import ConfigError
from pillarbox.event import Status
from pillarbox.store import Filter, Found, Store

_CHUNK: Final = 500
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


def add(group: Any) -> None:
    """Register the commands."""
    parser = group.add_parser("dead", help="list, show, replay and discard dead letters")
    inner = commands(parser)
    listing = command(inner, "list", list_dead, "list dead letters in order")
    add_filters(listing, "died")
    add_limit(listing)
    show = command(inner, "show", show_dead, "show one dead letter with the history of its errors")
    show.add_argument("id", metavar="ID")
    show.add_argument("--payload", action="store_true", help="its payload too, which may hold secrets")
    for name, what in (
        ("replay", "give dead letters another run of attempts, in order per key"),
        ("discard", "give up dead letters for good; a key that waits for one goes on"),
    ):
        acting = command(inner, name, act, what)
        acting.add_argument("ids", metavar="ID", nargs="*", help="these; or those that the filters name")
        add_filters(acting, "died")
        acting.add_argument("--all", action="store_true", help="every dead letter of the outbox")
        acting.add_argument("--dry-run", action="store_true", help="list what is meant, and change nothing")
        acting.add_argument("--by", metavar="NAME", help="whom the audit names (the user of this process)")
        acting.set_defaults(action=name)
        if name == "discard":
            acting.add_argument("--yes", action="store_true", help="do not ask")


def list_dead(chosen: Any) -> int:
    async def work() -> int:
        where, limit = filter_of(chosen), limit_of(chosen)
        async with open_store(Settings.of(chosen)) as store:
            found = await store.find_dead(where, limit)
        print_list(found, chosen, _COLUMNS, "no dead letter matches")
        return 0

    return run(work())


def show_dead(chosen: Any) -> int:
    async def work() -> int:
        wanted = event_id(chosen.id)
        async with open_store(Settings.of(chosen)) as store:
            found = await store.look(wanted)
        if found is None:
            raise NotFound(f"there is no event {wanted}; `pillarbox dead list` shows the dead letters")
        if found.event.status is not Status.DEAD:
            raise NotFound(f"event {wanted} is {found.event.status}, not dead; see `pillarbox events show {wanted}`")
        print_event(found, chosen)
        return 0

    return run(work())


def act(chosen: Any) -> int:
    where, by, settings = _where(chosen), operator(chosen), Settings.of(chosen)
    if chosen.dry_run:
        return run(_dry_run(chosen, where, settings))
    if chosen.action == "discard" and not chosen.yes:
        # The question stands outside of the event loop, which would keep Ctrl-C from ending it.
        _ask(run(_count(where, settings)))
    return run(_act(chosen, where, settings, by))


def _where(chosen: Any) -> Filter:
    where = filter_of(chosen)
    ids = list(dict.fromkeys(event_id(each) for each in chosen.ids))
    filters = where != Filter()
    if sum((bool(ids), filters, chosen.all)) > 1:
        raise ConfigError("ids, filters and --all cannot all be meant; give one of them")
    if not (ids or filters or chosen.all):
        raise ConfigError(f"nothing says which dead letters to {chosen.action}; give ids, filters or --all")
    return Filter(ids=ids) if ids else where


async def _dry_run(chosen: Any, where: Filter, settings: Settings) -> int:
    async with open_store(settings) as store:
        found = [each async for page in _pages(store, where) for each in page]
    print_list(found, chosen, _COLUMNS, "no dead letter matches")
    return _missing(where, {each.event.id for each in found})


async def _count(where: Filter, settings: Settings) -> int:
    total = 0
    async with open_store(settings) as store:
        async for page in _pages(store, where):
            total += len(page)
    return total


async def _act(chosen: Any, where: Filter, settings: Settings, by: str) -> int:
    async with open_store(settings) as store:
        with Progress("replaying" if chosen.action == "replay" else "discarding") as progress:
            met, changed = await decide(store, where, chosen.action, by, progress)
    if chosen.json:
        output.print_json({_DONE[chosen.action]: changed})
    else:
        print(f"{_DONE[chosen.action]} {output.count(changed, 'dead letter')}")
    return _missing(where, met)


def _missing(where: Filter, done: set[UUID]) -> int:
    missing = [each for each in where.ids or () if each not in done]
    for each in missing:
        print(f"pillarbox: {each} is not a dead letter", file=sys.stderr)
    return 3 if missing else 0


def _ask(total: int) -> None:
    if not total:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{output.count(total, 'dead letter')} would be lost for good; add --yes if that is meant")
    sys.stderr.write(f"Give up {output.count(total, 'dead letter')} for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was discarded")


async def _pages(store: Store, where: Filter) -> AsyncIterator[Sequence[Found]]:
    after = 0
    while page := await store.find_dead(where, _CHUNK, after):
        yield page
        # A short page is the last: what dies from now on would keep this going for as long as someone writes.
        if len(page) < _CHUNK:
            return
        after = page[-1].event.seq


async def decide(
    store: Store, where: Filter, action: str, by: str, told: Callable[[int], None]
) -> tuple[set[UUID], int]:
    """Replay or discard all that is meant, in chunks: which were met, and how many were changed.

    The letter that a key waits for comes last of its key: it sets the key free, and what would come back after that
    could be overtaken by events that were written since.
    """
    change = store.replay if action == "replay" else store.discard
    met: set[UUID] = set()
    changed = 0

    async def decide_on(ids: Sequence[UUID]) -> None:
        nonlocal changed
        if ids:
            changed += await change(ids, by)
            met.update(ids)
            told(changed)

    heads: list[UUID] = []
    async for page in _pages(store, where):
        heads += [each.event.id for each in page if each.holds_key]
        await decide_on([each.event.id for each in page if not each.holds_key])
    for start in range(0, len(heads), _CHUNK):
        # Together with what a relay has parked meanwhile.
        parked = [each.event.id async for page in _pages(store, where) for each in page if not each.holds_key]
        await decide_on([*parked, *heads[start : start + _CHUNK]])
    return met, changed
