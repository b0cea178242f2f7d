"""``pillarbox doctor``: checks an installation, and says what to do."""

import asyncio
import platform
import re
import stat
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from shlex import quote
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from pillarbox import __version__, operations
from pillarbox.cli import output, secrets
from pillarbox.cli.destinations import destination
from pillarbox.cli.parser import SHARED, command
from pillarbox.cli.session import make_store
from pillarbox.cli.settings import RELAY, SETTINGS, STORE, STREAM, Given, Settings, add_flags
from pillarbox.durations import seconds_of
from pillarbox.errors import ConfigError, OldSchema, Outage, PillarboxError, SchemaError, StoreDown
from pillarbox.finding import Finding, State, failed, ok, warning
from pillarbox.publisher import Publisher
from pillarbox.urls import publisher_from_url, without_driver

_OPEN_SECONDS: Final = 15.0
_LEASE: Final = "15s"  # of a stream that sets none
_SECRETS: Final = [name for name, setting in SETTINGS.items() if setting.secret]
_HERE: Final = ("", "localhost", "127.0.0.1", "::1")
# Schemes that speak over a network, each with the options of its URL that ask for encryption.
_PLAIN: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "postgresql": {"sslmode": ("require", "verify-ca", "verify-full")},
    "mysql": {"ssl": ("true",), "ssl_ca": ()},
    "mariadb": {"ssl": ("true",), "ssl_ca": ()},
    "mongodb": {"tls": ("true",), "ssl": ("true",)},
    "kafka": {"security.protocol": ("ssl", "sasl_ssl", "SSL", "SASL_SSL")},
    "pulsar": {},
    "amqp": {},
    "nats": {},
    "redis": {},
    "http": {},
}


def add(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "doctor", doctor, "check the outbox, its streams and their destinations")
    add_flags(parser, (STORE, RELAY, STREAM), lambda setting: setting.name not in (*SHARED, "shards"))


async def doctor(chosen: Any) -> int:
    settings = Settings.of(chosen)
    found = [ok("version", _version()), *_secrets(settings), *await _store(settings)]
    for name, options in settings.streams().items():
        if "to" in options:
            found += [
                each._replace(sentence=f"stream {name!r}: {each.sentence}")
                for each in await _destination(name, options["to"], options.get("headers"))
            ]
    found += encryption(settings)
    found = [each._replace(sentence=secrets.masked(each.sentence)) for each in found]
    if chosen.json:
        output.print_json([each._asdict() for each in found])
    else:
        _print(found)
    return 1 if any(each.state is State.FAILED for each in found) else 0


def _print(found: Sequence[Finding]) -> None:
    width = max(len(each.check) for each in found)
    for each in found:
        state = each.state.value.ljust(len(State.WARNING))
        if each.state is not State.OK:
            state = output.colour(state, bad=each.state is State.FAILED)
        print(f"{state}  {each.check.ljust(width)}  {output.shown(each.sentence)}")
        if each.remedy is not None:
            print(f"{' ' * (len(State.WARNING) + width + 4)}-> {output.shown(each.remedy)}")


def _version() -> str:
    """The release, and the extras that are installed."""
    wanted: dict[str, list[str]] = {}
    for requirement in requires("pillarbox") or ():
        package, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .([\w-]+)", requirement)
        if package and extra:
            wanted.setdefault(extra[1], []).append(package[0])
    extras = sorted(extra for extra, packages in wanted.items() if all(map(_is_installed, packages)))
    return f"pillarbox {__version__} on Python {platform.python_version()}, extras: {', '.join(extras) or 'none'}"


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _secrets(settings: Settings) -> list[Finding]:
    """Passwords that other users of this machine can read."""
    typed = [
        given.origin for name in _SECRETS if (given := settings.flags.get(name)) and secrets.has_password(given.value)
    ]
    found = [
        failed("secrets", f"other users can read the password of {flag} in the list of processes", _SAFE)
        for flag in typed
    ]
    tables = [*settings.tables.values(), *settings.consumer_tables.values()]
    of_tables: list[Given] = [table[name] for table in tables for name in _SECRETS if name in table]
    written = [*(settings.file[name] for name in _SECRETS if name in settings.file), *of_tables]
    # The settings of an application are in no file of ours.
    if _is_open(Path(settings.path)) and any(secrets.has_password(str(given.value)) for given in written):
        sentence = f"{settings.path} has passwords, and others than its owner can read it"
        found.append(failed("secrets", sentence, f"chmod 600 {settings.path}"))
    everywhere = [*filter(None, map(settings.given, _SECRETS)), *of_tables]
    keys = {path for given in everywhere for path in secrets.key_files(str(given.value))}
    found += [
        failed("secrets", f"others than its owner can read the private key {path}", f"chmod 600 {quote(path)}")
        for path in sorted(keys)
        if _is_open(Path(path))
    ]
    return found or [ok("secrets", "no password stands where others can read it")]


