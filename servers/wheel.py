"""Server programs that come inside Python packages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from .errors import MissingError


def program(distribution: str, path_end: str) -> Path:
    """The program whose path in the installed `distribution` ends with `path_end`."""
    try:
        files = importlib.metadata.files(distribution) or []
        return next(Path(str(f.locate())).resolve() for f in files if str(f).endswith(path_end))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise MissingError(
            f"the Python package {distribution} is not installed or not made for this machine; "
            "run `make env`, which installs the dependency group 'servers'"
        ) from None


def missing(distribution: str, path_end: str) -> str | None:
    try:
        program(distribution, path_end)
    except MissingError as error:
        return str(error)
    return None
