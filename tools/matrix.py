"""Run pytest on every installed Python, or with the lowest allowed versions of the dependencies.

matrix.py [3.12 ...] -- ARGUMENTS   locked versions; each Python from 3.11 on that this machine has, or the named ones
matrix.py --lowest -- ARGUMENTS     the lowest versions that pyproject.toml allows; the oldest Python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).parent / "uv"
OLDEST = "3.11"
LOCK = ROOT / "requirements" / "dev.txt"
LOWEST = ROOT / "build" / "lowest.txt"


class Failed(Exception):
    """A step failed; the text says what to do."""


def installed() -> dict[str, tuple[str, str]]:
    """The newest interpreter of each minor version: {"3.12": ("3.12.1", path)}, oldest first."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [os.environ["PATH"], *map(str, sorted(pyenv.glob("versions/3.*/bin")))]
    command = [str(UV), "python", "list", "--only-installed", "--output-format=json", f">={OLDEST}"]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    listed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, tuple[str, str]] = {}
    for each in json.loads(listed):
        if each["implementation"] == "cpython" and each["variant"] == "default":
            parts = each["version_parts"]
            found.setdefault(f"{parts['major']}.{parts['minor']}", (each["version"], each["path"]))
    return dict(reversed(found.items()))


def environment(name: str, python: str, requirements: Path) -> Path:
    """An environment under build/ with these requirements and this checkout; quick when it is there."""
    folder = ROOT / "build" / "matrix" / name
    if not (folder / "bin" / "python").exists():
        _uv("venv", "--clear", f"--python={python}", str(folder))
    into = f"--python={folder}/bin/python"
    _uv("pip", "sync", into, str(requirements))
    _uv("pip", "install", into, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    return folder / "bin" / "python"


def write_lowest() -> None:
    """Resolve the lowest version of everything that pyproject.toml names, into build/lowest.txt."""
    LOWEST.parent.mkdir(exist_ok=True)
    # An older file would count as a preference.
    LOWEST.unlink(missing_ok=True)
    wanted = ("--all-extras", "--group=dev", "pyproject.toml")
    form = ("--no-header", f"--output-file={LOWEST}")
    _uv("pip", "compile", "--resolution=lowest-direct", f"--python-version={OLDEST}", *wanted, *form)


def _uv(*arguments: str) -> None:
    command = [str(UV), "--quiet", "--no-python-downloads", *arguments]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise Failed(f"`uv {' '.join(arguments)}` failed; its own words are above")


def run_tests(python: Path, name: str, arguments: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests passed, and a line that says what ran."""
    begun = time.monotonic()
    command = [str(python), "-m", "pytest", *arguments]
    # A missing server then fails its tests. A run that quietly skipped Kafka would show little.
    environment = {**os.environ, "CI": "true"}
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    # The last line of an interrupted run names no failure, so the exit code decides.
    passed = tests.returncode == 0
    outcome = "passed" if passed else f"FAILED (pytest's exit code {tests.returncode})"
    return passed, f"{name:<16} {outcome}: {last}; {time.monotonic() - begun:.0f} s with everything"


def matrix(only: Sequence[str], arguments: Sequence[str]) -> bool:
    pythons = installed()
    names = ", ".join(version for version, _ in pythons.values())
    if len(pythons) < 2:
        raise Failed(
            f"found only Python {names or '(none)'}; install another version from {OLDEST} on, e.g. with pyenv"
        )
    if unknown := set(only) - pythons.keys():
        raise Failed(f"there is no Python {', '.join(sorted(unknown))} here; found: {names}")
    print(f"found Python {names}", flush=True)
    results = []
    for minor, (version, path) in pythons.items():
        if not only or minor in only:
            print(f"\nPython {version} ({path})", flush=True)
            results.append(run_tests(environment(version, path, LOCK), f"Python {version}", arguments))
    print("\n" + "\n".join(line for _, line in results))
    return all(passed for passed, _ in results)


def lowest(arguments: Sequence[str]) -> bool:
    version, path = installed().get(OLDEST, ("", ""))
    if not path:
        raise Failed(f"there is no Python {OLDEST} here; install it, e.g. with pyenv")
    write_lowest()
    print(f"Python {version} with the versions of {LOWEST.relative_to(ROOT)}", flush=True)
    passed, line = run_tests(environment("lowest", path, LOWEST), "lowest versions", arguments)
    print(f"\n{line}")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="version", help="for example 3.12")
    parser.add_argument("--lowest", action="store_true", help="the lowest allowed versions of the dependencies")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    try:
        passed = lowest(arguments) if options.lowest else matrix(options.only, arguments)
    except Failed as error:
        print(f"pillarbox: {error}", file=sys.stderr)
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
