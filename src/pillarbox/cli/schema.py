"""``pillarbox init`` and ``pillarbox migrate``."""

from contextlib import suppress
from typing import Any

from pillarbox.cli import output
from pillarbox.cli.parser import command
from pillarbox.cli.session import make_store
from pillarbox.cli.settings import STORE, Settings, add_flags
from pillarbox.errors import ConfigError, OldSchema
from pillarbox.store import Store


def add(commands: Any) -> None:
    """Register the commands."""
    creating = command(
        commands, "init", init, "create the tables of an outbox, or bring them to this release's version"
    )
    updating = command(commands, "migrate", migrate, "bring the tables of an outbox to this release's version")
    updating.add_argument(
        "--print", action="store_true", dest="script", help="print the script instead; needs no database"
    )
    updating.add_argument(
        "--after", type=int, metavar="VERSION", help="with --print: only the steps after this version"
    )
    for parser in (creating, updating):
        parser.add_argument(
            "--aggregate-index",
            action="store_true",
            help="with an index on (aggregate_id, aggregate_version), for your own queries",
        )
        add_flags(parser, (STORE,), lambda setting: setting.name == "shards")


async def init(chosen: Any) -> int:
    return await _migrate(chosen, create=True)


async def migrate(chosen: Any) -> int:
    if chosen.after is not None and not chosen.script:
        raise ConfigError("--after is an option of --print; give --print too")
    if chosen.script:
        return _print(chosen)
    return await _migrate(chosen, create=False)


def _print(chosen: Any) -> int:
    store = make_store(Settings.of(chosen))
    if not 0 <= (chosen.after or 0) <= store.newest_version:
        raise ConfigError(f"--after is {chosen.after}; this release knows the versions 0 to {store.newest_version}")
    text = store.script(chosen.after or 0, aggregate_index=chosen.aggregate_index)
    if chosen.json:
        output.print_json({"script": text})
    else:
        print(text, end="")
    return 0


async def _migrate(chosen: Any, *, create: bool) -> int:
    store = make_store(Settings.of(chosen))
    try:
        if not create:
            await _refuse_a_new_one(store)
        steps = list(await store.migrate(aggregate_index=chosen.aggregate_index))
    finally:
        await store.close()
    if chosen.json:
        output.print_json({"store": store.description, "steps": steps})
    elif steps:
        print(f"the outbox in {store.description} is ready ({', '.join(steps)})")
    else:
        print(f"the outbox in {store.description} is up to date")
    return 0


async def _refuse_a_new_one(store: Store) -> None:
    """Refuse to make a second outbox because of a misspelt URL or prefix."""
    with suppress(OldSchema):
        await store.open()
