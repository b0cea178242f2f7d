import pytest

from pillarbox.conformance import Connect
from servers import Mongo
from tests.conformance.mongo_store import MongoStoreContract, connect_to


class TestMongo(MongoStoreContract):
    @pytest.fixture
    def connect(self, mongo: Mongo, request: pytest.FixtureRequest) -> Connect:
        return connect_to(mongo.url, request.node.name)
