"""Tests of the contract: a publisher with a planted bug must fail it."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Needs, Outcome, Publisher, Result, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher


class Healthy(MemoryPublisher):
    """Rejects events of the type "bad"; waits or reports an outage while it is down."""

    waits = False
    limit_seconds = 10.0

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        for event in batch:
            if event.type == "bad":
                self.fail_next(rejected("the test wants it so"), type="bad", key=event.key)
        return await super().publish(batch)


class DropsAnEvent(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        if len(batch) > 1:
            self.deliveries.pop()
        return outcomes


class DeliversTwice(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        await super().publish(Batch.of(batch[-1:]))
        return await super().publish(batch)


class ReordersAKey(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return list(await super().publish(Batch.of(batch[::-1])))[::-1]


class ReordersBatches(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        before = self.deliveries
        self.deliveries = []
        outcomes = await super().publish(batch)
        self.deliveries += before
        return outcomes


class MixesUpOutcomes(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return list(await super().publish(batch))[::-1]


class GoesOnAfterAFailure(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [
            outcome for event in batch for outcome in await super(GoesOnAfterAFailure, self).publish(Batch.of([event]))
        ]


class GoesOnAfterAFailureInSecret(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        self.deliveries += [e for e, o in zip(batch, outcomes, strict=True) if o == UNTRIED]
        return outcomes


class NeverFreesAKey(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        for event, outcome in zip(batch, outcomes, strict=True):
            if outcome.result is Result.REJECTED and event.key is not None:
                self.fail_next(UNTRIED, key=event.key, times=1000)
        return outcomes


class FailsTheWholeBatch(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if any(event.type == "bad" for event in batch):
            return [rejected("one of them is bad")] * len(batch)
        return await super().publish(batch)


class QuotesThePayload(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        return [
            o if o.result is not Result.REJECTED else rejected(f"cannot send {e.payload.decode()}")
            for e, o in zip(batch, outcomes, strict=True)
        ]


class SerialisesAgain(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return await super().publish(Batch.of(event._replace(payload=self.again(event.payload)) for event in batch))

    def again(self, payload: bytes) -> bytes:
        try:
            return json.dumps(json.loads(payload), separators=(",", ":")).encode()
        except ValueError:
            return payload


class StripsThePayload(SerialisesAgain):
    def again(self, payload: bytes) -> bytes:
        return payload.strip()


class CutsThePayload(SerialisesAgain):
    def again(self, payload: bytes) -> bytes:
        return payload[:65536]


class RaisesForAnEvent(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        if any(outcome.result is Result.REJECTED for outcome in outcomes):
            raise RuntimeError("one of them is bad")
        return outcomes


class ReturnsTooFew(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [o for o in await super().publish(batch) if o.result is not Result.UNTRIED]


class MixesCalls(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        self.current = batch
        await asyncio.sleep(0)
        return await super().publish(self.current)


class ChargesForAnOutage(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [retry(o.error or "") if o.is_outage else o for o in await super().publish(batch)]


class HidesAnOutage(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [UNTRIED if o.is_outage else o for o in await super().publish(batch)]


class LosesInAnOutage(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [PUBLISHED if o.is_outage else o for o in await super().publish(batch)]


class WaitsAfterClose(Healthy):
    waits = True
    limit_seconds = 0.1

    async def close(self) -> None:
        if self._waiting == 0:
            await super().close()


class ClosesForEver(Healthy):
    limit_seconds = 0.1

    async def close(self) -> None:
        await asyncio.Event().wait()


class SaysPublishedAtClose(Healthy):
    waits = True

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        outcomes = await super().publish(batch)
        return [PUBLISHED] * len(batch) if self._session is None else outcomes


class RaisesAfterClose(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if self._session is None:
            raise RuntimeError("closed")
        return await super().publish(batch)


class GoesOnAfterClose(Healthy):
    async def close(self) -> None:
        pass


class OpensOnce(Healthy):
    was_closed = False

    async def open(self) -> None:
        if not self.was_closed:
            await super().open()

    async def close(self) -> None:
        self.was_closed = True
        await super().close()


class ClosesOnce(OpensOnce):
    async def open(self) -> None:
        self.was_closed = False
        await super().open()

    async def close(self) -> None:
        if self.was_closed:
            raise RuntimeError("closed already")
        await super().close()


class SaysPublishedWhenCutOff(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        session = self._session
        for _ in range(10):
            await asyncio.sleep(0)
        if self._session is not session:
            return [PUBLISHED] * len(batch)
        return await super().publish(batch)


class DropsASingleEvent(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [PUBLISHED] if len(batch) == 1 else await super().publish(batch)


class NeedsAnEvent(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return await super().publish(Batch.of([batch[0], *batch[1:]]))


class SeesOnlyTheFirstPart(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        await super().publish(Batch.of(batch.parts[0].events))
        return [PUBLISHED] * len(batch)


class AnswersForOnePart(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return list(await super().publish(batch))[: len(batch.parts[-1].events)]


class PreparesNothing(Healthy):
    def prepared(self, needs: Needs) -> Publisher:
        return None  # type: ignore[return-value]


class PreparesForAnotherDestination(Healthy):
    def prepared(self, needs: Needs) -> Publisher:
        return MemoryPublisher()


class IsSpoiltByPreparing(Healthy):
    def prepared(self, needs: Needs) -> Publisher:
        other = MemoryPublisher()
        other.deliveries = self.deliveries
        self.down()
        return other


class AsksForANegativePause(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [o._replace(after_seconds=-1.0) if o.is_outage else o for o in await super().publish(batch)]


class AsksForAPauseAfterSuccess(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [o._replace(after_seconds=1.0) for o in await super().publish(batch)]


class IsInDoubtAboutSuccess(Healthy):
    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [o._replace(ambiguous=True) for o in await super().publish(batch)]


class HasNoName(Healthy):
    @property
    def description(self) -> str:
        return ""


class Contract(PublisherContract):
    can_reject = True
    can_go_down = True
    waiting_seconds = 0.01

    def __init__(self, publisher: Healthy) -> None:
        self.publisher = publisher
        self.limit_seconds = publisher.limit_seconds

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return [Delivery(str(e.id), e.key, e.payload) for e in self.publisher.deliveries]

    def rejecting_event(self, key: str | None) -> Event:
        return self.event(key=key, type="bad")

    async def go_down(self) -> None:
        self.publisher.hold() if self.publisher.waits else self.publisher.down()

    async def come_back(self) -> None:
        self.publisher.release() if self.publisher.waits else self.publisher.up()


TESTS = [name for name in dir(PublisherContract) if name.startswith("test_")]

MUTANTS = {
    DropsAnEvent: "test_published_means_that_it_is_there_once",
    DeliversTwice: "test_published_means_that_it_is_there_once",
    ReordersAKey: "test_a_key_keeps_its_order_within_a_batch",
    ReordersBatches: "test_a_key_keeps_its_order_over_batches",
    MixesUpOutcomes: "test_nothing_of_a_key_is_sent_after_its_rejected_event",
    GoesOnAfterAFailure: "test_nothing_of_a_key_is_sent_after_its_rejected_event",
    GoesOnAfterAFailureInSecret: "test_nothing_of_a_key_is_sent_after_its_rejected_event",
    NeverFreesAKey: "test_nothing_of_a_key_is_sent_after_its_rejected_event",
    FailsTheWholeBatch: "test_a_rejected_event_harms_no_neighbour",
    QuotesThePayload: "test_a_rejected_event_says_why",
    SerialisesAgain: "test_the_payload_arrives_byte_for_byte",
    StripsThePayload: "test_the_payload_arrives_byte_for_byte",
    CutsThePayload: "test_the_payload_arrives_byte_for_byte",
    RaisesForAnEvent: "test_a_rejected_event_harms_no_neighbour",
    ReturnsTooFew: "test_nothing_of_a_key_is_sent_after_its_rejected_event",
    MixesCalls: "test_concurrent_calls_do_not_mix",
    ChargesForAnOutage: "test_an_outage_loses_nothing_and_charges_nothing",
    HidesAnOutage: "test_an_outage_loses_nothing_and_charges_nothing",
    LosesInAnOutage: "test_an_outage_loses_nothing_and_charges_nothing",
    WaitsAfterClose: "test_close_ends_a_call_that_waits_for_the_destination",
    ClosesForEver: "test_closed_twice_and_used_after_it",
    SaysPublishedAtClose: "test_close_ends_a_call_that_waits_for_the_destination",
    RaisesAfterClose: "test_closed_twice_and_used_after_it",
    GoesOnAfterClose: "test_closed_twice_and_used_after_it",
    OpensOnce: "test_opens_again_after_close",
    SaysPublishedWhenCutOff: "test_close_answers_for_every_event_of_a_call",
    DropsASingleEvent: "test_a_batch_of_one",
    NeedsAnEvent: "test_an_empty_batch_has_no_outcomes",
    SeesOnlyTheFirstPart: "test_a_batch_of_several_parts",
    AnswersForOnePart: "test_a_batch_of_several_parts",
    PreparesNothing: "test_a_publisher_that_is_prepared_for_a_stream",
    PreparesForAnotherDestination: "test_a_publisher_that_is_prepared_for_a_stream",
    IsSpoiltByPreparing: "test_a_publisher_that_is_prepared_for_a_stream",
    AsksForANegativePause: "test_an_outage_loses_nothing_and_charges_nothing",
    AsksForAPauseAfterSuccess: "test_a_batch_of_one",
    IsInDoubtAboutSuccess: "test_a_batch_of_one",
    HasNoName: "test_describes_itself",
    ClosesOnce: "test_closed_twice_and_used_after_it",
}


async def fails(kind: type[Healthy], test: str) -> bool:
    publisher = kind()
    await publisher.open()
    try:
        await getattr(Contract(publisher), test)(publisher)
    except (AssertionError, pytest.fail.Exception):
        return True
    return False


@pytest.mark.asyncio
@pytest.mark.parametrize("test", TESTS)
async def test_a_healthy_publisher_passes(test: str) -> None:
    assert not await fails(Healthy, test)


@pytest.mark.asyncio
@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_mutant_is_caught(mutant: type[Healthy]) -> None:
    assert await fails(mutant, MUTANTS[mutant]), f"{mutant.__name__} survived {MUTANTS[mutant]}"


def test_every_test_of_the_contract_catches_a_mutant() -> None:
    assert set(MUTANTS.values()) == set(TESTS)
