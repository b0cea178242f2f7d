"""The checkout of examples/ in a mode that makes no copies: relays die between publish and settle."""

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from examples.video_checkout.checkout import TOPIC
from servers import Kafka, Mongo
from servers.fixtures import OwnServer
from tests.examples.shops import Relays, Shop, until
from tests.examples.test_video_runner import Runners, has_made
from tests.mongo_outbox import database_url

ROOT = Path(__file__).parents[2]
EXACTLY_ONCE = "&delivery=exactly-once"
# `pillarbox`, stopped as soon as a transaction is committed.
STOPPED = f"""
import sys
from tests.integration.relay_process import SignalAt
SignalAt("transaction_committed", {int(signal.SIGSTOP)})
from pillarbox.cli import main
sys.exit(main())
"""


def killed_between_publish_and_settle(shop: Shop, mongo: Mongo) -> None:
    """Run a relay until it has published something. MongoDB goes away, and the relay dies before it is back."""
    to = f"{shop.kafka.url}?topic={TOPIC}&envelope=legacy{EXACTLY_ONCE}"
    words = [sys.executable, "-c", STOPPED, "relay", "--to", to, "--lease", "2s"]
    environment = os.environ | {"PILLARBOX_STORE": shop.url, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=ROOT, env=environment) as relay:
        try:
            os.waitid(os.P_PID, relay.pid, os.WSTOPPED)
            mongo.kill()
        finally:
            relay.kill()
    mongo.start()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_relays_that_die_between_publish_and_settle_make_no_copy(
    own_server: OwnServer, kafka: Kafka, relays: Relays
) -> None:
    mongo = own_server(Mongo)
    with closing(Shop(database_url(mongo.url, "video"), kafka)) as shop:
        shop.make()
        previews = shop.checkout.client.get_default_database()["previews"]
        before = {record.key for record in shop.records()}
        uploaded = [str(shop.checkout.upload("once", f"{number}.mp4", "video/mp4")) for number in range(5)]
        for _ in range(3):
            shop.buy(3)
            killed_between_publish_and_settle(shop, mongo)
        in_flight = {record.key for record in shop.records()} - before
        settled = shop.outbox.count_documents({"status": "published"})
        assert len(in_flight) > settled, "the last one died after something was published, and before it was settled"

        relays(3, shop.url, kafka, EXACTLY_ONCE)
        shop.buy(3)
        records = [record for record in shop.all_arrived() if record.key not in before]
        assert Counter(record.key for record in records) == dict.fromkeys([*shop.committed(), *uploaded], 1)
        runner = Runners(shop.url, kafka.url)
        try:
            until(has_made(previews, len(uploaded)), "the previews")
        finally:
            runner.running.kill()
            runner.running.wait()
        assert {each["times"] for each in previews.find()} == {1}
