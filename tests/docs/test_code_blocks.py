"""Every Python block in the README and the documentation runs, and every command that they show is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pillarbox.cli.settings import SETTINGS, Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> dict[str, str]:
    return {
        f"{page.relative_to(ROOT)}-{number}": text
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    }


PYTHON = blocks("python")
CONSOLE = blocks("console")
COMMANDS = [line for text in CONSOLE.values() for line in text.splitlines() if "make" in line]
SESSIONS = {name: text for name, text in CONSOLE.items() if "pillarbox" in text}
TOML = blocks("toml")


@pytest.mark.parametrize("code", PYTHON.values(), ids=PYTHON)
def test_python_block_runs(code: str, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_readme_example_delivers(tmp_path: Path) -> None:
    first = next(text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python")
    ended = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "mail about order 7\n"


def test_a_store_of_ones_own_is_tested_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "writing-a-store.md").read_text()
    code = next(text for kind, text in BLOCK.findall(page) if kind == "python")
    (tmp_path / "test_own.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "test_own.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_console_command_is_there(command: str) -> None:
    words = command.removeprefix("$ ").split()
    assert words[0] == "make", f"teach this test to run {words[0]!r}"
    asked = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_console_session_runs(session: str, tmp_path: Path) -> None:
    """In a shell, against an outbox on SQLite that is there already."""
    program = f"pillarbox() {{ '{sys.executable}' -m pillarbox \"$@\"; }}\nset -e\n"
    before = "export PILLARBOX_STORE=sqlite:///shop.db\npillarbox init\n"
    lines = "\n".join(line.removeprefix("$ ") for line in session.splitlines())
    others = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
    shell = ["sh", "-c", f"{program}{before}{lines}"]
    ended = subprocess.run(shell, cwd=tmp_path, env=others, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_settings_file_is_understood(text: str, tmp_path: Path) -> None:
    file = tmp_path / "pillarbox.toml"
    file.write_text(text)
    assert "default" in Settings({}, {}, str(file)).streams()


def test_every_setting_command_and_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    missing = [name for name in SETTINGS if f"`{name}`" not in page]
    told = subprocess.run([sys.executable, "-m", "pillarbox", "--help"], capture_output=True, text=True, check=True)
    missing += [name for name in re.findall(r"^    ([a-z]+)\b", told.stdout, re.MULTILINE) if f"`{name}" not in page]
    missing += [code for code in re.findall(r"^  (\d+)  ", told.stdout, re.MULTILINE) if f"| {code} |" not in page]
    assert not missing


def test_make_help_lists_every_target() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "check", "quick", "bench", "prove", "servers", "clean"):
        assert f"make {target} " in told


def test_unknown_target_is_one_sentence() -> None:
    ended = subprocess.run(["make", "tset"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "there is no target 'tset'" in ended.stderr
