from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.conformance.events import make_event
from pillarbox.event import key_hash
from pillarbox.ids import uuid7

NO_ID = UUID(int=0)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("", 0),
        ("a", 0x68B7BE43),
        ("order-1", 0x60B37FEF),
        ("123456789", 0x4BF43926),  # the check value of CRC-32, without its highest bit
        ("Zürich", 0x530BA93E),
        ("日本", 0x47B7CDCC),
    ],
)
def test_the_hash_of_a_key_never_changes(key: str, number: int) -> None:
    assert key_hash(NO_ID, key) == number


def test_the_hash_of_an_event_without_key_is_that_of_its_id() -> None:
    assert key_hash(UUID("0190163d-8694-739b-aea5-966c26f8ad91"), None) == 0x3A1F308C
    assert key_hash(UUID(int=1), "same") == key_hash(UUID(int=2), "same")


@given(st.uuids(), st.none() | st.text(st.characters(codec="utf-8")))
def test_the_hash_fits_a_signed_column(event_id: UUID, key: str | None) -> None:
    assert 0 <= key_hash(event_id, key) <= 0x7FFF_FFFF


@pytest.mark.parametrize("kind", ["number", "named number", "uuid7 key", "uuid7 id"])
def test_shards_get_their_fair_share(kind: str) -> None:
    count = 16_000
    shards = [0] * 16
    for number in range(count):
        key = {"number": str(number), "named number": f"order-{number}", "uuid7 key": str(uuid7())}.get(kind)
        shards[key_hash(uuid7(), key) % 16] += 1
    assert min(shards) > count / 16 * 0.8
    assert max(shards) < count / 16 * 1.2


def test_an_event_cannot_be_changed() -> None:
    event = make_event(key="k")
    with pytest.raises(AttributeError):
        event.key = "other"  # type: ignore[misc]
    assert event._replace(key="other").key == "other"
    assert event.key == "k"
