"""`make example NAME=wiki`: an example of examples/ with the servers that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

from servers import Kafka, Mongo, MongoStandalone, MySQL, Postgres, Pulsar, Server, ServerError, start_all
from tests.mongo_outbox import database_url

ROOT = Path(__file__).parents[2]


def wiki() -> Sequence[tuple[Sequence[Server], Callable[[], list[str]]]]:
    one, other = Mongo(), MongoStandalone()
    return [
        ([one], lambda: ["examples/wiki/wiki.py", database_url(one.url, "wiki")]),
        ([other], lambda: ["examples/wiki/wiki.py", database_url(other.url, "wiki"), "--without-transactions"]),
    ]


def video_checkout() -> Sequence[tuple[Sequence[Server], Callable[[], list[str]]]]:
    mongo, kafka = Mongo(), Kafka()
    return [
        (
            [mongo, kafka],
            lambda: ["examples/video_checkout/checkout.py", database_url(mongo.url, "video"), kafka.url],
        )
    ]


def entity_cards() -> Sequence[tuple[Sequence[Server], Callable[[], list[str]]]]:
    mongo, kafka = Mongo(), Kafka()
    return [
        ([mongo, kafka], lambda: ["examples/entity_cards/cards.py", database_url(mongo.url, "entities"), kafka.url])
    ]


def orders() -> Sequence[tuple[Sequence[Server], Callable[[], list[str]]]]:
    postgres, pulsar = Postgres(), Pulsar()
    return [
        (
            [postgres, pulsar],
            lambda: [f"ORDERS_URL={postgres.url}", f"ORDERS_PULSAR={pulsar.url}", "examples/orders/orders.py"],
        )
    ]


def dispatcher() -> Sequence[tuple[Sequence[Server], Callable[[], list[str]]]]:
    def command(database: Postgres | MySQL, kafka: Kafka) -> list[str]:
        settings = [f"DISPATCHER_URL={database.url}", f"DISPATCHER_KAFKA={kafka.bootstrap_servers}"]
        return [*settings, "examples/dispatcher/dispatcher.py"]

    return [
        ([database, kafka], partial(command, database, kafka))
        for database, kafka in ((Postgres(), Kafka()), (MySQL(), Kafka()))
    ]


EXAMPLES = {each.__name__: each for each in (wiki, video_checkout, entity_cards, orders, dispatcher)}


def main(names: Sequence[str]) -> int:
    if len(names) != 1 or names[0] not in EXAMPLES:
        known = " or ".join(f"NAME={name}" for name in EXAMPLES)
        print(f"pillarbox: say which example: make example {known}", file=sys.stderr)
        return 2
    for servers, command in EXAMPLES[names[0]]():
        try:
            start_all(servers)
            words = command()  # now that the servers have their ports
            settings = list(takewhile(lambda word: not word.endswith(".py"), words))
            words = words[len(settings) :]
            print("$", *settings, "python", *words, flush=True)
            environment = os.environ | dict(each.split("=", 1) for each in settings)
            code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False).returncode
        except ServerError as error:
            print(f"pillarbox: {error}", file=sys.stderr)
            return 1
        finally:
            for server in servers:
                server.close()
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
