"""Finds the driver of a handle, by the package that the handle's class comes from."""

import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from types import FunctionType, MethodType
from typing import Any, Final, TypeAlias

from pillarbox.drivers.contract import Driver, PoolDriver, settled
from pillarbox.errors import ConfigError

Make: TypeAlias = Callable[[Any], Driver]

# Each module has a function ``driver(handle)`` and is imported with the first such handle.
_OWN: Final = {
    "sqlalchemy": "pillarbox.drivers.sqlalchemy",
    "psycopg": "pillarbox.drivers.psycopg",
    "psycopg_pool": "pillarbox.drivers.psycopg",
    "psycopg2": "pillarbox.drivers.psycopg2",
    "asyncpg": "pillarbox.drivers.asyncpg",
    "sqlite3": "pillarbox.drivers.sqlite3",
    "aiosqlite": "pillarbox.drivers.aiosqlite",
    "pymysql": "pillarbox.drivers.pymysql",
    "asyncmy": "pillarbox.drivers.asyncmy",
    "pymongo": "pillarbox.drivers.pymongo",
    "django": "pillarbox.drivers.django",
}
# Drivers of other packages: an entry point is such a function, named after the package of its handles.
_ENTRY_POINTS: Final = "pillarbox.drivers"
_found: dict[type, Make] = {}


def driver_of(handle: Any) -> Driver:
    """The driver of a caller's handle, or ConfigError. A handle that is a driver already is returned as it is."""
    kind = type(handle)
    make = _found.get(kind)
    if make is None:
        make = _found[kind] = _find(kind)
    return make(handle)


def prepare() -> None:
    """Set the hooks of SQLAlchemy's sessions, if the application uses SQLAlchemy.

    Must run before the first event: if a hook of the application adds it, a hook that is set then is not called.
    """
    if "sqlalchemy.orm" in sys.modules:
        import_module("pillarbox.drivers._sqlalchemy_session")


def _find(kind: type) -> Make:
    if issubclass(kind, Driver):
        return _itself
    if issubclass(kind, FunctionType | MethodType | partial):
        return _factory
    packages = [each.__module__.partition(".")[0] for each in kind.__mro__]
    for package in packages:
        if package in _OWN:
            make: Make = import_module(_OWN[package]).driver
            return make
    others = {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS)}
    for package in packages:
        if package in others:
            loaded: Make = others[package].load()
            return loaded
    raise ConfigError(
        f"Pillarbox cannot write with a {kind.__module__}.{kind.__qualname__}; "
        f"pass a connection, cursor or session of: {', '.join([*_OWN, *others])}"
    )


def _itself(driver: Driver) -> Driver:
    return driver


def _factory(open_connection: Callable[[], Any]) -> Driver:
    return Factory(
        partial(_opened, open_connection), driver_of, is_awaited=inspect.iscoroutinefunction(open_connection)
    )


class Factory(PoolDriver):
    """A function that opens a connection for each block, or returns a pool that the application opened later."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Driver]:
        async with super().connected() as driver, driver.connected() as connected:
            yield connected


@asynccontextmanager
async def _opened(open_connection: Callable[[], Any]) -> AsyncIterator[Any]:
    """The result of the caller's function, for one block; a connection is closed, a pool stays open."""
    opened = await settled(open_connection())
    driver = driver_of(opened)
    if driver.is_pool:
        yield opened
        return
    try:
        # Some connections of sqlite3 have a transaction open at all times.
        is_always_open = driver.in_transaction()
        yield opened
        if is_always_open:
            await settled(opened.commit())
    finally:
        # asyncmy's close does not wait for the end.
        await settled(getattr(opened, "ensure_closed", opened.close)())
