"""Pulsar standalone: broker, bookie and metadata in one process."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from . import maven
from .java import JavaServer, Jit
from .kafka import ProxyPorts
from .process import free_port

VERSION = "4.2.4"
OPENED = (
    "java.base/java.nio",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.platform",
    "java.base/sun.net",
    "java.base/java.util.zip",
    "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
)
DRIVERS = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata"
LOGGING = """\
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


class Pulsar(JavaServer):
    name = "pulsar"
    jars = maven.Jars(
        f"pulsar-{VERSION}",
        f"Pulsar {VERSION}",
        "242 MB",
        (f"org.apache.pulsar:pulsar-broker:{VERSION}",),
        # Without it Maven picks versions of shared libraries that the broker cannot work with.
        managed_by=f"org.apache.pulsar:pulsar:{VERSION}",
    )
    main_class = "org.apache.pulsar.PulsarStandaloneStarter"
    heap = "384m"
    options = (
        "-XX:MaxDirectMemorySize=256m",
        *(f"--add-opens={package}=ALL-UNNAMED" for package in OPENED),
        f"-Dbookkeeper.metadata.bookie.drivers={DRIVERS}BookieDriver",
        f"-Dbookkeeper.metadata.client.drivers={DRIVERS}ClientDriver",
        "-Dlog4j2.configurationFile=log4j2.properties",
    )
    ready_line = "messaging service is ready"
    start_seconds = 180.0  # it takes long on a busy machine

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        jit: Jit = "fast-start",
        proxies: int = 0,
        admin_token: str = "",
    ) -> None:
        """`proxies` as for Kafka. `admin_token` is for a broker whose settings let only known clients in."""
        super().__init__(settings=settings, jit=jit)
        self.proxies = [ProxyPorts(free_port(), free_port()) for _ in range(proxies)]
        self.admin_token = admin_token
        self._admin_port = free_port()
        self._bookie_port = free_port()

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self._admin_port}"

    def prepare(self) -> None:
        (self.folder / "log4j2.properties").write_text(LOGGING)
        lines = (f"{key}={value}\n" for key, value in self._configuration().items())
        (self.folder / "standalone.conf").write_text("".join(lines))

    def command(self) -> Sequence[str]:
        data = [
            "--metadata-dir",
            str(self.folder / "metadata"),
            "--bookkeeper-dir",
            str(self.folder / "bookkeeper"),
        ]
        ports = ["--num-bookies", "1", "--bookkeeper-port", str(self._bookie_port)]
        less = ["--no-functions-worker", "--no-stream-storage"]
        if not self.proxies:
            less += ["--advertised-address", "127.0.0.1"]
        configuration = ["--config", str(self.folder / "standalone.conf")]
        return self.java(self.main_class, *configuration, *data, *ports, *less)

    def ready(self) -> bool:
        # The port opens seconds before the namespace exists, and the broker owns topics of it later still.
        return super().ready() and self._owns_topics()

    def _owns_topics(self) -> bool:
        question = urllib.request.Request(f"{self.admin_url}/lookup/v2/topic/persistent/public/default/ready")
        if self.admin_token:
            question.add_header("Authorization", f"Bearer {self.admin_token}")
        try:
            with urllib.request.urlopen(question, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _configuration(self) -> Mapping[str, str]:
        one = (
            "managedLedgerDefaultEnsembleSize",
            "managedLedgerDefaultWriteQuorum",
            "managedLedgerDefaultAckQuorum",
        )
        return {
            "clusterName": "standalone",
            "bindAddress": "127.0.0.1",
            **({} if self.proxies else {"advertisedAddress": "127.0.0.1"}),
            "brokerServicePort": str(self.port),
            "webServicePort": str(self._admin_port),
            **dict.fromkeys(one, "1"),
            "brokerDeduplicationEnabled": "true",
            "allowAutoTopicCreationType": "non-partitioned",
            # The bookie's name is its address: with another one after a restart its data would not be found.
            "allowEphemeralPorts": "true",
            "listeningInterface": "lo",
            # A nearly full disk of the machine must not make the bookie read-only.
            "diskUsageThreshold": "0.99",
            "diskUsageWarnThreshold": "0.98",
            # Sized by the processors and the memory of a whole machine otherwise.
            "numIOThreads": "2",
            "numHttpServerThreads": "4",
            "numOrderedExecutorThreads": "2",
            "numWorkerThreadsForNonPersistentTopic": "1",
            "bookkeeperClientNumIoThreads": "2",
            "managedLedgerCacheSizeMB": "32",
            **self._listeners(),
            **self.settings,
        }

    def _listeners(self) -> Mapping[str, str]:
        """The broker tells a client who comes through a proxy the proxy's address."""
        if not self.proxies:
            return {}
        own = [f"own:{self.url}", *(f"p{n}:pulsar://127.0.0.1:{each.listen}" for n, each in enumerate(self.proxies))]
        bound = [f"p{n}:pulsar://127.0.0.1:{each.target}" for n, each in enumerate(self.proxies)]
        return {
            "internalListenerName": "own",
            "allowLoopback": "true",  # of the bookie, which has the broker's address otherwise
            "advertisedListeners": ",".join(own),
            "bindAddresses": ",".join(bound),
        }
