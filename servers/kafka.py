"""Kafka without ZooKeeper: one node, or three."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from . import maven, process
from .base import ServerSet
from .cache import cached
from .java import JavaServer, Jit

VERSION = "4.3.1"
CLUSTER = "pillarboxpillarboxpill"  # an identity has 22 characters


class ProxyPorts(NamedTuple):
    """A broker tells its clients where it is, so that they would leave a proxy after their first question: it has to
    know where each proxy listens, and needs a port of its own for what comes from there."""

    listen: int
    target: int


class Kafka(JavaServer):
    name = "kafka"
    jars = maven.Jars(
        f"kafka-{VERSION}",
        f"Kafka {VERSION}",
        "44 MB",
        (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.slf4j:slf4j-simple:1.7.36"),
    )
    main_class = "kafka.Kafka"
    heap = "256m"
    ready_line = "Kafka Server started"

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        jit: Jit = "fast-start",
        node: int = 1,
        controllers: Mapping[int, int] | None = None,
        proxies: int = 0,
    ) -> None:
        """`controllers` maps the number of each node of a cluster to its controller's port. `proxies` is how many can
        stand before this node: one that listens on `proxies[0].listen` and leads to `proxies[0].target` keeps all of a
        client whose bootstrap server it is."""
        super().__init__(settings=settings, jit=jit)
        self.proxies = [ProxyPorts(process.free_port(), process.free_port()) for _ in range(proxies)]
        self.node = node
        self.controllers = controllers or {node: process.free_port()}

    @property
    def url(self) -> str:
        return f"kafka://{self.address}"

    @property
    def bootstrap_servers(self) -> str:
        return self.address

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def fetch(self) -> None:
        super().fetch()
        self._formatted = cached(f"kafka-{VERSION}-formatted", self._format)

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir()
        identity = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        meta = {"version": "1", "cluster.id": CLUSTER, "node.id": str(self.node), "directory.id": identity}
        _write(data / "meta.properties", meta)
        # Which features the cluster has: the only thing that formatting computes, and the same for all nodes.
        checkpoint = "bootstrap.checkpoint"
        (data / checkpoint).write_bytes((self._formatted / checkpoint).read_bytes())
        _write(self.folder / "server.properties", self._properties())

    def command(self) -> Sequence[str]:
        return self.java(self.main_class, str(self.folder / "server.properties"))

    def _format(self, target: Path) -> None:
        file = target / "format.properties"
        _write(file, {**self._roles(port=1), "log.dirs": str(target)})
        tool = [str(maven.java()), "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(file)]
        process.run_or_raise(tool, self.environment())

    def _roles(self, port: int) -> Mapping[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{p}" for n, p in self.controllers.items()),
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{self.controllers[self.node]}",
        }

    def _listeners(self) -> Mapping[str, str]:
        if not self.proxies:
            return {}
        names = {f"PROXY{number}": ports for number, ports in enumerate(self.proxies, 1)}
        behind = [f"{name}://127.0.0.1:{ports.target}" for name, ports in names.items()]
        before = [f"{name}://127.0.0.1:{ports.listen}" for name, ports in names.items()]
        return {
            "listeners": ",".join([self._roles(self.port)["listeners"], *behind]),
            "advertised.listeners": ",".join([f"PLAINTEXT://{self.address}", *before]),
            "listener.security.protocol.map": ",".join(
                f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *names)
            ),
            "inter.broker.listener.name": "PLAINTEXT",
        }

    def _properties(self) -> Mapping[str, str]:
        nodes = len(self.controllers)
        copies, in_sync = str(nodes), str(max(1, nodes - 1))
        return {
            **self._roles(self.port),
            **self._listeners(),
            "log.dirs": str(self.folder / "data"),
            "auto.create.topics.enable": "false",
            "default.replication.factor": copies,
            "min.insync.replicas": in_sync,
            **_internal_topics(copies, in_sync),
            # A dead broker is noticed in two seconds instead of nine.
            "broker.heartbeat.interval.ms": "200",
            "broker.session.timeout.ms": "2000",
            "group.initial.rebalance.delay.ms": "0",
            # A dead consumer is noticed after a second, and the new protocol answers at once, where a test wants it.
            "group.min.session.timeout.ms": "1000",
            "group.consumer.min.session.timeout.ms": "1000",
            "group.consumer.min.heartbeat.interval.ms": "100",
            "group.consumer.heartbeat.interval.ms": "100",
            # The default takes 128 MB of the heap.
            "log.cleaner.dedupe.buffer.size": "2097152",
            **self.settings,
        }


class KafkaCluster(ServerSet):
    """Three nodes; topics have three replicas by default and take writes while two are in sync."""

    name = "kafka_cluster"

    def __init__(self, *, settings: Mapping[str, str] | None = None, jit: Jit = "fast-start", proxies: int = 0) -> None:
        """A client needs a proxy before every node: its bootstrap servers are `node.proxies[0].listen` of each."""
        super().__init__(settings=settings)
        controllers = {number: process.free_port() for number in (1, 2, 3)}
        self.nodes: Sequence[Kafka] = [
            Kafka(settings=settings, jit=jit, node=number, controllers=controllers, proxies=proxies)
            for number in controllers
        ]

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap_servers}"

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.address for node in self.nodes)


def _internal_topics(copies: str, in_sync: str) -> Mapping[str, str]:
    # One partition each: creating the default of fifty takes longer than all the rest.
    return {
        "offsets.topic.num.partitions": "1",
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.num.partitions": "1",
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def _write(file: Path, properties: Mapping[str, str]) -> None:
    file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
