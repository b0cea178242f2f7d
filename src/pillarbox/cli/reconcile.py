"""``pillarbox reconcile``: one run of the checks of a relay."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from pillarbox.cli import output, secrets
from pillarbox.cli.output import Column, Progress
from pillarbox.cli.parser import command
from pillarbox.cli.session import run
from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.imports import load
from pillarbox.maintenance.check import Check
from pillarbox.maintenance.reconcile import Reconcile, Reconciled
from pillarbox.operations import NotFound
from pillarbox.relay import Relay

_COLUMNS: Final = (
    Column("check", shrinks=True),
    *(Column(name, right=True) for name in ("missing", "emitted", "waiting", "published", "dead")),
    Column("more"),
)


def add(group: Any) -> None:
    """Register the command."""
    parser = command(
        group, "reconcile", reconcile, "emit the events that the checks of a relay find missing", store=False
    )
    parser.add_argument(
        "target", metavar="MODULE:ATTRIBUTE", help="a Relay with checks in your code, or a function that makes one"
    )
    parser.add_argument("--check", metavar="NAME", help="this check only")
    parser.add_argument("--dry-run", action="store_true", help="count the missing events, and write nothing")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="emit at most this many events of each check (its own limit)"
    )


def reconcile(chosen: Any) -> int:
    if chosen.limit is not None and chosen.limit < 1:
        raise ConfigError(f"--limit is {chosen.limit}; use 1 or more")
    relay = load(chosen.target, Relay, "a Relay")
    return run(_reconcile(chosen, relay, _checks(chosen, relay)))


def _checks(chosen: Any, relay: Relay) -> Sequence[Check]:
    if not relay.checks:
        raise ConfigError(f"{chosen.target} has no checks; give it some: Relay(..., checks=[Check(...)])")
    if chosen.check is None:
        return relay.checks
    found = [check for check in relay.checks if check.name == chosen.check]
    if not found:
        names = ", ".join(repr(check.name) for check in relay.checks)
        raise NotFound(f"{chosen.target} has no check {chosen.check!r}; it has: {names}")
    return found


async def _reconcile(chosen: Any, relay: Relay, checks: Sequence[Check]) -> int:
    rows, errors = [], []
    await relay.store.open()
    try:
        with Progress("reconciling") as progress:
            for check in checks:
                row = Reconciled(check.name)

                def told(so_far: Reconciled) -> None:
                    nonlocal row
                    row = so_far
                    progress(so_far.found)

                service = Reconcile(relay.store, check, limit=chosen.limit, dry_run=chosen.dry_run, on_progress=told)
                error = None
                try:
                    row = await service.run_once()
                except PillarboxError as trouble:
                    error = secrets.masked(str(trouble))
                    errors.append(error)
                rows.append(row._asdict() | {"error": error})
    finally:
        await relay.store.close()
    _print(chosen, rows)
    for error in errors:
        print(f"pillarbox: {error}", file=sys.stderr)
    return 1 if errors else 0


def _print(chosen: Any, rows: Sequence[dict[str, Any]]) -> None:
    if chosen.json:
        output.print_json(rows)
        return
    shown = [row for row in rows if row["error"] is None or any(row[column.name] for column in _COLUMNS[1:])]
    if not any(row[column.name] for row in shown for column in _COLUMNS[1:]):
        if shown:
            print("nothing is missing")
        return
    marks = {(number, "dead"): True for number, row in enumerate(shown) if row["dead"]}
    marks |= {(number, "published"): False for number, row in enumerate(shown) if row["published"]}
    output.print_table(_COLUMNS, shown, marks)
