"""Random hostile input: an event comes back as it was or is refused, and a command never ends in a traceback."""

import asyncio
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pillarbox import Event, Outbox, Relay
from pillarbox.cli import main, secrets
from pillarbox.cli.settings import SETTINGS, is_text
from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.stores.sqlite import SqliteStore
from pillarbox.urls import publisher_from_url, store_from_url
from tests.unit.test_outbox import Far, Hostile

texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=5),
    st.sampled_from(
        ["", "\0", "a\0b", "\ud800", "x" * 300, "'; DROP TABLE outbox_event; --", "{key}", ":id", "%s", "$1"]
    ),
)
instants = st.one_of(
    st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=14)), timezone(-timedelta(hours=12))])),
    st.datetimes(),
    st.sampled_from([datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]),
    st.builds(datetime, st.just(2026), st.just(1), st.just(1), tzinfo=st.builds(Far)),
)
scalars = st.one_of(
    texts,
    instants,
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.builds(lambda: 10**5000),
    st.floats(),
    st.booleans(),
    st.none(),
    st.binary(max_size=20),
    st.uuids(),
    st.decimals(),
    st.builds(Hostile),
    st.sampled_from([Decimal("NaN"), Decimal("Infinity"), object(), int, {"$ne": None}, {1}, {"a", 1}]),
)
names_of_fields = st.one_of(texts, st.integers(), st.floats(), st.booleans(), st.none(), st.uuids(), st.binary())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names_of_fields, inner, max_size=3),
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "key": scalars,
        "topic": texts | scalars,
        "stream": texts | scalars,
        "tenant": texts | scalars,
        "id": st.uuids() | scalars,
        "aggregate_type": texts | scalars,
        "aggregate_id": texts | scalars,
        "aggregate_version": st.integers() | scalars,
        "routing_key": texts | scalars,
        "content_type": texts | scalars,
        "headers": st.dictionaries(texts, texts, max_size=3) | values,
        "schema_id": texts | scalars,
        "schema_version": texts | scalars,
        "occurred_at": instants | scalars,
        "available_at": instants | scalars,
        "max_attempts": st.integers(-5, 2**33) | scalars,
    },
)


async def _migrate(file: str) -> None:
    store = SqliteStore(file)
    await store.migrate()
    await store.close()


async def _find(file: str, id: UUID) -> Event:
    store = SqliteStore(file)
    await store.open()
    try:
        ((event, *_),) = await store.find_by_id(id)
        return event
    finally:
        await store.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with an outbox."""
    path = str(tmp_path_factory.mktemp("hostile") / "shop.db")
    asyncio.run(_migrate(path))
    return path


def _kept(event: Event) -> Event:
    """As a store keeps it: its own seq, and instants in milliseconds."""
    instants = {
        name: instant.replace(microsecond=instant.microsecond // 1000 * 1000)
        for name in ("occurred_at", "available_at", "created_at")
        if (instant := getattr(event, name)) is not None
    }
    return Event(*event)._replace(seq=0, **instants)


@settings(max_examples=100, deadline=None)
@given(type=texts | scalars, payload=values, given_fields=fields)
def test_an_event_comes_back_as_it_was_or_is_refused(
    file: str, type: Any, payload: Any, given_fields: dict[str, Any]
) -> None:
    with closing(sqlite3.connect(file)) as connection:
        try:
            event = Outbox().add(connection, type, payload, **given_fields)
        except PillarboxError:
            return
        connection.commit()
    found = _kept(asyncio.run(_find(file, event.id)))
    # The database says when it was written, and so when it occurred, unless that is given.
    by_the_database: dict[str, Any] = {"created_at": found.created_at}
    if given_fields.get("occurred_at") is None:
        by_the_database["occurred_at"] = found.occurred_at
    assert found == _kept(event)._replace(**by_the_database)
    with closing(sqlite3.connect(file)) as connection:
        assert Outbox().exists(connection, event.id, event.stream)


def _is_argument(text: str) -> bool:
    return "\0" not in text and is_text(text)


URLS = (
    *("", "--", "x", "://", "[", "kafka://[::1", "kafka://", "kafka://h:x", "kafka://u:hunter22/@h?topic=a"),
    *(
        "kafka://h?stuck=soon",
        "kafka://h?topic",
        "kafka://h:99999999",
        "stdout:",
        "stdout:?x=1",
        "file://",
        "file:///a\0b",
    ),
    *(
        "postgresql://h:port/x",
        "postgresql://h:99999/x",
        "mysql://h:port/x",
        "mysql://h",
        "mongodb://h:port",
        "mongodb://h",
    ),
    *("sqlite:", "sqlite:///", "sqlite:///a\0b", "os:path", "os:getcwd", "os", ":", "a..b:c", "memory:"),
)
words = st.one_of(
    # A shell can pass on any bytes.
    st.binary(max_size=10).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
    texts.filter(_is_argument),
    st.sampled_from(
        ("--", "-", "-1", "0", "9" * 5000, "1e400", "nan", "inf", "15s", "15 s", "7d", "true", "{}", "[" * 5000)
    ),
    st.sampled_from(URLS),
    st.integers().map(str),
    st.floats().map(str),
)
COMMANDS = (
    ["relay"],
    ["status"],
    ["prune"],
    ["rescue"],
    ["audit"],
    ["init", "--print"],
    ["streams", "list"],
    ["streams", "pause"],
    ["events", "list"],
    ["events", "show"],
    ["events", "add"],
    ["dead", "list"],
    ["dead", "replay"],
    ["completion"],
)
FLAGS = (
    *(setting.flag for setting in SETTINGS.values() if setting.name != "store"),
    *("--json", "--limit", "--since", "--until", "--id", "--header", "--available-at", "--fail-if-older", "--dry-run"),
    *("--all", "--key", "--type", "--payload", "--max-attempts", "--nonsense"),
)
options = st.lists(
    st.one_of(
        words.map(lambda word: [word]),
        st.tuples(st.sampled_from(FLAGS), words).map(list),
        st.tuples(st.sampled_from(FLAGS), words).map(lambda pair: ["=".join(pair)]),
    ),
    max_size=3,
).map(lambda found: [word for each in found for word in each])


@pytest.fixture(scope="module")
def folder(file: str) -> Iterator[Path]:
    """The working directory of commands; a relay that could be made ends at once."""

    async def nothing(_relay: Relay) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(file).parent)
        patch.setenv("PILLARBOX_STORE", f"sqlite:///{file}")
        patch.setattr(Relay, "run", nothing)
        patch.setattr(Relay, "start", nothing)
        patch.setattr(Relay, "drain", nothing)
        patch.setattr(Relay, "stop", nothing)
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        yield Path(file).parent


def run(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it said."""
    secrets._known.clear()
    errors = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with redirect_stderr(errors), redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(str(ended.code or 0))
    errors.seek(0)
    return code, errors.read()


