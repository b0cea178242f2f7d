"""Migrations: numbered files for each database, each run once."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final, NamedTuple

# NO PAD: keys that differ in a trailing space are two keys.
COLLATIONS: Final = {"MySQL": "utf8mb4_0900_bin", "MariaDB": "utf8mb4_nopad_bin"}


class Migration(NamedTuple):
    """One file; its statements are separated by blank lines."""

    number: int
    name: str
    statements: Sequence[str]


def migrations(database: str, parts: Mapping[str, object]) -> Sequence[Migration]:
    """Every migration of a database, in order. ``parts`` are the values of its placeholders."""
    found = []
    for file in sorted((files(__package__) / database).iterdir(), key=lambda entry: entry.name):
        text = file.read_text("utf-8").format_map(parts)
        found.append(Migration(int(file.name[:4]), file.name, [part for part in text.split("\n\n") if part.strip()]))
    return found
