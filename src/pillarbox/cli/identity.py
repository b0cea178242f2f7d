"""``pillarbox identity``: the name of the outbox for destinations that keep its progress."""

from typing import Any

from pillarbox.cli import output
from pillarbox.cli.parser import command
from pillarbox.cli.session import open_store
from pillarbox.cli.settings import Settings
from pillarbox.errors import ConfigError
from pillarbox.stores.identity import new_identity


def add(group: Any) -> None:
    """Register the command."""
    parser = command(group, "identity", identity, "show or change the name of the outbox in Kafka's transactions")
    parser.add_argument(
        "--new", action="store_true", help="give it a new one: after a restore, and to a copy of a database"
    )
    parser.add_argument("--set", metavar="NAME", dest="set_name", help="give it this one, so that ACLs can name it")


async def identity(chosen: Any) -> int:
    if chosen.new and chosen.set_name:
        raise ConfigError("--new and --set exclude each other; leave one out")
    async with open_store(Settings.of(chosen)) as store:
        if chosen.new or chosen.set_name:
            await store.set_identity(chosen.set_name or new_identity())
        name = await store.identity()
    if chosen.json:
        output.print_json({"identity": name})
    else:
        print(name)
    return 0
