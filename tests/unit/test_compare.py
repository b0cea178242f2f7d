"""The comparison of two trees: which code each side runs, the ratios, and what is left behind."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.compare import CompareError, Figures, compare, table

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
    drain, add = compare(tree, "HEAD~1", 2, ["--only", "drain", "add"]).splitlines()[1:]
    assert drain.split() == ["drain", "1.500", "1.500", "1.500", "1.000", "1.000", "1.000", "1.000"]
    assert add.split() == ["add", "1.500", "1.500", "1.500", "1.000"]
    sides = [line.split(":")[0].strip() for line in capfd.readouterr().err.splitlines()[1:]]
    assert sides == ["this tree", "the base", "the base", "this tree"]


def test_the_worktree_is_removed(tree: Path) -> None:
    compare(tree, "HEAD~1", 1, ["--only", "drain", "add"])
    with pytest.raises(CompareError, match=r"(?s)of this tree failed; its last lines:.*AssertionError"):
        compare(tree, "HEAD~1", 1, ["--only", "unknown"])
    assert len(git(tree, "worktree", "list").splitlines()) == 1


def test_a_tree_that_would_import_other_code_is_refused(tree: Path) -> None:
    git(tree, "rm", "--quiet", "-r", "src")
    with pytest.raises(CompareError, match="this tree would import"):
        compare(tree, "HEAD", 1, [])


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
