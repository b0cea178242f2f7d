"""Debian packages: what to say when one is missing, and how to install them without starting services."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import MissingError

POLICY = Path("/usr/sbin/policy-rc.d")


def command(packages: Sequence[str]) -> str:
    return f"apt-get install -y --no-install-recommends {' '.join(packages)}"


def hint(packages: Sequence[str]) -> str:
    return f"install it with `sudo {command(packages)}`"


def install(packages: Sequence[str]) -> None:
    """As root installs them; else raises with the command that does."""
    if shutil.which("apt-get") is None:
        raise MissingError(f"there is no apt-get here; install {', '.join(packages)} in this system's own way")
    if os.geteuid() != 0:
        raise MissingError(f"installing {', '.join(packages)} needs root; run `sudo {command(packages)}`")
    print(f"pillarbox: installing {' '.join(packages)} ...", file=sys.stderr, flush=True)
    with _services_stay_off():
        for line in ("apt-get update", command(packages)):
            _run(line)


def _run(line: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(line.split(), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [each for each in done.stderr.splitlines() if each.startswith("E:")] or ["no reason given"]
        raise MissingError(f"`{line}` failed ({said[0]}); check the network and the package sources, then try again")


@contextmanager
def _services_stay_off() -> Iterator[None]:
    # The packages would start their own services on the standard ports; this file is Debian's way to refuse.
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
