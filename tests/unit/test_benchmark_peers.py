"""The peers of the benchmark, without installing one."""

import ast
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers.environments import interpreter

FOLDER = Path(peers.__file__).parent
DRIVERS = sorted(FOLDER.glob("drive_*.py"))
# These modules need only the standard library, asyncpg and confluent-kafka.
LIGHT = {
    "benchmarks.child",
    "benchmarks.clock",
    "benchmarks.load_events",
    "benchmarks.wire",
    "benchmarks.peers.backlog",
}


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
