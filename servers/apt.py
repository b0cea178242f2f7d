"""Debian packages: the sentence for a missing one, and an install that starts no services."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

# Debian's ways to say what a package may not do while it is installed.
REFUSALS = {
    Path("/usr/sbin/policy-rc.d"): "#!/bin/sh\nexit 101\n",
    Path("/etc/postgresql-common/createcluster.d/pillarbox.conf"): "create_main_cluster = false\n",
}

# Programs of packages that are no servers to the tests: promtool tests the alert rules.
TOOLS = {"promtool": "prometheus"}


def command(packages: Sequence[str]) -> str:
    return f"apt-get install -y --no-install-recommends {' '.join(packages)}"


def hint(packages: Sequence[str]) -> str:
    return f"install it with `sudo {command(packages)}`"


def install(groups: Iterable[Sequence[str]]) -> list[str]:
    """Install each group of packages as root. Return a sentence for each failure.

    One group does not stop the others: not every release of Debian and Ubuntu has every package.
    """
    wanted = list(dict.fromkeys(map(tuple, groups)))
    packages = [package for group in wanted for package in group]
    if shutil.which("apt-get") is None:
        return [f"there is no apt-get here; install {', '.join(packages)} with this system's own package manager"]
    if os.geteuid() != 0:
        return [f"installing {', '.join(packages)} needs root; run `sudo {command(packages)}`"]
    print(f"pillarbox: installing {' '.join(packages)} ...", file=sys.stderr, flush=True)
    with _services_stay_off():
        failures = [_run(line) for line in ("apt-get update", *map(command, wanted))]
    return [failure for failure in failures if failure]


def _run(line: str) -> str | None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(line.split(), env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    said = [each for each in done.stderr.splitlines() if each.startswith("E:")] or ["no reason given"]
    return f"`{line}` failed ({said[0]}); check the network and the package sources, then try again"


@contextmanager
def _services_stay_off() -> Iterator[None]:
    # The packages would start their own services on the standard ports, PostgreSQL's also at the next boot.
    with ExitStack() as stack:
        for file, text in REFUSALS.items():
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(file.unlink)
                file.write_text(text)
                file.chmod(0o755)
        yield
