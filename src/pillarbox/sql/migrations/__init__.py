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


def script(steps: Sequence[Migration], meta: str, shards: int | None) -> list[str]:
    """The statements of these steps, and those that note what they made. shards: of a new outbox."""
    lines = [statement.strip() for step in steps for statement in step.statements]
    notes = {"schema_version": steps[-1].number} if steps else {}
    if shards is not None:
        notes["shards"] = shards
    for name, value in notes.items():
        lines.append(f"DELETE FROM {meta} WHERE name = '{name}'")
        lines.append(f"INSERT INTO {meta} (name, value) VALUES ('{name}', '{value}')")
    return lines
