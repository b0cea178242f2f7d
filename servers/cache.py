"""The folder outside the checkout that keeps jars, class archives and initialised data folders."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import MissingError


def cache_folder() -> Path:
    """`$PILLARBOX_CACHE`, else `pillarbox` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    if own := os.environ.get("PILLARBOX_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "pillarbox"


def cached(key: str, build: Callable[[Path], None], announce: str | None = None) -> Path:
    """The cache's folder `key`, built once by `build(folder)`, also when several processes ask at once.

    `build` fills a neighbouring folder that gets its name only when complete, so an interrupted build
    leaves nothing that looks finished. The key carries every version that the content depends on.
    """
    entry = cache_folder() / key
    if entry.is_dir():
        return entry
    with _locked(key):
        if entry.is_dir():
            return entry
        if announce:
            print(f"pillarbox: {announce} ...", file=sys.stderr, flush=True)
        partial = entry.with_name(f".partial-{key}")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            partial.rename(entry)
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return entry


def copy(template: Path, target: Path) -> None:
    # cp shares the blocks where the file system can, and keeps holes as holes.
    subprocess.run(["cp", "-a", "--reflink=auto", f"{template}/.", str(target)], check=True)


@contextmanager
def _locked(key: str) -> Iterator[None]:
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = (cache_folder() / f".lock-{key}").open("w")
    except OSError as error:
        raise _unwritable(error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(error: OSError) -> MissingError:
    return MissingError(
        f"the cache folder {cache_folder()} cannot be written ({error.strerror or error}); "
        "make it writable or name another one with PILLARBOX_CACHE=/some/folder"
    )
