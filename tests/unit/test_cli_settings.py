"""Settings of the command line: where they come from, which counts, and what a mistake is told."""

import argparse
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pillarbox.cli import build, secrets
from pillarbox.cli.destinations import place
from pillarbox.cli.relay import configured
from pillarbox.cli.session import make_store
from pillarbox.cli.settings import RELAY, SETTINGS, STREAM, Settings
from pillarbox.errors import ConfigError
from pillarbox.operations import instant
from pillarbox.relay import Relay, Stream


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(secrets, "_known", set())
    return tmp_path


def settings(
    toml: str = "", *, config: str | None = None, variables: Mapping[str, str] | None = None, **flags: str
) -> Settings:
    if toml:
        Path("pillarbox.toml").write_text(toml)
    return Settings(flags, variables or {}, config)


def test_the_table_has_every_argument_of_a_stream_and_of_a_relay() -> None:
    of_streams = {name for name, each in SETTINGS.items() if each.scope == STREAM}
    # In code a header builder is an argument of the publisher.
    assert of_streams == inspect.signature(Stream).parameters.keys() - {"name"} | {"headers"}
    of_relays = {name for name, each in SETTINGS.items() if each.scope == RELAY}
    in_code = {"store", "streams", "checks", "observers", "logger"}  # objects, which no flag can name
    assert of_relays - {"stream", "processes"} == inspect.signature(Relay).parameters.keys() - in_code


def test_a_flag_counts_more_than_a_variable_and_that_more_than_the_file() -> None:
    variables = {"PILLARBOX_BATCH": "2", "PILLARBOX_SLOTS": "2"}
    found = settings("batch = 1\nslots = 1\nconcurrency = 1\n", variables=variables, batch="3")
    assert [found.get(name) for name in ("batch", "slots", "concurrency")] == [3, 2, 1]


def test_a_stream_has_its_own_and_what_all_have() -> None:
    toml = """
batch = 10
max_attempts = 3
[streams.mail]
to = "stdout:"
batch = 20
[streams.default]
to = "stdout:"
"""
    found = settings(toml, max_attempts="4").streams()
    assert found["mail"] == {"to": "stdout:", "batch": 20, "max_attempts": 4}
    assert found["default"] == {"to": "stdout:", "batch": 10, "max_attempts": 4}
    assert list(settings(stream="mail").streams()) == ["mail"]


def test_an_empty_variable_says_nothing() -> None:
    assert settings(variables={"PILLARBOX_STORE": ""}).get("store") is None


def test_what_others_put_into_the_environment_is_left_alone() -> None:
    settings(variables={"PILLARBOX_SERVICE_HOST": "10.0.0.1", "PILLARBOX_PORT": "tcp://10.0.0.1:80", "HOME": "/"})


