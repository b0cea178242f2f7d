"""On MongoDB seq follows the order of commits within a key: contending writers, wrong clocks, elections."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pymongo.errors import PyMongoError

from pillarbox import Outbox
from servers import Mongo, MongoSet
from servers.fixtures import OwnServer
from servers.process import wait_until
from tests.mongo_outbox import MongoOutbox

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "tests.integration.mongo_writer")
KEYS = 3
LIBRARY = distribution("libfaketime").locate_file("libfaketime/vendor/libfaketime/src/libfaketime.so.1")


def clock(offset: str) -> Mapping[str, str]:
    """Environment of a process whose clock is off."""
    return {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else every wait of the server takes too long
    }


class SkewedMongo(Mongo):
    """A node whose clock is off."""

    def __init__(self, *, offset: str = "+0", **options: Any) -> None:
        super().__init__(**options)
        self.offset = offset

    def environment(self) -> Mapping[str, str]:
        return clock(self.offset)


class SkewedSet(MongoSet):
    """Three nodes: one an hour ahead, one an hour behind, one right."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [SkewedMongo(offset=offset, alone=False) for offset in ("+1h", "-1h", "+0")]


def versions_by_key(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[int]]:
    versions: dict[str, list[int]] = {}
    for event in events:
        versions.setdefault(event["key"], []).append(event["aggregate_version"])
    return versions


def inversions(versions: Mapping[str, Sequence[int]]) -> int:
    return sum(before >= after for each in versions.values() for before, after in pairwise(each))


class Load:
    """Writer processes that contend for a few keys, and the check of what they wrote."""

    def __init__(self, made: MongoOutbox, folder: Path, offsets: Sequence[str | None]) -> None:
        self.made = made
        made.database.create_collection(f"{made.prefix}_aggregate")
        self.ledgers = [folder / f"ledger_{number}" for number in range(len(offsets))]
        self.writers = [
            self._start(number, offset, ledger)
            for number, (offset, ledger) in enumerate(zip(offsets, self.ledgers, strict=True))
        ]

    def _start(self, number: int, offset: str | None, ledger: Path) -> "subprocess.Popen[bytes]":
        with ledger.open("wb") as output:
            return subprocess.Popen(
                [*PROGRAM, self.made.url, self.made.prefix, str(number), str(KEYS)],
                cwd=ROOT,
                env={**os.environ, **(clock(offset) if offset else {})},
                stdin=subprocess.PIPE,
                stdout=output,
            )

    def committed(self) -> int:
        with suppress(PyMongoError):  # while there is no primary
            return int(self.made["event"].count_documents({}))
        return 0

    def go_on(self, count: int) -> None:
        """Wait until so many more events are committed."""
        start = self.committed()
        wait_until(lambda: self.committed() >= start + count, seconds=30, what=f"{count} more events")

    def stop(self) -> list[dict[str, Any]]:
        for writer in self.writers:
            assert writer.stdin is not None
            writer.stdin.close()
        assert [writer.wait(timeout=60) for writer in self.writers] == [0] * len(self.writers)
        return [json.loads(line) for ledger in self.ledgers for line in ledger.read_text().splitlines()]

    def check(self) -> Mapping[str, int]:
        """Stop the writers, check their events and return the figures."""
        ledger = self.stop()
        events = self.made.events()
        by_id = {str(event["_id"]["id"]) for event in events}
        versions = versions_by_key(events)
        heads = {
            str(each["_id"]): each["version"] for each in self.made.database[f"{self.made.prefix}_aggregate"].find()
        }
        committed = {line["ids"][-1] for line in ledger if line["outcome"] == "committed"}
        doubtful = {line["ids"][-1] for line in ledger if line["outcome"].startswith("unknown") and line["ids"]}
        facts = {
            "events": len(events),
            "aborted": sum(line["outcome"] == "aborted" for line in ledger),
            "run again": sum(line["tries"] - 1 for line in ledger),
            "inversions": inversions(versions),
            "ties": len(events) - len({event["seq"] for event in events}),
            "missing": len(committed - by_id),
            "phantom": len(by_id - committed - doubtful),
            "unknown": len(doubtful),
        }
        print(facts)
        # No gap and none twice: every committed version has its event, in this order.
        assert {key: list(range(1, head + 1)) for key, head in heads.items()} == versions
        assert [facts[name] for name in ("inversions", "ties", "missing", "phantom")] == [0, 0, 0, 0]
        assert facts["aborted"]
        assert facts["run again"]
        return facts


