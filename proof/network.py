"""The proxies of a run: one to the database for each relay, and a few to the broker."""

from collections.abc import Callable
from random import Random
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
        self._is_set = broker is not None and broker.is_set
        if broker is not None:
            self.broker = [
                self._thread.open("127.0.0.1", ports.target, port=ports.listen) for ports in broker.proxies()
            ]

    def to_database(self) -> Proxy | None:
        """A new proxy to the database; None: its clients cannot be sent through one."""
        port = self._database.port
        return None if port is None else self._thread.open("127.0.0.1", port)

    def to_broker(self, number: int) -> list[Proxy]:
        """The proxies that a relay with this number uses."""
        return self.broker if self._is_set or not self.broker else [self.broker[number % len(self.broker)]]

    def run(self, change: Any) -> None:
        self._thread.run(change)

    def close(self) -> None:
        self._thread.close()


def modes(proxy: Proxy, chance: Random) -> list[tuple[str, Callable[[], Any]]]:
    """The ways to break a connection: their names, and what begins each."""
    return [
        ("delay", lambda: proxy.delay(chance.uniform(0.01, 0.2), 0.05)),
        ("throttle", lambda: proxy.throttle(20_000)),
        ("reset", proxy.reset),
        ("refuse", lambda: proxy.refuse(reset=True)),
        ("drop", lambda: proxy.drop("both")),
        ("drop replies", lambda: proxy.drop("to_client")),
        ("cut", lambda: proxy.cut_after(chance.randint(100, 20_000), "to_client")),
    ]
