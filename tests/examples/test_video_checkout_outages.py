"""The checkout of examples/ while its servers come and go."""

from contextlib import closing

import pytest

from servers import Kafka, Mongo
from servers.fixtures import OwnServer
from tests.examples.shops import Relays, Shop, copies, tells, until
from tests.mongo_outbox import database_url


@pytest.mark.long
def test_a_kafka_and_a_mongodb_that_are_away_are_waited_for(own_server: OwnServer, relays: Relays) -> None:
    mongo, kafka = own_server(Mongo), own_server(Kafka)
    with closing(Shop(database_url(mongo.url, "video"), kafka)) as shop:
        shop.make()
        kafka.kill()
        shop.buy(5)
        logs = relays(3, shop.url, kafka)
        until(tells(logs, "destination_down"), "the relays to miss Kafka at their start")
        shop.buy(5)
        kafka.start()
        assert not copies(shop.all_arrived())

        with shop.open():
            shop.published(20)
            kafka.stop()
            shop.buy(5)
            kafka.start()
        calm = shop.all_arrived()
        assert not copies(calm), "the producers lived through it"

        with shop.open():
            shop.published(20)
            mongo.restart()
            shop.published(20)
        shop.buy(5)
        records = shop.all_arrived()
        # What was sent and could not be settled is sent again: by one of three relays, after one fault.
        assert not copies(records).keys() & {record.key for record in calm}
        assert all(count == 1 for count in copies(records).values())
        assert {record.key for record in records} == shop.committed().keys(), "nothing lost, nothing of the refused"
