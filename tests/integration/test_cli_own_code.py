"""Destinations and header builders of the user's own code, named in settings as MODULE:ATTRIBUTE."""

import json
import os
from typing import Any

import confluent_kafka.admin as confluent_admin
import pytest
from confluent_kafka import Consumer

from servers import Kafka
from tests.integration.commands import Command

pytestmark = pytest.mark.timeout(120)
kafka_admin: Any = confluent_admin  # its types leave out what it exports

SHOP = """
from pathlib import Path
from pillarbox import Handlers
from pillarbox.envelopes import default_headers
from pillarbox.publisher import PUBLISHED, Publisher

class Shouting(Publisher):
    description = "a file that shouts"

    async def publish(self, batch):
        with Path("shouted").open("a") as file:
            file.writelines(event.type.upper() for event in batch)
        return [PUBLISHED] * len(batch)

publisher = Shouting()
handlers = Handlers()

@handlers.on("order.created")
def handle(event):
    Path("handled").write_text(event.type)

def make():
    return Shouting()

async def make_later():
    return Shouting()

def headers(event):
    return [*default_headers(event), ("region", b"eu")]

number = 7
"""


@pytest.fixture
def shop(on_sqlite: Command) -> Command:
    (on_sqlite.folder / "shop.py").write_text(SHOP)
    assert on_sqlite("events", "add", "order.created", '{"id": 7}', "--key", "7").code == 0
    return on_sqlite


@pytest.mark.parametrize("name", ["publisher", "make"])
def test_a_publisher_is_named_in_the_file(shop: Command, name: str) -> None:
    (shop.folder / "pillarbox.toml").write_text(f"[streams.default]\nto = 'shop:{name}'\n")
    assert shop("status", "--json").json[0]["destination"] == f"shop:{name}", "nothing has served it yet"
    drained = shop("relay", "--drain")
    assert drained.code == 0, drained.err
    assert (shop.folder / "shouted").read_text() == "ORDER.CREATED"
    assert shop("status", "--json").json[0]["destination"] == "a file that shouts"


def test_handlers_are_named_by_a_flag(shop: Command) -> None:
    drained = shop("relay", "--drain", "--to", "shop:handlers", "--mode", "queue")
    assert drained.code == 0, drained.err
    assert (shop.folder / "handled").read_text() == "order.created"


def test_a_bench_measures_a_publisher_of_ones_own(shop: Command) -> None:
    found = shop(
        "bench", "--events", "50", "--rounds", "1", "--duration", "200ms", "--to", "shop:publisher", "--json"
    ).json
    assert found["destination"] == "a file that shouts"
    assert found["drain"]["floor"]["median"] > 0


def test_a_header_builder_is_named_in_the_file(shop: Command, kafka: Kafka) -> None:
    topic = f"own-headers-{os.getpid()}"
    client = kafka_admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    client.create_topics([kafka_admin.NewTopic(topic, 1, 1)])[topic].result()
    to = f"kafka://{kafka.bootstrap_servers}?topic={topic}"
    (shop.folder / "pillarbox.toml").write_text(
        f"[streams.default]\nto = '{to}'\nheaders = 'shop:headers'\non_dead = 'block'\n"
    )
    drained = shop("relay", "--drain")
    assert drained.code == 0, drained.err
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        headers = dict(message.headers() or [])
        assert headers["region"] == b"eu"
        assert headers["event_type"] == b"order.created"
        assert json.loads(message.value() or b"") == {"id": 7}
    finally:
        consumer.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "shop:publihser"], "did you mean 'publisher'?"),
        (["--to", "shpo:publisher"], "there is no module 'shpo'"),
        (["--to", "shop:number"], "shop:number is a int; name a Publisher, or a function that returns one"),
        (["--to", "shop:Shouting"], "shop:Shouting is a class; name a Publisher"),
        (["--to", "shop:make_later"], "shop:make_later is an async function"),
        (["--to", "shop:publisher", "--headers", "shop:headers"], "stream 'default': 'headers' needs a URL"),
        (["--to", "kafka://127.0.0.1:1?topic=a", "--headers", "shop:number"], "shop:number is a int"),
        (["--to", "kafka://127.0.0.1:1?topic=a", "--headers", "headers"], "'headers' does not name a header builder"),
        (["--to", "stdout:", "--headers", "shop:headers"], "a stdout publisher has no option 'headers'"),
        (["--to", "localhost:9092"], "a destination URL cannot start with 'localhost'"),
    ],
)
def test_a_wrong_name_is_one_sentence(shop: Command, words: list[str], said: str) -> None:
    shop("relay", "--drain", *words).failed(2, said)
