"""An adapter whose library is not installed names the extra to install."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
for library in sys.argv[2].split():
    sys.modules[library] = None
from pillarbox.errors import MissingExtra
try:
    __import__(sys.argv[1])
except MissingExtra as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "libraries", "extra"),
    [
        ("pillarbox.stores.postgres", "asyncpg", "postgres"),
        ("pillarbox.stores.mysql", "asyncmy", "mysql"),
        ("pillarbox.stores.mongo", "bson pymongo", "mongo"),
        ("pillarbox.publishers.kafka", "confluent_kafka", "kafka"),
        ("pillarbox.publishers.rabbitmq", "aiormq pamqp", "rabbitmq"),
        ("pillarbox.publishers.nats", "nats", "nats"),
        ("pillarbox.publishers.redis", "redis", "redis"),
        ("pillarbox.sources.rabbitmq", "aiormq pamqp", "rabbitmq"),
        ("pillarbox.publishers.http", "aiohttp yarl", "http"),
    ],
)
def test_a_missing_extra_is_named(module: str, libraries: str, extra: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, module, libraries], capture_output=True, text=True)
    assert done.stdout.endswith(f" needs an extra; install it with: pip install 'pillarbox[{extra}]'\n"), done.stderr


WITHOUT_GREENLET = """
import sys
sys.modules["greenlet"] = None
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from pillarbox import Idempotency, Inbox, Outbox
engine, outbox = create_engine(sys.argv[1]), Outbox()
with Session(engine) as session, session.begin():
    outbox.add(session, "by.a.session", {})
    assert Inbox("mailer").record(session, outbox.event("x", {}))
with engine.begin() as connection:
    outbox.add(connection, "by.a.connection", {})
with outbox.transaction(engine) as tx:
    tx.add("by.an.engine", {})
scoped = scoped_session(sessionmaker(engine))
outbox.add(scoped, "by.a.scoped.session", {})
scoped.commit()
scoped.remove()
Idempotency(sessionmaker(engine), scope=str)
with engine.connect() as connection:
    print(*connection.exec_driver_sql("SELECT type FROM outbox_event ORDER BY seq").scalars())
engine.dispose()
"""


def test_plain_sqlalchemy_needs_no_greenlet(outbox_url: str) -> None:
    """SQLAlchemy installs greenlet for its asynchronous part only, from 2.1 on."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_GREENLET, outbox_url], capture_output=True, text=True
    )
    assert done.stdout == "by.a.session by.a.connection by.an.engine by.a.scoped.session\n", done.stderr
