import pytest

from pillarbox.conformance import Connect
from pillarbox.store import Features
from servers import MongoStandalone
from tests.conformance.mongo_store import MongoStoreContract, connect_to


class TestMongoStandalone(MongoStoreContract):
    features = Features(transactions=False)

    @pytest.fixture
    def connect(self, mongo_standalone: MongoStandalone, request: pytest.FixtureRequest) -> Connect:
        return connect_to(mongo_standalone.url, request.node.name)
