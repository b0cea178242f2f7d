"""The cards of examples/, whose consumers are killed."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from servers import Kafka, Mongo
from servers.fixtures import OwnServer
from tests.mongo_outbox import database_url

PROGRAM = Path(__file__).parents[2] / "examples" / "entity_cards" / "cards.py"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_change_is_applied_once_though_consumers_are_killed(mongo: Mongo, own_server: OwnServer) -> None:
    kafka = own_server(Kafka)  # with nothing in its topic
    url = database_url(mongo.url, f"cards_{uuid4().hex[:12]}")
    words = [sys.executable, str(PROGRAM), url, kafka.url, "--kills", "4"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr
    assert "40 users with 400 changes; 4 consumers killed" in told.stdout
    assert "40 cards show the last state, and each change was applied once" in told.stdout
    client: MongoClient[dict[str, Any]] = MongoClient(url)
    with closing(client):
        database = client.get_default_database()
        users = {user["_id"]: user for user in database["users"].find()}
        cards = {card["_id"]: card for card in database["cards"].find()}
        assert len(users) == 40
        assert cards == {name: {"_id": name, "name": "name 9", "entity_version": 10, "changes": 10} for name in users}
        assert database["outbox_inbox"].count_documents({}) == 400
