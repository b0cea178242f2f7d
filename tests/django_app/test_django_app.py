"""A Django project on each database, tested by Django's own runner in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment(url: str, folder: Path) -> dict[str, str]:
    test = {"NAME": str(folder / "test.sqlite3")} if url.startswith("sqlite:") else {"NAME": f"test_{os.getpid()}"}
    own = {"SHOP_URL": url, "SHOP_FOLDER": str(folder), "SHOP_TEST": json.dumps(test), "PYTHONPATH": str(ROOT)}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "DJANGO_"))}
    return {**others, **own, "DJANGO_SETTINGS_MODULE": "tests.django_app.settings"}


@pytest.mark.parametrize("database", ["sqlite", "postgres", "mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def test_the_project_passes_its_tests(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.sqlite3" if database == "sqlite" else request.getfixturevalue(database).url
    command = [sys.executable, "-W", "error", "-m", "django", "test", "--noinput", "tests.django_app.shop"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(url, tmp_path), capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    assert "Ran " in ended.stderr


def test_every_version_of_the_schema_is_a_migration_of_django() -> None:
    package = ROOT / "src" / "pillarbox"
    numbers = {
        folder.name: numbers_in(folder) for folder in (package / "sql" / "migrations").iterdir() if folder.is_dir()
    }
    ours = numbers_in(package / "django" / "migrations")
    assert ours
    assert {name: found for name, found in numbers.items() if found} == dict.fromkeys(
        ("mysql", "postgres", "sqlite"), ours
    )


def numbers_in(folder: Path) -> set[str]:
    return {file.name[:4] for file in folder.iterdir() if file.name[:4].isdecimal()}
