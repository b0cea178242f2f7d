import pytest

from pillarbox.conformance import Connect
from tests.conformance.mongo_store import MongoStoreContract, connect_to
from tests.servers import MongoSet

# One node runs the same in every suite; three take minutes.
pytestmark = pytest.mark.long


class TestMongoSet(MongoStoreContract):
    @pytest.fixture
    def connect(self, mongo_set: MongoSet, request: pytest.FixtureRequest) -> Connect:
        return connect_to(mongo_set.url, request.node.name)
