"""``pillarbox consume``: runs a consumer of the settings, or a Consumer of the user's own code."""

import asyncio
from typing import Any

from pillarbox.cli import logs, session
from pillarbox.cli.destinations import destination, source
from pillarbox.cli.exporters import exporters
from pillarbox.cli.parser import SHARED, command
from pillarbox.cli.settings import (
    CONSUMER,
    CONSUMER_SETTINGS,
    LOG,
    RELAY,
    SHARED_SETTINGS,
    STORE,
    STREAM,
    Setting,
    Settings,
    add_flags,
)
from pillarbox.consumer import Consumer
from pillarbox.errors import ConfigError
from pillarbox.imports import load, load_object


def add(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "consume", run, "give messages to handlers until SIGTERM or Ctrl-C", json=False)
    parser.add_argument(
        "target", nargs="?", metavar="MODULE:ATTRIBUTE", help="a Consumer in your code, or a function that makes one"
    )
    add_flags(parser, (STORE, RELAY, STREAM, CONSUMER, LOG), _is_wanted)


def _is_wanted(setting: Setting) -> bool:
    if setting.scope in (RELAY, STREAM):
        return setting.name in (*CONSUMER_SETTINGS, *SHARED_SETTINGS)
    return setting.name not in (*SHARED, "shards")


def run(chosen: Any) -> int:
    settings = Settings.of(chosen)
    logs.start(settings.get("log_format", "text"), settings.get("log_level", "info"))
    if chosen.target is None:
        consumer = configured(settings)
    else:
        others = [given.origin for name, given in settings.flags.items() if not name.startswith("log_")]
        if others:
            raise ConfigError(
                f"{others[0]} does not apply to {chosen.target}; "
                "set it in your code, or leave out the name of your consumer"
            )
        consumer = load(chosen.target, Consumer, "a Consumer")
    asyncio.run(consumer.run())
    return 0


def configured(settings: Settings) -> Consumer:
    """The consumer of flags, environment and file."""
    name, options = settings.consumer()
    for wanted, example in (("from", "kafka://localhost:9092?topic=orders"), ("to", "shop.handlers:handlers")):
        if wanted not in options:
            raise ConfigError(
                f"consumer {name!r} has no {wanted!r}; give --{wanted}, for example --{wanted} {example}, "
                f"set PILLARBOX_{wanted.upper()}, or write {wanted!r} under [consumers.{name}] in {settings.path}"
            )
    store = None if settings.given("store") is None else session.make_store(settings)
    shared = {key: value for key in SHARED_SETTINGS if (value := settings.get(key)) is not None}
    worker = shared.pop("name", None)
    from_, to = source(options.pop("from")), destination(name, options.pop("to"))
    if "dead_to" in options:
        options["dead_to"] = destination(name, options["dead_to"])
    if "decoder" in options:
        options["decoder"] = load_object(options["decoder"], "a decoder")
    observers = exporters() if "listen" in shared else []
    return Consumer(name, from_, to=to, store=store, worker=worker, observers=observers, **shared, **options)
