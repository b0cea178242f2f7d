"""Making and opening the store of the settings, and running a command's work."""

import asyncio
import getpass
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar
from uuid import UUID

from pillarbox.cli import secrets
from pillarbox.cli.settings import STORE, Settings
from pillarbox.errors import ConfigError
from pillarbox.store import Store
from pillarbox.urls import store_class, without_driver

T = TypeVar("T")

_ENDING: Final = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def make_store(settings: Settings) -> Store:
    """The store of the settings, not yet open."""
    return store_maker(settings)()


def store_maker(settings: Settings) -> Callable[..., Store]:
    """A function that makes the store of the settings; its keyword arguments override them."""
    options = settings.scope(STORE)
    url = options.pop("store", None)
    if url is None:
        raise ConfigError(
            f"no store is given; set PILLARBOX_STORE or 'store' in {settings.path}, "
            "or give --store, for example --store sqlite:///shop.db"
        )
    given = settings.given("store")
    if given is not None and given.origin == "--store" and secrets.has_password(url):
        print(
            "pillarbox: other users can read the password of --store in the list of processes; "
            "set PILLARBOX_STORE instead, or 'store' in a file that only you can read",
            file=sys.stderr,
        )
    url = without_driver(url)
    kind = store_class(url)
    for name in options:
        if name not in kind.options:
            said = settings.given(name)
            origin = said.origin if said else name
            raise ConfigError(f"a {url.partition(':')[0]} store has no {origin}; leave it out")

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
    """Run it and return its result. A signal cancels it."""
    return asyncio.run(_until_asked(work))


async def _until_asked(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    # The loop handles the signals: asyncio.run's own way does not wake a loop that is about to sleep. On a platform
    # whose loop cannot handle signals, that way is all there is.
    with suppress(NotImplementedError):
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def operator(chosen: Any) -> str:
    """The name for the audit."""
    if chosen.by:
        return str(chosen.by)
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise ConfigError("this process has no user name; say who you are with --by NAME") from None


def event_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is not an event's id; ids look like 0192f0c1-7b3a-7c11-8000-5f0e3a2b1c4d"
        ) from None
