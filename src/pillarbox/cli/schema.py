"""``pillarbox init`` and ``pillarbox migrate``."""

from contextlib import suppress
from typing import Any

from pillarbox.cli import output
from pillarbox.cli.parser import command
from pillarbox.cli.session import make_store, run
from pillarbox.cli.settings import STORE, Settings, add_flags
from pillarbox.errors import ConfigError, OldSchema


def add(commands: Any) -> None:
    """Register the commands."""
    parser = command(commands, "init", init, "create the tables of an outbox")
    add_flags(parser, (STORE,), lambda setting: setting.name == "shards")
    parser = command(commands, "migrate", migrate, "bring the tables of an outbox to this release's version")
    parser.add_argument(
        "--print", action="store_true", dest="script", help="print it as a script; no database is asked"
    )
    parser.add_argument("--after", type=int, metavar="VERSION", help="with --print: what comes after this version")
    add_flags(parser, (STORE,), lambda setting: setting.name == "shards")


def init(chosen: Any) -> int:
    return run(_migrate(chosen, create=True))


def migrate(chosen: Any) -> int:
    if chosen.after is not None and not chosen.script:
        raise ConfigError("--after says what to print; give --print too")
    if chosen.script:
        return _print(chosen)
    return run(_migrate(chosen, create=False))


def _print(chosen: Any) -> int:
    store: Any = make_store(Settings.of(chosen))
    script = getattr(store, "script", None)
    if script is None:
        raise ConfigError(f"{store.description} has no script to print; run `pillarbox migrate` without --print")
    newest = store.steps()[-1].number
    if not 0 <= (chosen.after or 0) <= newest:
        raise ConfigError(f"--after is {chosen.after}; this release knows the versions 0 to {newest}")
    text: str = script(chosen.after or 0)
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
        steps = list(await store.migrate())
    finally:
        await store.close()
    if chosen.json:
        output.print_json({"store": store.description, "steps": steps})
    elif steps:
        done = "created" if create else "migrated"
        print(f"{done} the outbox in {store.description} ({', '.join(steps)})")
    else:
        print(f"the outbox in {store.description} is up to date")
    return 0


async def _refuse_a_new_one(store: Any) -> None:
    """A misspelt URL or prefix must not end in a second outbox."""
    with suppress(OldSchema):
        await store.open()