def _is_open(file: Path) -> bool:
    """Whether others than its owner can read this file."""
    return file.is_file() and bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


_SAFE: Final = "give it in the environment, or in a file that only you can read"


async def _store(settings: Settings) -> list[Finding]:
    try:
        store = make_store(settings)
    except ConfigError as error:
        return [failed("store", str(error), "correct the setting")]
    try:
        await store.open()
    except PillarboxError as error:
        return [failed("store", str(error), _remedy(error))]
    try:
        sentence = f"{store.description} answers, version {await store.server_version()}, its schema fits"
        return [ok("store", sentence), *await operations.examine_store(store, _lease_seconds(settings))]
    except PillarboxError as error:
        return [failed("store", str(error), _remedy(error))]
    finally:
        await store.close()


def _lease_seconds(settings: Settings) -> float:
    """The longest lease of the streams."""
    leases = [options.get("lease", _LEASE) for options in settings.streams().values()]
    return max((seconds_of("lease", each) for each in leases), default=seconds_of("lease", _LEASE))


def _remedy(error: PillarboxError) -> str:
    if isinstance(error, StoreDown):
        return "start it, or correct its address"
    if isinstance(error, SchemaError):
        return "pillarbox migrate" if isinstance(error, OldSchema) else "pillarbox init, or correct prefix and schema"
    return "see the sentence; not all of the store could be checked"


async def _destination(stream: str, to: str, headers: str | None) -> list[Finding]:
    try:
        made = destination(stream, to, headers)
        publisher: Publisher = publisher_from_url(made) if isinstance(made, str) else made
    except ConfigError as error:
        return [failed("destination", str(error), "correct the setting")]
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            await publisher.open()
        return [ok("destination", f"{publisher.description} can be reached"), *await publisher.examine()]
    except ConfigError as error:
        return [failed("destination", str(error), "correct the setting")]
    except (Outage, TimeoutError) as error:
        said = str(error) or f"{publisher.description} does not answer within {_OPEN_SECONDS:.0f} s"
        return [failed("destination", said, "start it, or correct its address")]
    finally:
        await publisher.close()


def encryption(settings: Settings) -> list[Finding]:
    """Connections that leave this machine in plain text."""
    urls = [
        (what, without_driver(str(given.value)))
        for what, name in (("the store", "store"), ("listen_url", "listen_url"))
        if (given := settings.given(name)) is not None
    ]
    urls += [(f"stream {name!r}", options["to"]) for name, options in settings.streams().items() if "to" in options]
    plain = [what for what, url in urls if _is_plain(url)]
    if not plain:
        return [ok("encryption", "no connection beyond this machine is in plain text")]
    remedy = "ask for TLS in the URL: sslmode=verify-full, ssl_ca=FILE, tls=true, security.protocol=ssl"
    return [
        warning("encryption", f"{what}: the connection leaves this machine in plain text", remedy) for what in plain
    ]


def _is_plain(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme not in _PLAIN:
        return False
    options = parse_qsl(parts.query)
    places = [parts.netloc.rpartition("@")[2], *(value for name, value in options if name in ("host", "hostaddr"))]
    hosts = [_host(each) for place in places for each in place.split(",")]
    # A host that is a folder is the one of a socket.
    if all(host in _HERE or host.startswith("/") for host in hosts):
        return False
    wanted = _PLAIN[parts.scheme]
    return not any(name in wanted and (not wanted[name] or value in wanted[name]) for name, value in options)


def _host(place: str) -> str:
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0]
