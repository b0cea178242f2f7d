"""Every Python block in the README and the documentation runs, and every command that they show is there.

The rule: the Python blocks of a page run in order in one process, as if they were one file, and then each function that
is named ``test_...``. A block may await, as in ``python -m asyncio``. ``postgresql://localhost/shop``,
``mysql://localhost/shop``, also with a driver of SQLAlchemy's or as keyword arguments, and ``mongodb://localhost/shop``
stand for a new database on the real server, and ``nats://localhost`` and
``redis://localhost/0`` for the real server.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pymysql
import pytest

from pillarbox.cli import build
from pillarbox.cli.settings import SETTINGS, Settings
from tests.mongo_outbox import database_url

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
POSTGRES = re.compile(r"\bpostgresql(\+\w+)?://localhost/shop")
MYSQL = re.compile(r"\bmysql(\+\w+)?://localhost/shop")
MYSQL_ARGUMENTS = re.compile(r'host="localhost", user="shop", (db|database)="shop"')
MONGO = re.compile(r"\bmongodb://localhost/shop")
NATS = re.compile(r"\bnats://localhost")
REDIS = re.compile(r"\bredis://localhost/0")
RUN = """
import ast, asyncio, inspect, json, sys

def run(page, blocks):
    with asyncio.Runner() as runner:
        for block in blocks:
            code = compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, globals()))
            else:
                exec(code, globals())
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                awaited = test()
                if awaited is not None:
                    runner.run(awaited)

run(*json.load(sys.stdin))
"""

_numbers = itertools.count(1)


def blocks(language: str) -> dict[str, str]:
    return {
        f"{page.relative_to(ROOT)}-{number}": text
        for page in PAGES
        if page not in PROJECTS
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    }


def python(page: Path) -> list[str]:
    """Each block behind as many empty lines as the page has before it: a traceback then names the page's own line."""
    text = page.read_text()
    found = [match for match in BLOCK.finditer(text) if match[1] == "python"]
    return ["\n" * text.count("\n", 0, match.start(2)) + match[2] for match in found]


def needs(page: Path) -> frozenset[str]:
    """The servers that its Python names."""
    code = "".join(python(page))
    named = {"postgres": POSTGRES.search(code), "mongo": MONGO.search(code), "nats": NATS.search(code)}
    named["valkey"] = REDIS.search(code)
    named["mysql"] = MYSQL.search(code) or MYSQL_ARGUMENTS.search(code)
    return frozenset(name for name, found in named.items() if found)


