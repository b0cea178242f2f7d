"""The named SQL texts: read as they stand, complete, all of them used, and in the order in which rows are read."""

import re
from pathlib import Path

import pytest

import pillarbox.sql.migrations
import pillarbox.stores
from pillarbox.event import Event
from pillarbox.names import Names
from pillarbox.sql.columns import COLUMNS
from pillarbox.sql.rows import FIELDS
from pillarbox.sql.statements import Marks, SqlText, Statements, named_texts

STORES = Path(pillarbox.stores.__file__).parent
DATABASES = ("postgres", "mysql", "sqlite")
READS = ("read", "read_joint", "read_key", "claim", "claim_suspect", "claimed", "find_events", "find_dead_letters")
# A re-entry sets or clears these; the database makes seq and the generated columns.
NOT_CARRIED = {
    "seq",
    "shard",
    "held_hash",
    "next_attempt_at",
    "published_at",
    "processing_started_at",
    "lease_until",
    "lease_owner",
    "suspect",
    "lease_token",
}


def texts(database: str) -> dict[str, str]:
    return {**named_texts("pillarbox.stores.sql"), **named_texts(f"pillarbox.stores.{database}")}


def columns(text: str) -> list[str]:
    """The names of the columns that a statement answers with, or inserts."""
    _, _, listed = re.search(r"(SELECT|RETURNING|INTO \{\w+\} \()()(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    found, depth, word = [], 0, ""
    for letter in re.split(r"\bFROM \{|\)\s+SELECT|\)\s+VALUES", listed)[0] + ",":
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append(word.split()[-1].split(".")[-1].strip("`"))
            word = ""
        else:
            word += letter
    return found


@pytest.mark.parametrize("database", DATABASES)
def test_a_row_has_the_fields_of_an_event_in_their_order(database: str) -> None:
    found = texts(database)
    reads = [name for name in READS if name in found and (name != "claim" or "RETURNING" in found[name])]
    assert len(reads) >= 5
    for name in reads:
        text = found[name].partition("RETURNING")[2] or found[name].partition("LATERAL (")[2] or found[name]
        listed = columns(f"RETURNING {text}" if "RETURNING" in found[name] else text)
        assert tuple(listed[: len(FIELDS)]) == FIELDS, name
    assert (*Event._fields[: len(FIELDS) - 1], "available_at") == FIELDS


@pytest.mark.parametrize("database", DATABASES)
def test_add_fills_the_columns_that_a_driver_fills(database: str) -> None:
    statement = SqlText(texts(database)["add"], ":", {"event": "e"})
    assert columns(texts(database)["add"]) == list(statement.names) == list(COLUMNS)


@pytest.mark.parametrize("database", ["mysql", "sqlite"])
def test_a_re_entry_carries_every_column(database: str) -> None:
    folder = Path(pillarbox.sql.migrations.__file__).parent / database
    table = re.search(r"CREATE TABLE [A-Z ]*\{event\} \((.*?)\n\)", (folder / "0001_outbox.sql").read_text(), re.DOTALL)
    assert table
    made = {line.split()[0].strip("`") for line in table[1].split("\n") if re.match(r"    `?[a-z_]+`? [a-z]", line)}
    assert set(columns(texts(database)["reenter"])) == made - NOT_CARRIED


@pytest.mark.parametrize("database", DATABASES)
def test_every_statement_is_used_and_every_one_that_is_used_exists(database: str) -> None:
    own, shared = (
        "\n".join(path.read_text() for path in (STORES / folder).glob("*.py")) for folder in (database, "sql")
    )
    named = re.compile(r'(?:sql\[|texts\[|_find\(|if \w+ is None else |if [\w.]+ else )\s*"(\w+)"|"(\w+)" if ')
    used = {name for pair in named.findall(own + shared) for name in pair if name}
    # PostgreSQL claims and prunes in its own way.
    elsewhere = {"ready", "suspects", "claimed"} if database == "postgres" else set()
    assert named_texts(f"pillarbox.stores.{database}").keys() <= used
    assert {name for name in used if f'["{name}"]' in own + shared} - elsewhere <= texts(database).keys()


@pytest.mark.parametrize("database", DATABASES)
def test_nothing_but_names_of_tables_is_put_into_a_text(database: str) -> None:
    for name, text in texts(database).items():
        assert set(re.findall(r"\{([^}]*)\}", text)) <= Names().parts.keys(), name


@pytest.mark.parametrize(
    ("marks", "text", "names"),
    [
        ("$", "SELECT '10%', a::text FROM outbox_event WHERE a = $1 AND b = $2 AND c = $1", ("x", "y")),
        ("%s", "SELECT '10%%', a::text FROM outbox_event WHERE a = %s AND b = %s AND c = %s", ("x", "y", "x")),
        (":", "SELECT '10%', a::text FROM outbox_event WHERE a = :x AND b = :y AND c = :x", ("x", "y")),
    ],
)
def test_parameters_are_marked_as_the_driver_wants_them(marks: Marks, text: str, names: tuple[str, ...]) -> None:
    written = "SELECT '10%', a::text FROM {event}\n    WHERE a = :x AND b = :y AND c = :x"
    statement = SqlText(written, marks, {"event": "outbox_event"})
    assert (statement.text, statement.names) == (text, names)


def test_a_databases_own_text_goes_before_the_shared_one() -> None:
    both = Statements(["pillarbox.stores.sql", "pillarbox.stores.postgres"], "$", dict.fromkeys(Names().parts, "t"))
    assert both["reenter"].text.startswith("UPDATE")
    assert both["meta"].text == "SELECT name, value FROM t"
