"""``pillarbox audit``: what operators did."""

from typing import Any, Final

from pillarbox.cli import output
from pillarbox.cli.events import add_limit, limit_of
from pillarbox.cli.output import Column
from pillarbox.cli.parser import command
from pillarbox.cli.session import open_store, run
from pillarbox.cli.settings import Settings

_COLUMNS: Final = (Column("at"), Column("by", shrinks=True), Column("action"), Column("stream"), Column("event_id"))


def add(group: Any) -> None:
    """Register the command."""
    add_limit(command(group, "audit", audit, "show what operators did, newest first"))


def audit(chosen: Any) -> int:
    async def work() -> int:
        limit = limit_of(chosen)
        async with open_store(Settings.of(chosen)) as store:
            found = await store.audit(limit)
        rows = [each._asdict() | {"at": output.instant(each.at)} for each in found]
        if chosen.json:
            output.print_json(rows)
        elif rows:
            output.print_table(_COLUMNS, rows)
        else:
            print("no operator has done anything yet")
        return 0

    return run(work())
