import pytest

from pillarbox.conformance import Connect
from servers import MongoSet
from tests.conformance.mongo_store import MongoStoreContract, connect_to

# Every suite runs the same on one node. Three nodes take minutes.
pytestmark = pytest.mark.long


class TestMongoSet(MongoStoreContract):
    @pytest.fixture
    def connect(self, mongo_set: MongoSet, request: pytest.FixtureRequest) -> Connect:
        return connect_to(mongo_set.url, request.node.name)
