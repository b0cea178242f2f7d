"""``pillarbox audit``: the actions of operators."""

from typing import Any, Final

from pillarbox import operations
from pillarbox.cli import output
from pillarbox.cli.events import add_limit, limit_of
from pillarbox.cli.output import Column
from pillarbox.cli.parser import command
from pillarbox.cli.session import open_store
from pillarbox.cli.settings import Settings

_COLUMNS: Final = (
    Column("at"),
    Column("by", shrinks=True),
    Column("action"),
    Column("stream"),
    Column("consumer"),
    Column("event_id"),
)


def add(group: Any) -> None:
    """Register the command."""
    add_limit(command(group, "audit", audit, "show the actions of operators, newest first"))


async def audit(chosen: Any) -> int:
    limit = limit_of(chosen)
    async with open_store(Settings.of(chosen)) as store:
        rows = [operations.audit_record(each) for each in await store.audit(limit)]
    if chosen.json:
        output.print_json(rows)
    elif rows:
        output.print_table(_COLUMNS, rows)
    else:
        print("no operator has done anything yet")
    return 0
