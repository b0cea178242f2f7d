"""From settings to an open store."""

import asyncio
import getpass
import inspect
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

from pillarbox.cli import secrets
from pillarbox.cli.settings import STORE, Settings
from pillarbox.errors import ConfigError
from pillarbox.store import Store
from pillarbox.urls import store_class

T = TypeVar("T")

_UNITS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_ENDING: Final = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def make_store(settings: Settings) -> Store:
    """The store that was configured, not yet open."""
    return store_maker(settings)()


def store_maker(settings: Settings) -> Callable[..., Store]:
    """What makes the store that was configured; keyword arguments count more than settings."""
    options = settings.scope(STORE)
    url = options.pop("store", None)
    if url is None:
        raise ConfigError(
            f"nothing says where the outbox is; set PILLARBOX_STORE or 'store' in {settings.path}, "
            "or give --store, for example --store sqlite:///shop.db"
        )
    given = settings.given("store")
    if given is not None and given.origin == "--store" and secrets.has_password(url):
        print(
            "pillarbox: the password in --store can be read in the list of processes; "
            "set PILLARBOX_STORE instead, or 'store' in a file that only you can read",
            file=sys.stderr,
        )
    kind = store_class(url)
    known = inspect.signature(kind.__init__).parameters
    for name in options:
        if name not in known:
            said = settings.given(name)
            origin = said.origin if said else name
            raise ConfigError(f"{origin} means nothing to a {url.partition(':')[0]} store; leave it out")

    def make(**others: Any) -> Store:
        store: Store = kind.from_url(url, **{**options, **others})
        return store

    return make


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    store = make_store(settings)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Its result; a signal ends it in order, and one more ends its ending."""
    return asyncio.run(_until_asked(work))


async def _until_asked(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    # By the loop: what asyncio.run does on Ctrl-C does not wake a loop that was about to sleep. Where a loop knows no
    # signals, it has to do.
    with suppress(NotImplementedError):
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def operator(chosen: Any) -> str:
    """Whom the audit names."""
    if chosen.by:
        return str(chosen.by)
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise ConfigError("this process has no user name; say who you are with --by NAME") from None


def seconds(text: str, what: str) -> float:
    """From ``90``, ``90s``, ``15m``, ``24h`` or ``7d``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or (match[2] or "s") not in _UNITS:
        raise ConfigError(f"{what} is {text!r}; use a duration such as 90s, 15m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def instant(text: str | None, what: str, *, ahead: bool = False) -> datetime | None:
    """From ISO 8601 (without a zone: local time), or a duration before now, or after it."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        pass
    except OverflowError:
        raise _too_far(text, what) from None
    match = _DURATION.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{what} is {text!r}; use an instant such as 2030-01-31T12:00:00Z, or a duration such as 2h")
    try:
        span = timedelta(seconds=seconds(text, what))
        return datetime.now(UTC) + (span if ahead else -span)
    except OverflowError:
        raise _too_far(text, what) from None


def _too_far(text: str, what: str) -> ConfigError:
    return ConfigError(f"{what} is {text!r}, which no calendar has; use the years 1 to 9999")


def event_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is not an event's id; ids look like 0192f0c1-7b3a-7c11-8000-5f0e3a2b1c4d"
        ) from None
