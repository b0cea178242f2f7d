"""Keeps the tables on one database."""

from typing import Any


class OnlyDefault:
    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool:
        return db == "default"
