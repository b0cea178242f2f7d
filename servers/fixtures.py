"""Pytest's side of the servers: shared ones that start when first needed, and own ones to break."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import pytest

from . import (
    REGISTRY,
    Kafka,
    KafkaCluster,
    MariaDB,
    MissingError,
    Mongo,
    MongoSet,
    MongoStandalone,
    MySQL,
    Nats,
    Postgres,
    Postgres15,
    Pulsar,
    RabbitMQ,
    Receiver,
    Server,
    ServerError,
    Valkey,
)
from .base import in_parallel, start_each
from .process import drop_folder, make_folder, memory_folder

S = TypeVar("S", bound=Server)


class OwnServer(Protocol):
    def __call__(self, kind: type[S], **options: Any) -> S: ...


class Shared:
    """The servers that all tests of this process share."""

    def __init__(self, left_out: Collection[str]) -> None:
        self.left_out = left_out
        self.started: dict[str, Server] = {}
        self.failed: dict[str, Exception] = {}

    def fetch(self, names: Iterable[str]) -> None:
        for name in self._new(names):
            try:
                server = REGISTRY[name]()
                if not server.missing():
                    server.fetch()
            except ServerError as error:
                self.failed[name] = error

    def start(self, names: Iterable[str]) -> None:
        """All at the same time; an error is kept for the test that asks for its server."""
        servers = [REGISTRY[name]() for name in self._new(names)]
        for server, error in zip(servers, start_each(servers), strict=True):
            if error:
                self.failed[server.name] = error
            else:
                self.started[server.name] = server

    def get(self, kind: type[S]) -> S:
        self.skip_if_left_out(kind)
        self.start([kind.name])
        if error := self.failed.get(kind.name):
            if isinstance(error, MissingError):
                _unavailable(error)
            raise error
        server = self.started[kind.name]
        assert isinstance(server, kind)
        return server

    def skip_if_left_out(self, kind: type[Server]) -> None:
        if kind.name in self.left_out:
            pytest.skip("needs a server that --servers leaves out")

    def close(self) -> None:
        in_parallel([server.close for server in self.started.values()])
        self.started.clear()

    def _new(self, names: Iterable[str]) -> list[str]:
        done = {*self.started, *self.failed, *self.left_out}
        return [name for name in names if name in REGISTRY and name not in done]


SHARED = pytest.StashKey[Shared]()
OWN = pytest.StashKey[list[Server]]()
IN_MEMORY = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--servers",
        metavar="NAMES",
        type=_known,
        default=list(REGISTRY),
        help="skip tests that need a server other than these, for example --servers=postgres,kafka",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A suite waits for the disk for a third of its time. TMPDIR names another place, also a disk. The workers of
    # pytest-xdist inherit the folder.
    if "TMPDIR" not in os.environ and (memory := memory_folder()):
        config.stash[IN_MEMORY] = folder = make_folder("tests", inside=memory)
        # After the folder of multiprocessing, which is inside and has the priority -100.
        Finalize(None, drop_folder, (folder,), exitpriority=-200)
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
    config.stash[SHARED] = Shared(REGISTRY.keys() - set(config.getoption("--servers")))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[SHARED].close()
    if IN_MEMORY in config.stash:
        del os.environ["TMPDIR"]
        tempfile.tempdir = None


def pytest_collection_finish(session: pytest.Session) -> None:
    # Here, because a download inside a test would count against the test's time limit.
    if not session.config.option.collectonly:
        names = {name for item in session.items for name in _needs(item)}
        with _visible(session.config):
            session.config.stash[SHARED].fetch(sorted(names))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Fixtures are set up one after the other; this starts what they will ask for at the same time.
    with _visible(item.config):
        item.config.stash[SHARED].start(_needs(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        shared = item.config.stash[SHARED].started
        used = [shared[name] for name in _needs(item) if name in shared]
        for server in [*used, *item.stash.get(OWN, [])]:
            report.sections.append((f"Captured log of the server {server.name}", server.log()))
    return report


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[OwnServer]:
    """`own_server(Kafka, settings={...})` starts a server that this test alone uses and may break."""
    servers = request.node.stash.setdefault(OWN, [])

    def start(kind: type[S], **options: Any) -> S:
        request.config.stash[SHARED].skip_if_left_out(kind)
        server = kind(**options)
        servers.append(server)
        try:
            with _visible(request.config):
                return server.start()
        except MissingError as error:
            _unavailable(error)

    yield start
    in_parallel([server.close for server in servers])


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Postgres:
    return request.config.stash[SHARED].get(Postgres)


@pytest.fixture(scope="session")
def postgres15(request: pytest.FixtureRequest) -> Postgres15:
    return request.config.stash[SHARED].get(Postgres15)


@pytest.fixture(scope="session")
def mariadb(request: pytest.FixtureRequest) -> MariaDB:
    return request.config.stash[SHARED].get(MariaDB)


@pytest.fixture(scope="session")
def mysql(request: pytest.FixtureRequest) -> MySQL:
    return request.config.stash[SHARED].get(MySQL)


@pytest.fixture(scope="session")
def mongo(request: pytest.FixtureRequest) -> Mongo:
    return request.config.stash[SHARED].get(Mongo)


@pytest.fixture(scope="session")
def mongo_standalone(request: pytest.FixtureRequest) -> MongoStandalone:
    return request.config.stash[SHARED].get(MongoStandalone)


@pytest.fixture(scope="session")
def mongo_set(request: pytest.FixtureRequest) -> MongoSet:
    return request.config.stash[SHARED].get(MongoSet)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Kafka:
    return request.config.stash[SHARED].get(Kafka)


@pytest.fixture(scope="session")
def kafka_cluster(request: pytest.FixtureRequest) -> KafkaCluster:
    return request.config.stash[SHARED].get(KafkaCluster)


@pytest.fixture(scope="session")
def pulsar(request: pytest.FixtureRequest) -> Pulsar:
    return request.config.stash[SHARED].get(Pulsar)


@pytest.fixture(scope="session")
def rabbitmq(request: pytest.FixtureRequest) -> RabbitMQ:
    return request.config.stash[SHARED].get(RabbitMQ)


@pytest.fixture(scope="session")
def receiver(request: pytest.FixtureRequest) -> Receiver:
    return request.config.stash[SHARED].get(Receiver)


@pytest.fixture(scope="session")
def nats(request: pytest.FixtureRequest) -> Nats:
    return request.config.stash[SHARED].get(Nats)


@pytest.fixture(scope="session")
def valkey(request: pytest.FixtureRequest) -> Valkey:
    return request.config.stash[SHARED].get(Valkey)


def _known(option: str) -> list[str]:
    names = option.split(",")
    if unknown := [name for name in names if name not in REGISTRY]:
        raise argparse.ArgumentTypeError(f"unknown server '{unknown[0]}', known: {', '.join(REGISTRY)}")
    return names


def _needs(item: pytest.Item) -> list[str]:
    return [name for name in getattr(item, "fixturenames", ()) if name in REGISTRY]


def _unavailable(error: MissingError) -> NoReturn:
    """A contributor's machine may lack a server; one that checks changes may not."""
    if os.environ.get("CI") == "true":
        pytest.fail(str(error), pytrace=False)
    pytest.skip(str(error))


def _visible(config: pytest.Config) -> AbstractContextManager[None]:
    # The line that announces a download must not be captured: nothing else says why the run stands still.
    capture = config.pluginmanager.getplugin("capturemanager")
    return capture.global_and_fixture_disabled() if capture else nullcontext()