def run(page: Path, folder: Path, code: Sequence[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=json.dumps([page.name, code]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


def new_database_on_postgres(url: str) -> str:
    name = f"docs_{os.getpid()}_{next(_numbers)}"

    async def create() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()

    asyncio.run(create())
    return url.rpartition("/")[0] + "/" + name


def new_database_on_mysql(url: str) -> str:
    name = f"docs_{os.getpid()}_{next(_numbers)}"
    parts = urlsplit(url)
    with pymysql.connect(host=parts.hostname, port=parts.port or 3306, user=parts.username) as connection:
        connection.cursor().execute(f"CREATE DATABASE {name}")
    return url.rpartition("/")[0] + "/" + name


def on_postgres(code: Sequence[str], url: str) -> list[str]:
    rest = new_database_on_postgres(url).removeprefix("postgresql")
    return [POSTGRES.sub(lambda match: f"postgresql{match[1] or ''}{rest}", each) for each in code]


def on_mysql(code: Sequence[str], url: str) -> list[str]:
    url = new_database_on_mysql(url)
    rest, parts = url.removeprefix("mysql"), urlsplit(url)
    where = f'host="{parts.hostname}", port={parts.port}, user="{parts.username}"'
    code = [MYSQL.sub(lambda match: f"mysql{match[1] or ''}{rest}", each) for each in code]
    return [MYSQL_ARGUMENTS.sub(lambda match: f'{where}, {match[1]}="{parts.path[1:]}"', each) for each in code]


def on_mongo(code: Sequence[str], url: str) -> list[str]:
    own = database_url(url, f"docs_{os.getpid()}_{next(_numbers)}")
    return [MONGO.sub(own, each) for each in code]


def on_nats(code: Sequence[str], url: str) -> list[str]:
    return [NATS.sub(url, each) for each in code]


def on_valkey(code: Sequence[str], url: str) -> list[str]:
    return [REDIS.sub(url, each) for each in code]


# The blocks of these pages are the files of a project: see test_django_page.py and test_projects.py.
DJANGO = ROOT / "docs" / "howto" / "django.md"
PROJECTS = [
    page for page in PAGES if page != DJANGO and any(re.match(r"\n*# \S+\.py\n", block) for block in python(page))
]
NEEDS = {page: needs(page) for page in PAGES if python(page) and page not in (*PROJECTS, DJANGO)}
CONSOLE = blocks("console")
COMMANDS = [line for text in CONSOLE.values() for line in text.splitlines() if "make" in line]
SESSIONS = {name: text for name, text in CONSOLE.items() if "pillarbox" in text}
TOML = blocks("toml")


ON: dict[str, Callable[[Sequence[str], str], list[str]]] = {
    "postgres": on_postgres,
    "mysql": on_mysql,
    "mariadb": on_mysql,
    "mongo": on_mongo,
    "nats": on_nats,
    "valkey": on_valkey,
}


def those_that(wanted: Callable[[frozenset[str]], bool]) -> pytest.MarkDecorator:
    chosen = [page for page, needed in NEEDS.items() if wanted(needed)]
    return pytest.mark.parametrize("page", chosen, ids=[str(page.relative_to(ROOT)) for page in chosen])


def run_on(page: Path, folder: Path, request: pytest.FixtureRequest, servers: frozenset[str]) -> None:
    code = python(page)
    for server in sorted(servers):
        code = ON[server](code, request.getfixturevalue(server).url)
    run(page, folder, code)


@those_that(lambda needed: not needed)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, python(page))


class TestOnServers:
    @those_that(lambda needed: bool(needed) and "mysql" not in needed)
    def test_page_runs(self, page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        run_on(page, tmp_path, request, NEEDS[page])

    @those_that(lambda needed: "mysql" in needed)
    @pytest.mark.parametrize("kind", ["mysql", "mariadb"])
    def test_page_runs_on_mysql(self, kind: str, page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        run_on(page, tmp_path, request, NEEDS[page] - {"mysql"} | {kind})


def test_readme_example_delivers(tmp_path: Path) -> None:
    first = next(text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python")
    ended = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "mail about order 7\n"


@pytest.mark.parametrize(
    ("page", "blocks"),
    [("writing-a-store.md", 1), ("writing-a-publisher.md", 4), ("writing-a-source.md", 2), ("writing-a-driver.md", 3)],
)
def test_an_adapter_of_ones_own_is_tested_as_the_page_says(page: str, blocks: int, tmp_path: Path) -> None:
    code = python(ROOT / "docs" / page)[:blocks]
    (tmp_path / "test_own.py").write_text("".join(code))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "test_own.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_console_command_is_there(command: str) -> None:
    words = shlex.split(command.removeprefix("$ "))
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


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The long options of all commands."""
    for action in parser._actions:
        yield from (each for each in action.option_strings if each.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    own = {*options(build())} - {setting.flag for setting in SETTINGS.values()}
    assert len(own) > 20
    assert [each for each in sorted(own) if not re.search(rf"{each}(?![\w-])", page)] == []


def test_make_help_lists_every_target() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "check", "quick", "bench", "prove", "servers", "clean"):
        assert f"make {target} " in told


def test_unknown_target_is_one_sentence() -> None:
    ended = subprocess.run(["make", "tset"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "there is no target 'tset'" in ended.stderr
