"""``pillarbox relay``: the streams of the settings, or a Relay of the user's own code, as a service."""

import asyncio
import importlib
import os
import sys
import traceback
from typing import Any, Final

from pillarbox.cli import logs, session
from pillarbox.cli.hints import hint
from pillarbox.cli.parser import command
from pillarbox.cli.settings import LOG, RELAY, STORE, STREAM, Settings, add_flags
from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.relay import Exponential, Fixed, Linear, Relay, Stream
from pillarbox.relay.retry import Retry

_RETRIES: Final[dict[str, Any]] = {"exponential": Exponential, "fixed": Fixed, "linear": Linear}
_SHOWN: Final = ("store", "prefix", "schema")


def add(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "relay", run, "publish events until SIGTERM or Ctrl-C", json=False)
    parser.add_argument(
        "target", nargs="?", metavar="MODULE:ATTRIBUTE", help="a Relay in your code, or a function that makes one"
    )
    parser.add_argument("--drain", action="store_true", help="publish what is ready, then stop")
    add_flags(parser, (STORE, RELAY, STREAM, LOG), lambda setting: setting.name not in (*_SHOWN, "shards"))


def run(chosen: Any) -> int:
    settings = Settings.of(chosen)
    logs.start(settings.get("log_format", "text"), settings.get("log_level", "info"))
    if chosen.target is None:
        relay = configured(settings)
    else:
        others = [given.origin for name, given in settings.flags.items() if not name.startswith("log_")]
        if others:
            raise ConfigError(
                f"{chosen.target} and {others[0]} cannot both be meant; "
                "set it in your code, or leave out the name of your relay"
            )
        relay = load(chosen.target)
    if chosen.drain:
        session.run(_drain(relay))
    else:
        asyncio.run(relay.run())
    return 0


async def _drain(relay: Relay) -> None:
    async with relay:
        await relay.drain()


def configured(settings: Settings) -> Relay:
    """The relay that flags, environment and file describe."""
    streams = settings.streams()
    if not streams:
        raise ConfigError(
            f"nothing says where events go; give --to, for example --to stdout:, set PILLARBOX_TO, "
            f"or write [streams.NAME] into {settings.path}"
        )
    made = []
    for name, options in streams.items():
        if "to" not in options:
            raise ConfigError(
                f"stream {name!r} has no destination; give --to, set PILLARBOX_TO, "
                f"or write 'to' under [streams.{name}] in {settings.path}"
            )
        if "retry" in options:
            options["retry"] = retry(options["retry"], name)
        made.append(Stream(name, **options))
    options = settings.scope(RELAY)
    options.pop("stream", None)
    return Relay(session.make_store(settings), made, **options)


def retry(text: str, stream: str) -> Retry:
    """From ``fixed:seconds=30`` and the like: the name of a class and its keyword arguments."""
    kind, _, rest = text.partition(":")
    if kind not in _RETRIES:
        raise ConfigError(f"stream {stream!r}: retry is {text!r}; {hint(kind, _RETRIES)}")
    known = _RETRIES[kind].__dataclass_fields__
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"stream {stream!r}: retry {kind} has no {name!r}; {hint(name, known)}")
        try:
            options[name] = {"true": True, "false": False}[value] if name == "jitter" else float(value)
        except (KeyError, ValueError):
            wanted = "true or false" if name == "jitter" else "a number"
            raise ConfigError(f"stream {stream!r}: retry {name} is {value!r}; use {wanted}") from None
    made: Retry = _RETRIES[kind](**options)
    return made


def load(target: str) -> Relay:
    """The relay that ``module:attribute`` names."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"{target!r} does not name a relay; write MODULE:ATTRIBUTE, for example shop.main:relay")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except PillarboxError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {error.name!r}; start the relay in the folder that holds it, or install it"
            ) from None
        raise _broken(f"importing {module_name}", error) from error
    for name in path.split("."):
        if not hasattr(found, name):
            public = [each for each in dir(found) if not each.startswith("_")]
            raise ConfigError(f"{module_name} has no {path!r}; {hint(name, public, 'correct the name')}")
        found = getattr(found, name)
    if isinstance(found, Relay):
        return found
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{target} is a {_kind(found)}; name a Relay, or a function that returns one")
    try:
        made = found()
    except PillarboxError:
        raise
    except Exception as error:
        raise _broken(f"calling {target}", error) from error
    if asyncio.iscoroutine(made):
        made.close()
        raise ConfigError(f"{target} is an async function; make it a plain one that returns a Relay")
    if not isinstance(made, Relay):
        raise ConfigError(f"{target} returned a {_kind(made)}; return a Relay")
    return made


def _kind(value: Any) -> str:
    return "class" if isinstance(value, type) else type(value).__name__


def _broken(doing: str, error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return ConfigError(f"{doing} failed with {type(error).__name__}: {error}{where}; correct your code")
