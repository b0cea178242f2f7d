"""Kafka Connect, one worker in one process, with Debezium's connectors for PostgreSQL, MySQL and MongoDB, and with
MongoDB's own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import maven, process
from .java import JarServer
from .kafka import VERSION as KAFKA_VERSION

VERSION = "3.6.1.Final"
MONGO_VERSION = "2.0.1"
# The Java options of Kafka Connect's start script.
_JAVA_OPTIONS = (
    "-Xms256M",
    "-Xmx2G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)


class Connect(JarServer):
    """A Kafka Connect worker. `put` starts a connector; its offsets survive `restart`."""

    name = "connect"
    ready_line = "Kafka Connect started"
    start_seconds = 120
    jars = maven.Jars(
        f"connect-{KAFKA_VERSION}-debezium-{VERSION}-all",
        f"Kafka Connect {KAFKA_VERSION} and Debezium {VERSION}",
        "51 MB",
        (
            f"org.apache.kafka:connect-runtime:{KAFKA_VERSION}",
            *(f"io.debezium:debezium-connector-{name}:{VERSION}" for name in ("postgres", "mysql", "mongodb")),
            "org.slf4j:slf4j-simple:1.7.36",
        ),
    )
    plugin = maven.Jars(
        f"mongo-kafka-connect-{MONGO_VERSION}-listed",
        f"MongoDB's connector {MONGO_VERSION}",
        "6 MB",
        (f"org.mongodb.kafka:mongo-kafka-connect:{MONGO_VERSION}",),
    )

    def __init__(self, bootstrap_servers: str, *, mongo: bool = False) -> None:
        """mongo: with MongoDB's own connector too."""
        super().__init__()
        self.bootstrap_servers = bootstrap_servers
        self._mongo = mongo

    def fetch(self) -> None:
        super().fetch()
        if self._mongo:
            self._plugin = self.plugin.fetch(_list_its_classes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        converter = "org.apache.kafka.connect.storage.StringConverter"
        properties = {
            "bootstrap.servers": self.bootstrap_servers,
            "listeners": self.url,
            "offset.storage.file.filename": str(self.folder / "offsets"),
            "key.converter": converter,
            "value.converter": converter,
            # Without a search through all classes, which takes most of a start.
            "plugin.discovery": "service_load",
        }
        if self._mongo:
            # Apart from the class path: it needs another version of MongoDB's driver than Debezium.
            plugins = self.folder / "plugins"
            plugins.mkdir()
            (plugins / "mongo").symlink_to(self._plugin)
            properties["plugin.path"] = str(plugins)
        lines = "".join(f"{key}={value}\n" for key, value in properties.items())
        (self.folder / "worker.properties").write_text(lines)

    def command(self) -> Sequence[str]:
        main = "org.apache.kafka.connect.cli.ConnectStandalone"
        return [str(maven.java()), *_JAVA_OPTIONS, main, str(self.folder / "worker.properties")]

    def put(self, connector: str, settings: Mapping[str, str]) -> None:
        """Start a connector; returns when the worker has accepted its settings."""
        self._ask("PUT", f"/connectors/{connector}/config", settings)

    def delete(self, connector: str) -> None:
        self._ask("DELETE", f"/connectors/{connector}")

    def failure(self, connector: str) -> str | None:
        """The error of a failed task of the connector with its first cause in front, or None."""
        found = self._status(connector)
        failed = [each for each in (found["connector"], *found["tasks"]) if each["state"] == "FAILED"]
        if not failed:
            return None
        trace = str(failed[0].get("trace", "no reason given"))
        causes = [line for line in trace.splitlines() if line.startswith("Caused by: ")]
        return "\n".join([*causes[-1:], trace])

    def wait_until_running(self, connector: str) -> None:
        """Wait until the connector's task runs. Raises RuntimeError if it fails."""

        def ready() -> bool:
            if wrong := self.failure(connector):
                raise RuntimeError(wrong)
            return any(task["state"] == "RUNNING" for task in self._status(connector)["tasks"])

        process.wait_until(ready, seconds=60, what=f"the connector {connector} to run")

    def _status(self, connector: str) -> Any:
        return json.loads(self._ask("GET", f"/connectors/{connector}/status"))

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            # No proxy: the worker runs on this machine.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=90) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"Kafka Connect answered {error.code}: {error.read().decode()[:500]}") from error


def _list_its_classes(folder: Path) -> None:
    """MongoDB's connector does not say which of its classes is a connector."""
    with zipfile.ZipFile(folder / "services.jar", "w") as jar:
        service = "META-INF/services/org.apache.kafka.connect.source.SourceConnector"
        jar.writestr(service, "com.mongodb.kafka.connect.MongoSourceConnector\n")
