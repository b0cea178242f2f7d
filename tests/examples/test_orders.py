"""The orders of examples/: requests, aggregates and a unit of work on PostgreSQL, and a projector behind Pulsar."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from servers import Postgres, Pulsar

PROGRAM = Path(__file__).parents[2] / "examples" / "orders" / "orders.py"
STORY = """\
placed: 201, placed, version 1
the same request again: 201, replayed: true, equal to the byte: True
the same key with another body: 422
the same key of another tenant: 201, own order: True
one payment sent 8 times at once: status {200}, different answers: 1
payment of a cancelled order: 409
sales of acme: 1 order, 1999 cents
a sale of rival, which has no contract, is a dead letter
replayed with a contract, sales of rival: 1 order, 1999 cents
"""
EVENTS = [
    ("order.placed", "acme", 1),
    ("order.placed", "rival", 1),
    ("order.paid", "acme", 2),
    ("order.placed", "acme", 1),
    ("order.cancelled", "acme", 2),
    ("order.paid", "rival", 2),
]


@pytest.mark.timeout(300)
def test_each_request_and_each_sale_happens_once(postgres: Postgres, pulsar: Pulsar) -> None:
    name = f"orders_{uuid4().hex[:12]}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = f"{postgres.url.rpartition('/')[0]}/{name}"
    told = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"ORDERS_URL": url, "ORDERS_PULSAR": pulsar.url},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout == STORY
    with psycopg.connect(url) as connection:
        events = connection.execute("SELECT type, tenant, aggregate_version FROM outbox_event ORDER BY seq").fetchall()
        assert events == EVENTS
        topics = connection.execute("SELECT DISTINCT tenant, topic FROM outbox_event ORDER BY 1").fetchall()
        assert topics == [("acme", "orders-acme"), ("rival", "orders-rival")]
        assert connection.execute("SELECT status, count(*) FROM outbox_event GROUP BY 1").fetchall() == [
            ("published", 6)
        ]
        assert connection.execute("SELECT count(*) FROM outbox_inbox").fetchone() == (2,)
