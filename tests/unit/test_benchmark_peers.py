"""The peers of the benchmark, as far as they can be looked at without installing one."""

import ast
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.__main__ import chosen
from benchmarks.peers.environments import interpreter
from benchmarks.report import Bar, Row, table

FOLDER = Path(peers.__file__).parent
DRIVERS = sorted(FOLDER.glob("drive_*.py"))
# They import nothing of ours but the standard library's, asyncpg and confluent-kafka.
LIGHT = {
    "benchmarks.child",
    "benchmarks.clock",
    "benchmarks.load_events",
    "benchmarks.wire",
    "benchmarks.peers.backlog",
}


class TestChoice:
    def test_no_peer_is_installed_unasked(self) -> None:
        assert not [name for name in chosen(None) if name.startswith("peer")]

    def test_one_name_stands_for_all_peers(self) -> None:
        wanted = {"debezium", "debezium-cold", "txoutbox", "faststream-outbox", "omni-box", "loop"}
        assert {f"peer-{name}" for name in wanted} <= set(chosen(["peers"]))

    def test_a_row_is_measured_once(self) -> None:
        assert chosen(["peer-loop", "add", "peer-loop"]) == ["peer-loop", "add"]


class TestDrivers:
    @pytest.mark.parametrize("file", DRIVERS, ids=lambda file: file.stem)
    def test_it_runs_where_pillarbox_is_not_installed(self, file: Path) -> None:
        imported = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = {name for name in imported if name and name.split(".")[0] in ("benchmarks", "pillarbox", "tests")}
        assert ours <= LIGHT

    @pytest.mark.parametrize("file", sorted((FOLDER / "requirements").glob("*.txt")), ids=lambda file: file.stem)
    def test_its_packages_are_pinned_by_hash_and_name_no_registry(self, file: Path) -> None:
        lines = file.read_text().splitlines()
        packages = [line for line in lines if not line.startswith(" ")]
        assert packages
        assert all("==" in line for line in packages)
        assert all(line.strip().startswith("--hash=sha256:") for line in lines if line.startswith(" "))


class TestInterpreter:
    def test_ours_serves_where_it_is_new_enough(self) -> None:
        assert interpreter((3, 11)) == Path(sys.executable)

    def test_none_is_made_up(self) -> None:
        assert interpreter((9, 0)) is None


class TestTable:
    def test_peers_have_a_table_of_their_own(self) -> None:
        rows = [
            Row("drain", "events/s", Bar(0.85), [90.0], [100.0]),
            Row("peer-loop", "events/s", Bar(1.0), [90.0], [30.0], against="peer"),
        ]
        floor, peer = table(rows).split("\n\n")
        assert floor.split("\n")[0].split()[2:4] == ["floor", "ours"]
        assert peer.split("\n")[0].split()[2:4] == ["peer", "ours"]
        assert peer.split("\n")[1].split()[:5] == ["peer-loop", "events/s", "30.0", "90.0", "3.000"]