@pytest.mark.parametrize(
    ("toml", "variables", "flags", "said"),
    [
        ("stroe = 'x'", {}, {}, "unknown setting 'stroe'; did you mean 'store'?"),
        ("[streams.a]\nbacth = 1", {}, {}, "unknown setting 'bacth'; did you mean 'batch'?"),
        ("[streams.a]\nprefix = 'x'", {}, {}, "unknown setting 'prefix'; move it to the top of the file"),
        ("[stream.a]\nto = 'x'", {}, {}, "'stream' in pillarbox.toml is a dict; use text"),
        ("streams = 5", {}, {}, "write [streams.NAME]"),
        ("[streams]\na = 5", {}, {}, "write [streams.a]"),
        ("batch = 'many'", {}, {}, "'batch' in pillarbox.toml is a str 'many'; use a whole number"),
        ("batch = true", {}, {}, "is a bool True; use a whole number"),
        ("wake_up = 1", {}, {}, "use true or false"),
        ("grace = -1", {}, {}, "'grace' in pillarbox.toml is -1; use 0 to"),
        ("grace = true", {}, {}, "'grace' in pillarbox.toml is True; use a duration such as"),
        ("grace = [1]", {}, {}, "'grace' in pillarbox.toml is of type list; use a duration such as"),
        ("[streams.a]\nlease = '15 s'", {}, {}, "'lease' of [streams.a] in pillarbox.toml is '15 s'; use a duration"),
        ("", {"PILLARBOX_LEASE": "15x"}, {}, "PILLARBOX_LEASE is '15x'; use a duration such as"),
        ("batch = ", {}, {}, "pillarbox.toml is not TOML: invalid value (at"),
        ("", {"PILLARBOX_STROE": "x"}, {}, "PILLARBOX_STROE; did you mean 'PILLARBOX_STORE'?"),
        ("", {"PILLARBOX_BATCH": "many"}, {}, "PILLARBOX_BATCH is 'many'; use a whole number"),
        ("", {"PILLARBOX_CONFIG": "gone.toml"}, {}, "PILLARBOX_CONFIG names gone.toml, which cannot be read"),
        ("", {}, {"log_level": "inof"}, "--log-level is 'inof'; did you mean 'info'?"),
        ("", {}, {"grace": "nan"}, "--grace is 'nan'; use a duration such as"),
    ],
)
def test_a_mistake_names_itself_and_the_remedy(
    toml: str, variables: dict[str, str], flags: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(toml, variables=variables, **flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_named_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match=r"--config names gone\.toml"):
        settings(config="gone.toml")


def test_two_destinations_for_one_stream_are_refused() -> None:
    toml = "[streams.default]\nto = 'stdout:'\n"
    assert settings(toml, to="stdout:").streams()["default"]["to"] == "stdout:"
    with pytest.raises(ConfigError, match=r"PILLARBOX_TO and \[streams.default\].*name different destinations"):
        settings(variables={"PILLARBOX_TO": "file:///x"}).streams()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "no destination is given"),
        ({"batch": "5"}, "stream 'default' has no destination"),
        ({"to": "stdout:"}, "no store is given"),
        ({"to": "stdout:", "store": "memory:", "schema": "x"}, "a memory store has no --schema"),
        ({"to": "stdout:", "store": "memory:", "retry": "fixd"}, "did you mean 'fixed'?"),
        ({"to": "stdout:", "store": "memory:", "batch": "0"}, "batch is 0; use 1 to 100000"),
    ],
)
def test_a_relay_that_cannot_be_made_says_what_is_missing(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(settings(**flags))
    assert said in str(caught.value)


def test_a_relay_is_made_of_all_sources() -> None:
    toml = """
store = 'memory:'
grace = '3s'
[streams.mail]
to = 'stdout:'
mode = 'queue'
retry = 'fixed:3s'
"""
    made = configured(settings(toml, name="relay"))
    assert made.name.startswith("relay-")
    assert made.store.description == "sqlite :memory:"


def test_instants_are_told_or_counted_from_now() -> None:
    told = instant("2030-01-31T12:00:00+02:00", "--since")
    assert told is not None
    assert told.isoformat() == "2030-01-31T10:00:00+00:00"
    back, ahead = instant("2h", "--since"), instant("2h", "--available-at", ahead=True)
    assert back is not None
    assert ahead is not None
    assert 14_390 < (ahead - back).total_seconds() < 14_410
    with pytest.raises(ConfigError, match="--since is 'yesterday'"):
        instant("yesterday", "--since")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter22@db/shop",
        "postgresql://db/shop?user=ann&password=hunter22",
        "kafka://ann:hunter22@broker?topic=x",
        "kafka://broker?sasl.password=hunter22",
    ],
)
def test_a_secret_is_masked_wherever_it_stands(url: str) -> None:
    secrets.remember(url)
    assert "hunter22" not in secrets.masked(f"cannot connect to {url} with hunter22")
    assert "hunter22" not in place(url)
    assert secrets.has_password(url)


def test_a_password_on_the_command_line_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    make_store(settings(store="postgresql://ann:hunter22@db/shop"))
    said = capsys.readouterr().err
    assert "set PILLARBOX_STORE instead" in said
    assert "hunter22" not in said
    make_store(settings(variables={"PILLARBOX_STORE": "postgresql://ann:hunter22@db/shop"}))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["postgresql://ann:s/cret1@db/x", "postgresql://ann:1/cret1@db/x", "postgresql://a:s#cret1@d"]
)
def test_a_password_that_breaks_its_url_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_store(settings(store=url))
    assert "cret1" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://u:hunter/22@h:9092",
        "kafka://u:hunter#22@h:9092?topic=x",
        "kafka://u:hunter?22@h:9092",
        "mysql://u:hun@ter/22@h/x",
        "postgresql://u:[hunter22@h/x",
        "postgresql://[::1/x",
    ],
)
@pytest.mark.parametrize("name", ["store", "to"])
def test_a_password_that_cuts_its_url_is_refused_and_not_shown(name: str, url: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is not a URL, or its password has unescaped") as raised:
        Settings({name: url}, {})
    assert "hun" not in str(raised.value)
    assert secrets.masked(f"cannot use {url}") == "cannot use ***"


@pytest.mark.parametrize(
    "url",
    [
        "kafka://a:9092,b:9093?topic=x&client.id=me@home",
        "postgresql://u:p%40ss@[::1]:5432/x",
        "sqlite:////home/me@home/x.db",
        "file:///home/me@home/x.jsonl",
        "https://host/@scope/hook",
        "postgresql:///x?host=/run/postgresql",
    ],
)
def test_an_at_sign_elsewhere_is_no_fault(url: str) -> None:
    assert settings(to=url).get("to") == url


def test_a_byte_order_mark_is_not_part_of_the_file(folder: Path) -> None:
    (folder / "pillarbox.toml").write_text("batch = 3\n", "utf-8-sig")
    assert settings().get("batch") == 3


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="PILLARBOX_NAME is not UTF-8 text"):
        settings(variables={"PILLARBOX_NAME": "\udcff"})


def test_a_setting_in_place_of_a_stream_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"has 'to' but no stream; write it under \[streams.NAME\]"):
        settings('[streams]\nto = "stdout:"\n')


def test_every_command_with_a_store_works_behind_a_pooler() -> None:
    def walk(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
        yield parser.prog, list(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from walk(command)

    found = {prog: "--statement-cache" in flags for prog, flags in walk(build()) if "--store" in flags}
    assert len(found) > 15
    assert [prog for prog, has in found.items() if not has] == []
