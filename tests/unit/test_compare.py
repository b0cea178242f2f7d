"""The comparison of two trees: which code each side runs, the ratios, and what is left behind."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import compare as comparing
from benchmarks.bed import Bed
from benchmarks.compare import CompareError, Figures, compare, driven, driven_table, table
from benchmarks.scale import Scale
from benchmarks.trees import Tree, TreeError
from servers.process import wait_until

# Writes the file that a benchmark writes, with figures that name the tree: each commit has its own speed.
BENCHMARK = """
import json, pathlib, sys
import pillarbox
assert sys.argv[1:] == ["--rounds", "1", "--only", "drain", "add"], sys.argv
drain = {"name": "drain", "unit": "events/s", "ours": pillarbox.SPEED, "other": 100.0, "ours_cpu_us_per_event": 10.0}
add = {"name": "add", "unit": "us", "ours": 1e6 / pillarbox.SPEED, "other": 50.0}
pathlib.Path("build").mkdir()
pathlib.Path("build/bench.json").write_text(json.dumps({"rows": [drain, add]}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two commits. The second one is half as fast again as the first."""
    root = tmp_path / "tree"
    for package in ("src/pillarbox", "benchmarks"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    (root / "benchmarks" / "__main__.py").write_text(BENCHMARK)
    git(root, "init", "--quiet")
    for speed in (1000, 1500):
        (root / "src" / "pillarbox" / "__init__.py").write_text(f"SPEED = {speed}\n")
        git(root, "add", ".")
        git(root, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", str(speed))
    return root


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def test_each_side_runs_its_own_code(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drain, add = compare(tree, "HEAD~1", 2, ["drain", "add"]).splitlines()[1:]
    assert drain.split() == ["drain", "1.500", "1.500", "1.500", "1.000", "1.000", "1.000", "1.000"]
    assert add.split() == ["add", "1.500", "1.500", "1.500", "1.000"]
    sides = [line.split(":")[0].strip() for line in capfd.readouterr().err.splitlines()[1:]]
    assert sides == ["this tree", "the base", "the base", "this tree"]


def test_the_worktree_is_removed(tree: Path) -> None:
    compare(tree, "HEAD~1", 1, ["drain", "add"])
    with pytest.raises(CompareError, match=r"(?s)of this tree failed; its last lines:.*AssertionError"):
        compare(tree, "HEAD~1", 1, ["unknown"])
    assert len(git(tree, "worktree", "list").splitlines()) == 1


def test_a_tree_that_would_import_other_code_is_refused(tree: Path) -> None:
    git(tree, "rm", "--quiet", "-r", "src")
    with pytest.raises(CompareError, match="this tree would import"):
        compare(tree, "HEAD", 1, ["drain"])


def test_an_unknown_commit_is_one_sentence(tree: Path) -> None:
    with pytest.raises(CompareError, match="no-such-commit"):
        compare(tree, "no-such-commit", 1, [])


def test_a_ratio_is_taken_within_a_round() -> None:
    # The machine became slower, and this tree stayed the same against the base.
    ours = [
        {"drain": Figures(100.0, 10.0, 5.0)},
        {"drain": Figures(50.0, 5.0, 5.5)},
        {"drain": Figures(40.0, 4.0, 5.0)},
    ]
    base = [
        {"drain": Figures(100.0, 10.0, 5.0)},
        {"drain": Figures(40.0, 5.0, 5.0)},
        {"drain": Figures(40.0, 4.0, 5.0)},
    ]
    row = table(ours, base).splitlines()[1]
    assert row.split() == ["drain", "1.000", "1.000", "1.250", "1.000", "1.000", "1.100", "1.000"]


def test_a_row_that_the_base_does_not_have_is_named() -> None:
    assert "not in the base" in table([{"new": Figures(1.0, 1.0)}], [{}])


class TestDriven:
    """Rows for which this tree starts the relays of both trees."""

    def test_the_ratio_of_each_figure_is_taken_within_a_round(self) -> None:
        # The machine became slower: the medians differ more than the rounds do.
        ours = {"everyday": [{"p50 ms": 4.0, "relay CPU us/event": 100.0}, {"p50 ms": 9.0, "relay CPU us/event": 90.0}]}
        base = {
            "everyday": [{"p50 ms": 8.0, "relay CPU us/event": 100.0}, {"p50 ms": 12.0, "relay CPU us/event": 60.0}]
        }
        first, second = driven_table(ours, base).splitlines()[1:]
        assert first.split() == ["everyday", "p50", "ms", "10.0", "6.5", "0.625", "0.500", "0.750"]
        assert second.split()[-5:] == ["80.0", "95.0", "1.250", "1.000", "1.500"]

    def test_a_base_that_spent_nothing_has_no_ratio(self) -> None:
        line = driven_table({"a": [{"server CPU %": 0.5}]}, {"a": [{"server CPU %": -0.1}]}).splitlines()[1]
        assert line.split() == ["a", "server", "CPU", "%", "-0.1", "0.5"]

    def test_the_trees_take_turns_on_each_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[tuple[str, str]] = []

        def row(name: str) -> Callable[[Bed, Tree, Scale], dict[str, float]]:
            def measure(_bed: Bed, tree: Tree, _scale: Scale) -> dict[str, float]:
                order.append((name, tree.name))
                return {"p50 ms": float(len(order))}

            return measure

        monkeypatch.setattr(comparing, "DRIVEN", {name: row(name) for name in ("one", "two")})
        trees = Tree("ours", tmp_path), Tree("base", tmp_path)
        ours, base = driven(Bed.__new__(Bed), trees, ["one", "two"], 2, Scale())
        assert order == [(name, side) for name in ("one", "two") for side in ("ours", "base", "base", "ours")]
        assert ours["two"] == [{"p50 ms": 5.0}, {"p50 ms": 8.0}]
        assert base["two"] == [{"p50 ms": 6.0}, {"p50 ms": 7.0}]


class TestTree:
    def test_its_commands_run_its_own_code_with_the_settings_of_the_caller(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PILLARBOX_PREFIX", "of somebody else")
        (tree / "src" / "pillarbox" / "__main__.py").write_text(
            "import os, pathlib, sys, pillarbox\n"
            "names = sorted(name for name in os.environ if name.startswith('PILLARBOX_'))\n"
            "pathlib.Path('seen').write_text(repr((sys.argv[1:], pillarbox.SPEED, names)))\n"
        )
        Tree(root=tree).check()
        Tree(root=tree).init("sqlite:///a.db", tmp_path)
        assert (tmp_path / "seen").read_text() == "(['init'], 1500, ['PILLARBOX_STORE'])"

    def test_a_folder_without_code_is_refused(self, tree: Path) -> None:
        git(tree, "rm", "--quiet", "-r", "src")
        with pytest.raises(TreeError, match="the base would import"):
            Tree("the base", tree).check()

    def test_a_relay_that_ends_by_itself_is_reported_with_its_log(self, tree: Path, tmp_path: Path) -> None:
        (tree / "src" / "pillarbox" / "__main__.py").write_text("raise SystemExit('no such option')")
        broken = Tree("the base", tree)
        with (
            pytest.raises(TreeError, match=r"the relay of the base ended with exit code 1:\nno such option"),
            broken.relay("sqlite:///a.db", "stdout:", tmp_path) as relay,
        ):
            # psutil's own wait would take the exit code away.
            wait_until(
                lambda: psutil.Process(relay).status() == psutil.STATUS_ZOMBIE, seconds=60, what="the relay to end"
            )
