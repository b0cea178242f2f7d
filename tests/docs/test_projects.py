"""Projects that are built in an empty folder by following a page, and the types of the pages that users copy from.

The rule: on such a page each Python block begins with the name of its file, and the commands of its console blocks run
in a shell, in the order of the page. A line that installs packages is left out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import BLOCK, PROJECTS, ROOT, python

FILE = re.compile(r"# (\S+\.py)\n")
COPIED = [
    ROOT / "docs" / "testing.md",
    *(ROOT / "docs" / "howto" / f"{name}.md" for name in ("task-queues", "idempotency", "handlers", "inbox")),
    *PROJECTS,
]


def files(page: Path) -> dict[str, str]:
    """The files of a page; one without names is one file."""
    found: dict[str, str] = {}
    for block in python(page):
        text = block.lstrip("\n")
        named = FILE.match(text)
        if named is None:
            found["page.py"] = found.get("page.py", "") + text
            continue
        name = named[1]
        while name in found:  # the page has another form of it
            name = f"{Path(name).with_suffix('')}_.py"
        found[name] = text
    return found


@pytest.mark.parametrize("page", PROJECTS, ids=lambda page: page.stem)
def test_the_page_builds_a_project(page: Path, tmp_path: Path) -> None:
    there = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "PYTEST_"))}
    there["PATH"] = f"{Path(sys.executable).parent}:{there['PATH']}"
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            named = FILE.match(text)
            assert named, f"{page.name}: the block does not begin with the name of its file:\n{text[:200]}"
            (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / named[1]).write_text(text)
        elif kind == "console":
            for line in text.splitlines():
                if not line.startswith("$ pip install"):
                    ended = subprocess.run(
                        line.removeprefix("$ "), shell=True, cwd=tmp_path, env=there, capture_output=True, text=True
                    )
                    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"


def test_mypy_accepts_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    wrong = {}
    for page in COPIED:
        folder = tmp_path / page.stem
        for file, text in files(page).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--disable-error-code=top-level-await"]
        command += [f"--cache-dir={tmp_path}/cache", "--explicit-package-bases", "."]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if ended.returncode:
            wrong[page.name] = ended.stdout
    assert not wrong, "\n".join(wrong.values())
