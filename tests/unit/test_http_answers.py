"""The pure parts of the HTTP publisher: what a Retry-After says, and signatures against the reference package."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from pillarbox.conformance.events import make_event
from pillarbox.envelopes import Envelope, http
from pillarbox.publishers.http.answers import seconds_to_wait
from pillarbox.publishers.http.signing import keys_of, signatures
from pillarbox.publishers.http.state import State

NOW = datetime(2026, 11, 19, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("0", 0.0),
        (" 120 ", 120.0),
        ("9" * 400, 3600.0),
        ("٣", None),
        ("Thu, 19 Nov 2026 12:01:00 GMT", 60.0),
        ("Thu, 19 Nov 2026 11:00:00 GMT", 0.0),
        ("Thu, 19 Nov 2027 12:00:00 GMT", 3600.0),
        ("Thu, 99 Nov 2026 12:00:00 GMT", None),
    ],
)
def test_a_pause(text: str, seconds: float | None) -> None:
    assert seconds_to_wait(text, NOW) == seconds


@given(key=st.binary(min_size=24, max_size=64), body=st.text())
def test_signatures_are_those_of_the_reference_package(key: bytes, body: str) -> None:
    reference = Webhook(key)
    assert signatures([key], "an-id", int(NOW.timestamp()), body.encode()) == reference.sign("an-id", NOW, body)


def test_a_secret_is_read_as_the_reference_package_reads_it() -> None:
    secret = "whsec_" + "YWJjZGVmZ2hp" * 3
    (key,) = keys_of((secret,))
    assert signatures([key], "id", int(NOW.timestamp()), b"{}") == Webhook(secret).sign("id", NOW, "{}")


@given(headers=st.dictionaries(st.text(min_size=1), st.text()), key=st.text(min_size=1))
def test_any_header_can_be_sent(headers: dict[str, str], key: str) -> None:
    message = http(Envelope())(make_event(headers=headers, key=key))
    for name, value in message.headers.items():
        assert name.isascii()
        assert name.isprintable()
        assert " " not in name
        assert ":" not in name
        assert value.isascii()
        assert value.isprintable() or not value
        assert value == value.strip()


def test_an_endpoint_is_lively_only_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("pillarbox.publishers.http.state.time", clock)
    state = State("https://a.example", 4)
    for clock.now in (0.0, 2.0, 4.0, 6.0, 8.0, 10.0):
        state.answered(10.0)
    assert state.was_lively(0.0, 10.0)
    clock.now = 13.0  # silent since 10
    assert not state.was_lively(3.0, 10.0)
    state.answered(10.0)
    assert not state.was_lively(3.0, 10.0)
    assert state.was_lively(11.0, 10.0)
