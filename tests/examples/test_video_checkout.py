"""The checkout of examples/: three relays at once."""

import subprocess
import sys
from collections import Counter
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from examples.video_checkout.checkout import make_topic
from servers import Kafka, Mongo
from servers.fixtures import OwnServer
from tests.examples.shops import Relays, Shop, tells, until
from tests.mongo_outbox import database_url

PROGRAM = Path(__file__).parents[2] / "examples" / "video_checkout" / "checkout.py"


def test_what_was_committed_arrives_once_and_nothing_else(mongo: Mongo, kafka: Kafka) -> None:
    url = database_url(mongo.url, f"video_{uuid4().hex[:12]}")
    make_topic(kafka.url)
    with closing(Shop(url, kafka)) as shop:
        before = {record.key for record in shop.records()}
    told = subprocess.run([sys.executable, str(PROGRAM), url, kafka.url], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "bought: 200 videos; refused and rolled back: 100" in told.stdout
    assert "all 200 events, 200 of them once, 0 with copies" in told.stdout
    with closing(Shop(url, kafka)) as shop:
        committed = shop.committed()
        records = [record for record in shop.records() if record.key not in before]
        assert len(committed) == 200
        assert Counter(record.key for record in records) == dict.fromkeys(committed, 1)
        for key, value in records:
            purchase = committed[key]
            assert datetime.fromisoformat(value.pop("created_at")).utcoffset() == timedelta(0)
            payload = {name: purchase[name] for name in ("customer", "video", "cents")}
            assert value == {"_id": key, "payload": {"purchase_id": str(purchase["_id"]), **payload}}


@pytest.mark.long
def test_a_mongodb_that_is_away_at_the_start_is_waited_for(own_server: OwnServer, kafka: Kafka, relays: Relays) -> None:
    mongo = own_server(Mongo)
    with closing(Shop(database_url(mongo.url, "video"), kafka)) as shop:
        shop.make()
        shop.buy(5)
        committed = shop.committed()
        mongo.stop()
        logs = relays(1, shop.url, kafka)
        until(tells(logs, "store_down"), "the relay to miss MongoDB at its start")
        mongo.start()
        found = Counter(record.key for record in shop.all_arrived())
        assert {key: found[key] for key in committed} == dict.fromkeys(committed, 1)
