"""``pillarbox relay``: serves the streams of the settings, or runs a Relay of the user's own code."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from pillarbox.cli import logs, session
from pillarbox.cli.destinations import destination
from pillarbox.cli.exporters import exporters
from pillarbox.cli.parser import SHARED, command
from pillarbox.cli.processes import Processes
from pillarbox.cli.settings import LOG, RELAY, STORE, STREAM, Settings, add_flags
from pillarbox.errors import ConfigError
from pillarbox.event import Status
from pillarbox.health import next_port
from pillarbox.imports import load
from pillarbox.relay import Relay, Stream

log = logging.getLogger(__name__)

# Events that a drain does not wait for.
_LATER: Final = {
    Status.PENDING: "left to other relays",
    Status.FAILED: "waiting for a retry",
    Status.HELD: "held behind an event of their key",
    Status.SCHEDULED: "scheduled for later",
}


def add(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "relay", run, "publish events until SIGTERM or Ctrl-C", json=False)
    parser.add_argument(
        "target", nargs="?", metavar="MODULE:ATTRIBUTE", help="a Relay in your code, or a function that makes one"
    )
    parser.add_argument("--drain", action="store_true", help="publish the events that are ready, then stop")
    add_flags(parser, (STORE, RELAY, STREAM, LOG), lambda setting: setting.name not in (*SHARED, "shards"))


def run(chosen: Any) -> int:
    settings = Settings.of(chosen)
    logs.start(settings.get("log_format", "text"), settings.get("log_level", "info"))
    if chosen.target is None:
        place = 0
        if (count := settings.get("processes", 1)) > 1:
            processes = Processes(count)
            if (own := processes.split()) is None:
                return processes.code
            place = own
        relay = configured(settings, place)
    else:
        others = [given.origin for name, given in settings.flags.items() if not name.startswith("log_")]
        if others:
            raise ConfigError(
                f"{others[0]} does not apply to {chosen.target}; "
                "set it in your code, or leave out the name of your relay"
            )
        relay = load(chosen.target, Relay, "a Relay")
    if chosen.drain:
        session.run(_drain(relay))
    else:
        asyncio.run(relay.run())
    return 0


async def _drain(relay: Relay) -> None:
    async with relay:
        await relay.drain()
        for stream in relay.streams:
            counts = await relay.store.count(stream.name)
            later = [f"{counts[status]:,} {words}" for status, words in _LATER.items() if status in counts]
            log.info(
                "stream '%s' is drained%s",
                stream.name,
                f"; still in the outbox: {', '.join(later)}" if later else "",
                extra={"action": "drained", "stream": stream.name},
            )


def configured(settings: Settings, place: int = 0) -> Relay:
    """The relay of flags, environment and file. place: which of several processes it has, from 0."""
    streams = settings.streams()
    if not streams:
        raise ConfigError(
            f"no destination is given; give --to, for example --to stdout:, set PILLARBOX_TO, "
            f"or write [streams.NAME] into {settings.path}"
        )
    made = []
    for name, options in streams.items():
        if "to" not in options:
            raise ConfigError(
                f"stream {name!r} has no destination; give --to, set PILLARBOX_TO, "
                f"or write 'to' under [streams.{name}] in {settings.path}"
            )
        made.append(stream(name, options))
    options = settings.scope(RELAY)
    for name in ("stream", "processes"):
        options.pop(name, None)
    observers = exporters() if "listen" in options else []
    if "listen" in options:
        options["listen"] = next_port(options["listen"], place)
    return Relay(session.make_store(settings), made, observers=observers, **options)


def stream(name: str, options: Mapping[str, Any]) -> Stream:
    """The stream of this name, with its destination as an object."""
    made = {key: value for key, value in options.items() if key != "headers"}
    made["to"] = destination(name, options["to"], options.get("headers"))
    return Stream(name, **made)
