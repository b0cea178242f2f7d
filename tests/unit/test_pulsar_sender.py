"""The bookkeeping of Pulsar's sender, without a broker."""

from typing import Any

import pulsar as client_library
import pytest

from pillarbox.conformance.events import make_event
from pillarbox.envelopes import envelope_named, pulsar
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result
from pillarbox.publishers._link import Link
from pillarbox.publishers._waves import Call
from pillarbox.publishers.pulsar.hashing import java_hash
from pillarbox.publishers.pulsar.outcomes import WAIT_SECONDS, Outcomes
from pillarbox.publishers.pulsar.routes import Partitions, Route, Settings
from pillarbox.publishers.pulsar.sender import Ending, Sender, Target, logger
from pillarbox.publishers.pulsar.wave import Wave
from pillarbox.pulsar.settings import Login, Namespace


@pytest.fixture
def sender() -> Sender:
    return Sender(
        settings=Settings(Login("localhost:1"), 1.0, "key", "none", "java", 5_000_000),
        namespace=Namespace(),
        partitions=Partitions("pulsar"),
        link=Link("pulsar", logger),
        message_of=pulsar(envelope_named("raw", headers=None, source="/shop")),
        default_topic="orders",
        stuck_seconds=1.0,
    )


class Answering(list[Any]):
    """The client's thread writes the answer between two looks at it."""

    def __getitem__(self, place: Any) -> Any:
        before = super().__getitem__(place)
        self[place] = client_library.Result.Ok
        return before


def lost(sender: Sender, *, others: bool = False) -> Outcome:
    """The outcome of an event that was sent in vain, though a new connection could be made."""
    call, wave = Call([make_event(key="a"), make_event(topic="other")]), Wave(2)
    wave.sent += [0, 1] if others else [0]
    wave.answers[1] = client_library.Result.Ok
    targets = {topic: Target(topic, Route([None], java_hash, lambda _: None)) for topic in ("", "other")}
    sender._record(call, targets, wave, Ending.BACK)
    return call.outcomes[0]


def test_a_connection_that_is_lost_again_and_again_for_the_same_partition_has_a_reason(sender: Sender) -> None:
    assert lost(sender) == UNTRIED, "usual after an outage"
    assert lost(sender).is_outage
    assert "maxMessageSize" in str(lost(sender).error)
    waiting = lost(sender, others=True)
    assert (waiting.result, waiting.charged, waiting.after_seconds) == (Result.RETRY, False, WAIT_SECONDS)
    # Something of the partition is confirmed between them
    call, wave = Call([make_event()]), Wave(1)
    wave.sent, wave.answers = [0], [client_library.Result.Ok]
    sender._record(call, {"": Target("", Route([None], java_hash, lambda _: None))}, wave, Ending.STOPPED)
    assert lost(sender) == UNTRIED


@pytest.mark.parametrize(
    ("name", "charged", "ambiguous"),
    [("UnknownError", True, True), ("OperationNotSupported", True, True), ("NotConnected", False, False)],
)
def test_nobody_knows_whose_fault_an_unknown_error_is(name: str, charged: bool, ambiguous: bool) -> None:
    outcome = Outcomes("pulsar", 1_000_000).classify(name, "orders", own=False)
    assert (outcome.result, outcome.charged, outcome.ambiguous) == (Result.RETRY, charged, ambiguous)


def test_an_answer_that_comes_while_a_call_ends_is_no_refusal(sender: Sender) -> None:
    call, wave = Call([make_event(key="a"), make_event(key="b")]), Wave(2)
    wave.sent += [0, 1]
    wave.answers = Answering([None, client_library.Result.Ok])
    sender._record(call, {"": Target("orders", None)}, wave, Ending.STOPPED)
    assert call.outcomes == [UNTRIED, PUBLISHED]
