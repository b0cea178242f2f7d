from collections.abc import Sequence

import pytest

from pillarbox.batch import Batch
from pillarbox.publisher import PUBLISHED, Needs, Outcome, Publisher, PublisherFeatures, Result, outage, retry

NEEDS = Needs("orders", concurrency=8, strict_keys=True)


class Small(Publisher):
    description = "nowhere"

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return [PUBLISHED] * len(batch)


class Wrapper(Publisher):
    def __init__(self, inner: Publisher) -> None:
        self.inner = inner

    @property
    def description(self) -> str:
        return self.inner.description

    def prepared(self, needs: Needs) -> "Wrapper":
        return Wrapper(self.inner.prepared(needs))

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return await self.inner.publish(batch)


class Chosen(Small):
    def prepared(self, needs: Needs) -> "Chosen":
        chosen = Chosen()
        chosen.description = f"{needs.stream}, {needs.concurrency} at once, strict: {needs.strict_keys}"
        return chosen


@pytest.mark.asyncio
async def test_a_publisher_of_two_members_fulfils_the_contract() -> None:
    small = Small()
    await small.open()
    assert isinstance(small, Publisher)
    assert small.features == PublisherFeatures()
    assert small.prepared(NEEDS) is small
    await small.close()


@pytest.mark.parametrize("missing", ["description", "publish"])
def test_what_cannot_have_a_default_must_be_written(missing: str) -> None:
    members = {name: value for name, value in vars(Small).items() if name in ("description", "publish")}
    del members[missing]
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (Publisher,), members)()


def test_preparing_works_behind_a_wrapper() -> None:
    prepared = Wrapper(Chosen()).prepared(NEEDS)
    assert isinstance(prepared, Wrapper)
    assert prepared.description == "orders, 8 at once, strict: True"


def test_a_destination_can_ask_for_a_pause() -> None:
    assert retry("busy", charged=False, after_seconds=30) == Outcome(Result.RETRY, "busy", False, 30)
    away = outage("closed for the night", after_seconds=3600)
    assert away.is_outage
    assert away.after_seconds == 3600
    assert retry("busy").after_seconds is outage("away").after_seconds is PUBLISHED.after_seconds is None
