"""The Django of this process: configured once, with databases that are added by URL."""

import itertools
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

import django
import pymysql
from django.apps import apps
from django.conf import settings
from django.db import connections

_ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
_APPS = ["auth", "contenttypes", "sessions", "messages", "admin"]
_numbers = itertools.count(1)


def use_pymysql() -> None:
    """PyMySQL in the place of mysqlclient, which has to be compiled."""
    if "MySQLdb" not in sys.modules:
        pymysql.version_info = (2, 2, 1, "final", 0)
        pymysql.install_as_MySQLdb()


def configure() -> None:
    """Safe to call again."""
    use_pymysql()
    if not settings.configured:
        settings.configure(
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            INSTALLED_APPS=[*(f"django.contrib.{name}" for name in _APPS)],
            SECRET_KEY="tests",
            USE_TZ=True,
        )
    if not apps.ready:
        django.setup()


def database_of(url: str, **others: Any) -> dict[str, Any]:
    """An entry of DATABASES."""
    if url.startswith("sqlite:"):
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": url.removeprefix("sqlite:///"),
            "OPTIONS": {"timeout": 10},
            **others,
        }
    parts = urlsplit(url)
    return {
        "ENGINE": f"django.db.backends.{_ENGINES[parts.scheme]}",
        "NAME": parts.path.strip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname,
        "PORT": str(parts.port or ""),
        **others,
    }


def add_database(url: str, **others: Any) -> str:
    """Add a database to DATABASES; its alias."""
    configure()
    alias = f"shop{next(_numbers)}"
    connections.settings.update(
        {alias: connections.configure_settings({"default": database_of(url, **others)})["default"]}
    )
    return alias


def remove_database(alias: str) -> None:
    """Close and forget it."""
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]
