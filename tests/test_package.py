"""The wheel and the sdist are built, install in an empty environment, and bring the command."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_installs_in_an_empty_environment(dist: Path, tmp_path: Path, kind: str) -> None:
    # With this environment's pip: to install another one takes longer than all the rest.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (file,) = dist.glob(kind)
    # The sdist builds with this environment's own back end: the test needs no network.
    search = next(path for path in sys.path if path.endswith("site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", file]
    subprocess.run([str(part) for part in install], check=True, env={"PYTHONPATH": search, "PATH": "/usr/bin:/bin"})
    ran = subprocess.run([python.parent / "pillarbox", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("pillarbox 0.")
    relay = "pillarbox.Relay('memory:', [pillarbox.Stream('a', to='stdout:')])"
    works = f"import pillarbox, asyncio; asyncio.run({relay}.store.migrate())"
    subprocess.run([python, "-c", works], check=True, cwd=tmp_path)


def test_contents(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "pillarbox/py.typed" in names
    assert "pillarbox/sql/migrations/postgres/0001_outbox.sql" in names
    assert not [name for name in names if name.startswith("tests")]
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())


def test_lock_holds_no_addresses() -> None:
    lock = (ROOT / "requirements" / "dev.txt").read_text()
    assert "--hash=sha256:" in lock
    assert "://" not in lock


def test_the_files_that_come_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