@pytest.fixture
def load(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Load]:
    def start(url: str, offsets: Sequence[str | None] = (None,) * 4) -> Load:
        made = MongoOutbox(url)
        load = Load(made, tmp_path, offsets)

        def end() -> None:
            for writer in load.writers:
                writer.kill()
                writer.wait()
                assert writer.stdin is not None
                writer.stdin.close()
            made.close()

        request.addfinalizer(end)
        return load

    return start


def test_contending_writers(mongo: Mongo, load: Callable[..., Load]) -> None:
    running = load(mongo.url)
    running.go_on(150)
    running.check()


def test_writers_whose_clocks_are_hours_apart(mongo: Mongo, load: Callable[..., Load]) -> None:
    running = load(mongo.url, ("+1h", "-1h", "+1h", "-1h"))
    running.go_on(150)
    running.check()
    by_own_clock = sorted(running.made.events(), key=lambda event: event["created_at"])
    assert (by_own_clock[-1]["created_at"] - by_own_clock[0]["created_at"]).total_seconds() > 7000
    assert inversions(versions_by_key(by_own_clock))  # what it would be if their clocks counted


@pytest.mark.long
def test_a_primary_that_is_killed_and_one_that_steps_down(own_server: OwnServer, load: Callable[..., Load]) -> None:
    nodes = own_server(MongoSet)
    running = load(nodes.url)
    running.go_on(40)
    first = nodes.primary()
    first.kill()
    running.go_on(40)
    first.start()
    nodes.primary().admin({"replSetStepDown": 5, "force": True})
    running.go_on(40)
    running.check()


@pytest.mark.long
def test_a_primary_that_stands_still_and_comes_back(own_server: OwnServer, load: Callable[..., Load]) -> None:
    nodes = own_server(MongoSet)
    running = load(nodes.url)
    running.go_on(40)
    first = nodes.primary()
    others = [node for node in nodes.nodes if node is not first]
    first.pause()
    wait_until(lambda: any(node.is_primary() for node in others), seconds=20, what="another primary")
    first.resume()
    running.go_on(40)
    running.check()


def make_primary(node: Mongo) -> None:
    """Ask until the others vote for it. Under load a node can lag behind, and then they do not."""

    def is_promoted() -> bool:
        with suppress(PyMongoError):
            return node.is_primary() or bool(node.admin({"replSetStepUp": 1})["ok"])
        return False

    wait_until(is_promoted, seconds=20, what="the node to become primary")


@pytest.mark.long
def test_primaries_whose_clocks_are_hours_apart(own_server: OwnServer, load: Callable[..., Load]) -> None:
    nodes = own_server(SkewedSet)
    running = load(nodes.url)
    for node in (*nodes.nodes, nodes.nodes[0]):
        make_primary(node)
        running.go_on(30)
        assert node.is_primary()
    running.check()


@pytest.mark.parametrize("replica_set", [True, False], ids=["replica set", "standalone"])
def test_a_server_whose_clock_is_set_back_while_it_is_down(own_server: OwnServer, replica_set: bool) -> None:
    """A replica set goes on after its last entry. A standalone server has no such entry."""
    server = own_server(SkewedMongo, offset="+1h", replica_set=replica_set)
    made = MongoOutbox(server.url)
    outbox = Outbox(prefix=made.prefix, transactions=False)
    outbox.add(made.client, "before", {}, key=1)
    server.stop()
    server.offset = "+0"
    server.start()
    outbox.add(made.client, "after", {}, key=1)
    assert [event["type"] for event in made.events()] == (["before", "after"] if replica_set else ["after", "before"])
    made.close()
