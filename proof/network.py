"""The proxies of a run: one to the database for each relay, and a few to the broker."""

from typing import Any

from proof.brokers import Broker
from proof.databases.base import Database
from proof.proxy import Proxy
from proof.proxy_thread import ProxyThread


class Network:
    """Opens proxies. All stay open until the end of the run."""

    def __init__(self, database: Database, broker: Broker | None) -> None:
        self._database = database
        self._thread = ProxyThread()
        self.broker: list[Proxy] = []
        if broker is not None:
            self.broker = [
                self._thread.open("127.0.0.1", ports.target, port=ports.listen) for ports in broker.proxies()
            ]

    def to_database(self) -> Proxy | None:
        """A new proxy to the database; None: its clients cannot be sent through one."""
        port = self._database.port
        return None if port is None else self._thread.open("127.0.0.1", port)

    def run(self, change: Any) -> None:
        self._thread.run(change)

    def close(self) -> None:
        self._thread.close()
