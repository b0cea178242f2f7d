"""Projects that are built in an empty folder by following a page, and the types of the pages that users copy from.

The rule: on such a page each Python block begins with the name of its file, and the commands of its console blocks run
in a shell, in the order of the page. A line that installs packages is left out.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_code_blocks import BLOCK, NEEDS, PROJECTS, ROOT, new_database_on_postgres, python

FILE = re.compile(r"# (\S+\.py)\n")
# They show the shortest form: functions without types, or `async with` at the top level, which mypy does not read.
UNTYPED = {
    *("aggregates", "consumer", "mongodb", "nats", "own-headers", "projections", "psycopg", "reconcile", "redis"),
    "tutorial-service",
    *("user-cards-postgresql", "writing-a-driver", "writing-a-publisher", "writing-a-store", "writing-events"),
}
TYPED = [page for page in NEEDS if page.stem not in UNTYPED]


def files(page: Path) -> dict[str, str]:
    """The files of a page."""
    found: dict[str, str] = {}
    for block in python(page):
        text = block.lstrip("\n")
        named = FILE.match(text)
        assert named, f"{page.name}: a block names no file: {text[:60]}"
        name = named[1]
        while name in found:  # the page has another form of it
            name = f"{Path(name).with_suffix('')}_.py"
        found[name] = text
    return found


def build(page: Path, folder: Path, adapted: Callable[[str], str] = str) -> None:
    there = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "PYTEST_"))}
    there["PATH"] = f"{Path(sys.executable).parent}:{there['PATH']}"
    for kind, text in BLOCK.findall(adapted(page.read_text())):
        if kind == "python":
            named = FILE.match(text)
            assert named, f"{page.name}: the block does not begin with the name of its file:\n{text[:200]}"
            (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / named[1]).write_text(text)
        elif kind == "console":
            for line in text.splitlines():
                # A user runs tests more than once, on the same database.
                for _ in range(2 if "pytest" in line else 1):
                    if not line.startswith("$ pip install"):
                        ended = subprocess.run(
                            line.removeprefix("$ "), shell=True, cwd=folder, env=there, capture_output=True, text=True
                        )
                        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"


@pytest.mark.parametrize("page", PROJECTS, ids=lambda page: page.stem)
def test_the_page_builds_a_project(page: Path, tmp_path: Path) -> None:
    build(page, tmp_path)


class TestOnServers:
    @pytest.mark.long
    @pytest.mark.parametrize("name", ["alembic", "fastapi-sqlalchemy"])
    def test_with_the_urls_of_postgresql(self, name: str, tmp_path: Path, postgres: Any) -> None:
        rest = new_database_on_postgres(postgres.url).removeprefix("postgresql")
        urls = {"sqlite+aiosqlite:": f"postgresql+asyncpg{rest}", "sqlite:": f"postgresql+psycopg{rest}"}

        def adapted(text: str) -> str:
            for scheme, url in urls.items():
                text = text.replace(f"{scheme}///shop.db", url)
            return text

        build(ROOT / "docs" / "howto" / f"{name}.md", tmp_path, adapted)


def types(folder: Path) -> str:
    """What mypy finds wrong."""
    command = [sys.executable, "-m", "mypy", "--strict", "--disable-error-code=top-level-await"]
    command += [f"--cache-dir={folder.parent}/cache", "--explicit-package-bases", "."]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return ended.stdout if ended.returncode else ""


@pytest.mark.timeout(240)
def test_mypy_accepts_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for page in TYPED:
        # One run for all. The prefix keeps a page from hiding the module that it is about.
        (tmp_path / "pages").mkdir(exist_ok=True)
        text = "".join(block.lstrip("\n") for block in python(page))
        (tmp_path / "pages" / f"page_{page.stem.replace('-', '_')}.py").write_text(text)
    for page in PROJECTS:
        for file, text in files(page).items():
            (tmp_path / page.stem / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / page.stem / file).write_text(text)
    assert len(TYPED) > 15
    wrong = [types(tmp_path / folder) for folder in ("pages", *(page.stem for page in PROJECTS))]
    assert not any(wrong), "\n".join(wrong)
