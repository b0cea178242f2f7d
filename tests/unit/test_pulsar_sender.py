"""The bookkeeping of Pulsar's sender, without a broker."""

from typing import Any

import pulsar as client_library
import pytest

from pillarbox.conformance.events import make_event
from pillarbox.envelopes import envelope_named, pulsar
from pillarbox.publisher import PUBLISHED, UNTRIED
from pillarbox.publishers._link import Link
from pillarbox.publishers._waves import Call
from pillarbox.publishers.pulsar.routes import Partitions, Settings
from pillarbox.publishers.pulsar.sender import Ending, Sender, Target, Wave, logger
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


def test_an_answer_that_comes_while_a_call_ends_is_no_refusal(sender: Sender) -> None:
    call, wave = Call([make_event(key="a"), make_event(key="b")]), Wave(2)
    wave.sent += [0, 1]
    wave.answers = Answering([None, client_library.Result.Ok])
    sender._record(call, {"": Target("orders", None)}, wave, Ending.STOPPED)
    assert call.outcomes == [UNTRIED, PUBLISHED]
