import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pillarbox import maintenance as maintenance_package
from pillarbox import relay as relay_package
from pillarbox.errors import ConfigError
from pillarbox.event import Mode
from pillarbox.publisher import Needs, PublisherFeatures
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Exponential, Fixed, OnDead, Relay, Stream
from pillarbox.stores.memory import MemoryStore


def stream(**settings: Any) -> Stream:
    return Stream(settings.pop("name", "orders"), settings.pop("to", MemoryPublisher()), **settings)


def test_the_defaults_are_those_that_the_documentation_names() -> None:
    made = stream()
    assert (made.mode, made.on_dead, made.max_attempts) == (Mode.ORDERED, OnDead.SKIP, 20)
    assert (made.batch, made.batch_bytes, made.lease_seconds, made.slots) == (2000, 4_000_000, 15.0, None)
    assert made.retry_policy == Exponential(base="1s", factor=2.0, limit="10m", jitter=True)
    assert (made.poll_seconds, made.poll_limit_seconds, made.stuck_seconds) == (0.1, 2.0, 600.0)


def test_words_become_what_they_mean() -> None:
    made = stream(mode="queue", on_dead="park")
    assert made.mode is Mode.QUEUE
    assert made.on_dead is OnDead.PARK


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("mode", "stack", "use one of: ordered, queue"),
        ("on_dead", "explode", "use one of: skip, block, park"),
        ("slots", 0, "use 1 to 1024"),
        ("concurrency", 0, "use 1 to 10000"),
        ("concurrency", 10_001, "use 1 to 10000"),
        ("batch", 0, "use 1 to 100000"),
        ("batch_bytes", 0, "use 1 to 1073741824"),
        ("max_attempts", 0, "use 1 to 1000000"),
        ("max_attempts", None, "use 1 to 1000000"),
        ("batch", 10.5, "use 1 to 100000"),
        ("batch", True, "use 1 to 100000"),
        ("concurrency", None, "use 1 to 10000"),
        ("lease", 0.01, "use 100ms to 24h"),
        ("lease", float("nan"), "use a duration such as"),
        ("lease", "15 minutes", "use a duration such as"),
        ("lease", None, "use a duration such as"),
        ("lease", True, "use a duration such as"),
        ("poll", 0, "use 1ms to 10s"),
        ("poll_limit", "11s", "use 1ms to 10s"),
        ("stuck", 0, "use 100ms to 7d"),
    ],
)
def test_a_wrong_setting_names_itself_its_value_and_the_remedy(setting: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stream(**{setting: value})
    assert "stream 'orders'" in str(caught.value)
    shown = repr(value) if isinstance(value, str) else str(value)
    assert f"{setting} is {shown}; {remedy}" in str(caught.value)


def test_two_settings_that_disagree_are_both_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("poll_limit (0.5) is below poll (1)")):
        stream(poll=1, poll_limit=0.5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "a stream needs a name"),
        (None, "a stream needs a name"),
        (7, "of type int; pass text"),
        ("a\0b", "contains a NUL"),
        ("\ud800", "lone surrogate"),
        ("x" * 101, "has 101 characters, the limit is 100"),
    ],
)
def test_the_name_of_a_stream_is_one_that_events_can_have(name: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stream(name=name)


def test_a_retry_policy_can_be_given_as_text() -> None:
    assert stream(retry="fixed:30s").retry_policy == Fixed("30s")
    own = lambda attempts: 1.0 * attempts  # noqa: E731
    assert stream(retry=own).retry_policy is own
    with pytest.raises(ConfigError, match="stream 'orders': retry is 'fixd:30s'; did you mean 'fixed'"):
        stream(retry="fixd:30s")
    with pytest.raises(ConfigError, match="stream 'orders': retry is of type NoneType"):
        stream(retry=None)


def test_a_type_checker_finds_a_typo(tmp_path: Path) -> None:
    lines = [
        "from pillarbox import Mode, OnDead, Stream",
        'Stream("a", to="stdout:", mode="queue", on_dead="park", lease="15s", retry="fixed:30s")',
        'Stream("a", to="stdout:", mode=Mode.QUEUE, on_dead=OnDead.PARK, lease=15)',
        'Stream("a", to="stdout:", mode="qeue")',
        'Stream("a", to="stdout:", on_dead="prak")',
        'Stream("a", to="stdout:", lease=[15])',
    ]
    snippet = tmp_path / "snippet.py"
    snippet.write_text("\n".join(lines))
    mypy = pytest.importorskip("mypy.api")
    output, _, code = mypy.run(["--strict", f"--cache-dir={tmp_path}/cache", str(snippet)])
    found = [line.split(":", 2)[1] for line in output.splitlines() if ": error:" in line]
    assert (found, code) == (["4", "5", "6"], 1), output


def test_settings_cannot_change_later() -> None:
    with pytest.raises(AttributeError):
        stream().batch = 5  # type: ignore[misc]


def test_a_relay_has_a_stream() -> None:
    with pytest.raises(ConfigError, match="at least one stream"):
        Relay(MemoryStore(), [])


def test_a_stream_is_named_once() -> None:
    with pytest.raises(ConfigError, match="'orders' is named twice"):
        Relay(MemoryStore(), [stream(), stream(name="other"), stream()])


@pytest.mark.parametrize("policy", ["block", "park"])
def test_a_policy_that_the_destination_cannot_keep_is_refused(policy: str) -> None:
    loose = MemoryPublisher(features=PublisherFeatures(strict_keys=False))
    with pytest.raises(ConfigError, match=rf"on_dead={policy} needs a publisher.*strict_keys=True"):
        Relay(MemoryStore(), [stream(to=loose, on_dead=policy)])
    Relay(MemoryStore(), [stream(to=loose)])


@pytest.mark.parametrize(
    ("url", "hint"), [("kafak://b:9092", "did you mean 'kafka'"), ("carrier-pigeon:", "use one of")]
)
def test_an_unknown_destination_gets_a_hint(url: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        Relay(MemoryStore(), [stream(to=url)])


@pytest.mark.parametrize(("url", "hint"), [("postgre://h/d", "did you mean 'postgresql'"), ("tape:", "use one of")])
def test_an_unknown_store_gets_a_hint(url: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        Relay(url, [stream()])


def test_each_start_of_a_relay_has_a_name_of_its_own() -> None:
    one, other = (Relay(MemoryStore(), [stream()], name="relay") for _ in range(2))
    assert one.name != other.name
    assert one.name.startswith("relay-")


@pytest.mark.parametrize("package", [relay_package, maintenance_package])
def test_no_log_line_goes_past_the_logger_that_a_relay_is_given(package: ModuleType) -> None:
    (folder,) = package.__path__
    for path in Path(folder).rglob("*.py"):
        assert not re.search(r"\blog\.(debug|info|warning|error|exception|log)\(", path.read_text()), path.name


def test_what_a_stream_needs_reaches_its_publisher() -> None:
    asked: list[Needs] = []

    class Asked(MemoryPublisher):
        def prepared(self, needs: Needs) -> MemoryPublisher:
            asked.append(needs)
            return self

    to = Asked()
    Relay(
        MemoryStore(),
        [
            stream(name="a", to=to),
            stream(name="b", to=to, slots=20, on_dead="block"),
            stream(name="c", to=to, mode="queue", concurrency=3, slots=20, on_dead="park"),
        ],
    )
    assert asked == [Needs("a", 8, False), Needs("b", 20, True), Needs("c", 3, True)]


@pytest.mark.parametrize("to", [["kafka://a", "stdout:"], (MemoryPublisher(),), {"kafka://a"}, {"a": "stdout:"}])
def test_a_stream_has_one_destination(to: Any) -> None:
    with pytest.raises(ConfigError, match=r"stream 'mail': a stream has one destination.*Outbox\(routes=...\)"):
        Stream("mail", to)


def test_a_function_is_no_destination() -> None:
    with pytest.raises(ConfigError, match=r"a function is no destination; .* Handlers"):
        Stream("mail", to=lambda event: None)  # type: ignore[arg-type]
