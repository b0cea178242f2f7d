"""Databases with an outbox, one of each kind for all tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.idempotency.places import Place, place_on


@pytest.fixture(scope="session")
def place_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Place]]:
    places: dict[str, Place] = {}

    def get(database: str) -> Place:
        if database not in places:
            places[database] = place_on(database, request, tmp_path_factory.mktemp("idempotency"))
        return places[database]

    yield get
    for place in places.values():
        place.dispose()


@pytest.fixture
def place(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> Place:
    return place_of(request.param)
