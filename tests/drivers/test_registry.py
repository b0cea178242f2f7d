"""Finding the driver of a handle."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.drivers import driver_of
from pillarbox.drivers.sqlite3 import Sqlite3
from pillarbox.errors import ConfigError

OWN = """
from pillarbox.drivers.sqlite3 import Sqlite3

class Handle:
    pass

class Wrapped(Handle):
    pass

def driver(handle):
    return Sqlite3(handle)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with handles of its own, and an entry point for them."""
    (tmp_path / "owndb.py").write_text(OWN)
    info = tmp_path / "owndb-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: owndb\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pillarbox.drivers]\nowndb = owndb:driver\n")
    monkeypatch.syspath_prepend(tmp_path)
    return pytest.importorskip("owndb")


def test_an_entry_point_brings_the_driver_of_another_package(package: Any) -> None:
    assert isinstance(driver_of(package.Handle()), Sqlite3)
    assert isinstance(driver_of(package.Wrapped()), Sqlite3)


def test_handles_that_are_known_need_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(sqlite3.Connection):
        pass

    monkeypatch.setattr("pillarbox.drivers.registry.entry_points", lambda group: pytest.fail("not needed"))
    connection = Mine(":memory:")
    assert isinstance(driver_of(connection), Sqlite3)
    connection.close()


def test_an_unknown_handle_is_named_with_all_that_are_known(package: Any) -> None:
    with pytest.raises(ConfigError, match=r"types\.SimpleNamespace.*sqlalchemy.*pymongo, .*owndb"):
        driver_of(SimpleNamespace())


def test_a_driver_is_a_handle() -> None:
    connection = sqlite3.connect(":memory:")
    driver = Sqlite3(connection)
    assert driver_of(driver) is driver
    connection.close()


def test_a_connection_that_is_not_started_says_how_to_start_it() -> None:
    with pytest.raises(ConfigError, match="not started"):
        driver_of(create_async_engine("sqlite+aiosqlite://").connect())