def test_the_password_of_a_url_in_a_wrong_place_is_not_shown(folder: Path) -> None:
    for words in (
        ["status", "kafka://u:hunter22@h"],
        ["postgresql://u:hunter22/@h"],
        ["streams", "pause", "x://u:hunter22@h"],
    ):
        code, said = run(words)
        check(code, said)
        assert "://***@h" in said


@pytest.mark.parametrize("flag", ["--stream=--", "--key=--", "--limit=--", "--since=--", "--json=--"])
def test_two_dashes_are_a_value(folder: Path, flag: str) -> None:
    code, said = run(["events", "list", flag])
    check(code, said)
    assert (code == 0) == (flag in ("--stream=--", "--key=--"))


def test_two_dashes_are_an_argument_after_two_dashes(folder: Path) -> None:
    assert run(["events", "add", "order.created", "--content-type=text/plain", "--", "--"]) == (0, "")
    assert run(["events", "add", "--", "--", "{}"]) == (0, "")


def check(code: int, said: str) -> None:
    # 1: a prefix that names an outbox without tables.
    assert code in (0, 2, 3) or "has no tables yet" in said, said
    assert "Traceback" not in said
    assert "hunter22" not in said


@settings(max_examples=80, deadline=None)
@given(command=st.sampled_from(COMMANDS), rest=options)
@example(["events", "add"], ["", "--", "--"])
@example(["relay"], ["--", "--"])
@example(["dead", "replay"], ["--", "--"])
def test_a_command_line_never_ends_in_a_traceback(folder: Path, command: list[str], rest: list[str]) -> None:
    check(*run([*command, *rest]))


@pytest.mark.parametrize("store", URLS)
def test_a_store_that_is_none_is_refused(folder: Path, store: str) -> None:
    code, said = run(["relay", f"--store={store}", "--to=stdout:"])
    check(code, said)
    assert (code == 0) == (store == "memory:")


names = st.sampled_from((*SETTINGS, "streams", "nonsense")) | texts
plain = st.one_of(words, st.integers(-(2**70), 2**70), st.floats(), st.booleans())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else str(value).lower()


documents = st.dictionaries(
    names, st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3))
)


@settings(max_examples=50, deadline=None)
@given(document=st.one_of(documents, documents.map(lambda found: {"streams": {"a": found}})))
@example({"streams": {"a\0b": {"to": "stdout:"}}})
@example({"streams": {"a": {"to": "kafka://u:hunter22/@h?topic=a"}}})
def test_a_file_of_settings_never_ends_in_a_traceback(folder: Path, document: dict[str, Any]) -> None:
    text = "\n".join(f"{json.dumps(name)} = {_toml(value)}" for name, value in document.items())
    (folder / "hostile.toml").write_text(text, "utf-8", "surrogatepass")
    check(*run(["relay", "--config=hostile.toml"]))


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "a = " + "{a=" * 20_000, "a" + ".a" * 5000 + " = 1", "\0", "\ud800"]
)
def test_text_that_is_no_file_of_settings(folder: Path, text: str) -> None:
    (folder / "hostile.toml").write_text(text, "utf-8", "surrogatepass")
    code, said = run(["relay", "--config=hostile.toml"])
    check(code, said)
    assert code == 2


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_taken_or_refused(url: str) -> None:
    for make in (store_from_url, publisher_from_url):
        said = ""
        try:
            make(url)
        except ConfigError as refused:
            said = str(refused)
        assert "hunter22" not in said
