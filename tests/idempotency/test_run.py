"""The function form, on every driver: one effect for a key, and the same answer."""

import asyncio
import io
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy
from pymongo import MongoClient

from pillarbox import Idempotency
from pillarbox.conformance.driver_setup import Application, done
from pillarbox.errors import ConfigError, NotInTransaction, SchemaError
from pillarbox.idempotency import Reply
from servers import MongoStandalone, Postgres
from tests.drivers.applications import APPLICATIONS, REPEATED, Sqlite3Cursor
from tests.idempotency.places import DATABASES, Place, new_key, post, sessions_of
from tests.mongo_outbox import MongoOutbox

CASES = [
    (name, kind)
    for name, kinds in APPLICATIONS.items()
    for kind in kinds
    if kind is not Sqlite3Cursor and (name, kind) not in REPEATED
]
IDS = [f"{name}-{kind.__name__}" for name, kind in CASES]


class Shop:
    """A handle that begins transactions, and the function form on it."""

    def __init__(self, place: Place, sessions: Any) -> None:
        self.place = place
        self.sessions = sessions
        self.once = self.idempotency()

    def idempotency(self, scope: str | None = "ann", **settings: Any) -> Idempotency:
        return Idempotency(self.sessions, scope=lambda request: scope, prefix=self.place.prefix, **settings)

    def crowded(self) -> Idempotency:
        """One that takes the whole of a small pool, so that requests meet in the database."""
        return self.idempotency(concurrency=self.once._driver.places)

    def work(self, label: str, reply: Any = (201, {"n": 1})) -> Callable[[Any], Any]:
        """A function that writes an order: plain on plain handles, else awaited."""
        if self.once._driver.is_awaited:

            async def work(tx: Any) -> Any:
                await self.place.order(tx, label)
                return reply

            return work

        def plain(tx: Any) -> Any:
            self.place.order_plainly(tx, label)
            return reply

        return plain


@pytest.fixture
def application(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> tuple[Place, Application]:
    database, kind = request.param
    place = place_of(database)
    return place, kind(place.url)


@pytest_asyncio.fixture
async def shop(application: tuple[Place, Application]) -> AsyncIterator[Shop]:
    place, app = application
    sessions = await sessions_of(app)
    yield Shop(place, sessions)
    if app.has_pool:
        await app.close_pool(sessions)


every_driver = pytest.mark.parametrize("application", CASES, ids=IDS, indirect=True)


@every_driver
@pytest.mark.asyncio
async def test_a_repeated_request_has_one_effect_and_the_same_answer(shop: Shop) -> None:
    key = new_key()
    label = f"one {key}"
    work = shop.work(label, Reply(201, {"item": "lämp"}, [("Location", "/orders/7"), ("Set-Cookie", "a=b")]))
    first = await done(shop.once.run(post(key), work))
    assert (first.status, first.body) == (201, '{"item":"lämp"}'.encode())
    again = await done(shop.once.run(post(key), work))
    assert again.is_replayed
    assert not first.is_replayed
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers == [
        ("content-type", "application/json"),
        ("Location", "/orders/7"),
        ("idempotent-replayed", "true"),
    ]
    assert shop.place.orders(label) == 1

    other = await done(shop.once.run(post(key, b"other"), work))
    assert (other.status, dict(other.headers)["content-type"]) == (422, "application/problem+json")
    assert json.loads(other.body)["status"] == 422
    stranger = await done(shop.idempotency("bob").run(post(key), work))
    assert (stranger.status, stranger.is_replayed) == (201, False)
    assert shop.place.orders(label) == 2


@every_driver
@pytest.mark.asyncio
async def test_a_failed_request_leaves_its_key_free(shop: Shop) -> None:
    key = new_key()
    refused = await done(shop.once.run(post(key), shop.work(key, (402, "no money"))))
    assert (refused.status, refused.body) == (402, b"no money")

    order = shop.work(key)

    async def fail(tx: Any) -> Any:
        await order(tx)
        raise LookupError("no such item")

    def fail_plainly(tx: Any) -> Any:
        order(tx)
        raise LookupError("no such item")

    with pytest.raises(LookupError):
        await done(shop.once.run(post(key), fail if asyncio.iscoroutinefunction(order) else fail_plainly))
    assert shop.place.orders(key) == 0
    paid = await done(shop.once.run(post(key, b"another card"), shop.work(key)))
    assert (paid.status, paid.is_replayed) == (201, False)
    assert shop.place.orders(key) == 1


@pytest.mark.parametrize(
    "application",
    [case for case in CASES if case[0] != "sqlite"],
    ids=[i for i in IDS if "sqlite" not in i],
    indirect=True,
)
@pytest.mark.asyncio
async def test_a_request_that_still_runs_is_told(shop: Shop) -> None:
    key = new_key()
    rival, order = shop.idempotency(), shop.work(key)
    replies: list[Reply] = []

    async def work(tx: Any) -> Any:
        replies.append(await rival.run(post(key), order))
        return await order(tx)

    def plain(tx: Any) -> Any:
        # In a thread, as in a server: a thread of Django has one connection.
        with ThreadPoolExecutor(1) as pool:
            replies.append(pool.submit(rival.run, post(key), order).result())
        return order(tx)

    first = await done(shop.once.run(post(key), work if asyncio.iscoroutinefunction(order) else plain))
    (busy,) = replies
    assert (first.status, busy.status) == (201, 409)
    assert dict(busy.headers)["retry-after"] == "1"
    assert (await done(rival.run(post(key), order))).is_replayed
    assert shop.place.orders(key) == 1


AWAITED = [("postgres", "Asyncpg"), ("mysql", "AsyncMy"), ("mariadb", "AsyncMy"), ("sqlite", "SqlAlchemyAsync")]
PLAIN = [("postgres", "Psycopg2"), ("mysql", "PyMysql"), ("mariadb", "PyMysql"), ("sqlite", "Sqlite3")]


def chosen(names: list[tuple[str, str]], mongo: str) -> pytest.MarkDecorator:
    cases = [case for case in CASES if (case[0], case[1].__name__) in [*names, ("mongo", mongo)]]
    return pytest.mark.parametrize(
        "application", cases, ids=[f"{name}-{kind.__name__}" for name, kind in cases], indirect=True
    )


def check_race(shop: Shop, key: str, replies: list[Reply]) -> None:
    assert shop.place.orders(key) == 1
    good = [reply for reply in replies if reply.status == 201]
    assert {reply.status for reply in replies} <= {201, 409}
    assert len({reply.body for reply in good}) == 1
    assert [reply.is_replayed for reply in good].count(False) == 1
    if shop.place.database == "sqlite":
        assert len(good) == len(replies)


@chosen(AWAITED, "PyMongoAsync")
@pytest.mark.asyncio
async def test_of_16_concurrent_requests_one_has_an_effect(shop: Shop) -> None:
    key = new_key()
    once = shop.crowded()
    replies = await asyncio.gather(*(once.run(post(key), shop.work(key, (201, {"n": n}))) for n in range(16)))
    check_race(shop, key, replies)


@chosen(PLAIN, "PyMongo")
@pytest.mark.asyncio
async def test_of_16_threads_one_has_an_effect(shop: Shop) -> None:
    key = new_key()
    once, start = shop.crowded(), threading.Barrier(16)

    def request(n: int) -> Reply:
        start.wait()
        reply: Reply = once.run(post(key), shop.work(key, (201, {"n": n})))
        return reply

    with ThreadPoolExecutor(16) as threads:
        replies = await asyncio.to_thread(lambda: list(threads.map(request, range(16))))
    check_race(shop, key, replies)


@chosen(PLAIN, "PyMongo")
@pytest.mark.asyncio
async def test_requests_that_are_refused(shop: Shop) -> None:
    work = shop.work("never")
    strict = shop.idempotency(required=True, body_limit=10)
    statuses = {
        "missing": strict.run(post(None), work),
        "empty": strict.run(post(""), work),
        "long": strict.run(post("k" * 256), work),
        "control": strict.run(post("a\x07b"), work),
        "umlaut": strict.run(post("ä"), work),
        "half quoted": strict.run(post('"a'), work),
        "two": strict.run(post("a")._replace(key=("a", "b")), work),
        "large": strict.run(post("a", b"12345678901"), work),
    }
    assert {name: reply.status for name, reply in statuses.items()} == {**dict.fromkeys(statuses, 400), "large": 413}
    assert all(dict(reply.headers)["content-type"] == "application/problem+json" for reply in statuses.values())
    assert shop.place.orders("never") == 0


@chosen(PLAIN, "PyMongo")
@pytest.mark.asyncio
async def test_a_quoted_key_is_the_same_as_a_bare_one(shop: Shop) -> None:
    key = new_key()
    shop.once.run(post(key), shop.work(key))
    assert shop.once.run(post(f' "{key}" '), shop.work(key)).is_replayed


@chosen(PLAIN, "PyMongo")
@pytest.mark.asyncio
async def test_without_a_scope_or_a_key_a_request_runs_each_time(shop: Shop) -> None:
    key = new_key()
    nobody = shop.idempotency(None, required=True)
    for request in (post(key), post(key)):
        assert nobody.run(request, shop.work(key)).status == 201
    assert shop.once.run(post(None), shop.work(key)).status == 201
    assert shop.once.run(post(None), shop.work(key, (409, None))).status == 409
    assert shop.place.orders(key) == 3


@chosen(PLAIN, "PyMongo")
@pytest.mark.asyncio
async def test_an_answer_over_the_limit_is_rolled_back(shop: Shop) -> None:
    key = new_key()
    small = shop.idempotency(answer_limit=10)
    assert small.run(post(key), shop.work(key, (200, b"12345678901"))).status == 500
    assert shop.place.orders(key) == 0
    assert small.run(post(key), shop.work(key, (200, b"1234567890"))).status == 200


@pytest.mark.parametrize("place", DATABASES, indirect=True)
@pytest.mark.asyncio
async def test_work_that_commits_is_told_so(place: Place) -> None:
    sessions = place.handle()
    shop = Shop(place, sessions)
    key = new_key()

    async def commits(tx: Any) -> Any:
        await place.order(tx, key)
        await (tx.commit_transaction() if place.database == "mongo" else tx.commit())
        return 201, None

    with pytest.raises(NotInTransaction, match="leave commit and rollback"):
        await shop.once.run(post(key), commits)
    again = await shop.once.run(post(key), commits)
    assert (again.status, json.loads(again.body)["title"]) == (500, "The answer is unknown")
    assert place.orders(key) == 1
    await place.close(sessions)


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.asyncio
async def test_stricter_transactions_have_one_effect_too(place: Place, level: str) -> None:
    sessions = place.handle(isolation_level=level)
    shop, key = Shop(place, sessions), new_key()
    replies = await asyncio.gather(*(shop.once.run(post(key), shop.work(key, (201, {"n": n}))) for n in range(16)))
    assert place.orders(key) == 1
    assert {reply.status for reply in replies} <= {201, 409, 503}
    await place.close(sessions)


def test_a_wsgi_application(place_of: Callable[[str], Place]) -> None:
    place = place_of("sqlite")
    engine = sqlalchemy.create_engine(place.url)
    once = Idempotency(engine, scope=lambda environ: environ["REMOTE_USER"], prefix=place.prefix)
    key, seen = new_key(), []

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        def work(tx: sqlalchemy.Connection) -> tuple[int, Any]:
            place.order_plainly(tx, key)
            seen.append(environ["wsgi.input"].read())
            return 201, {"size": environ["CONTENT_LENGTH"]}

        reply = once.run(environ, work)
        start_response(str(reply.status), reply.headers)
        return [reply.body]

    def call(body: bytes, user: str = "ann") -> tuple[str, bytes]:
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/orders",
            "QUERY_STRING": "",
            "REMOTE_USER": user,
            "HTTP_IDEMPOTENCY_KEY": key,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body + b"next"),
        }
        statuses: list[str] = []
        (answer,) = application(environ, lambda status, headers: statuses.append(status))
        return statuses[0], answer

    assert call(b"lamp") == call(b"lamp") == ("201", b'{"size":"4"}')
    assert call(b"desk")[0] == "422"
    assert seen == [b"lamp"]
    assert place.orders(key) == 1
    engine.dispose()


def test_mongodb_needs_a_replica_set(mongo_standalone: MongoStandalone) -> None:
    made = MongoOutbox(mongo_standalone.url)
    with MongoClient[Any](made.url) as client, pytest.raises(ConfigError, match="replica set"):
        Idempotency(client, scope=lambda request: "ann", prefix=made.prefix).run(post("a"), lambda tx: (200, None))
    made.close()


def test_tables_that_are_missing_are_told(tmp_path: Path) -> None:
    once = Idempotency(lambda: sqlite3.connect(tmp_path / "empty.db"), scope=lambda request: "ann")
    with pytest.raises(SchemaError, match=r"pillarbox init|manage\.py migrate"):
        once.run(post("a"), lambda tx: (200, None))


def test_a_database_that_is_away_is_503(postgres: Postgres) -> None:
    engine = sqlalchemy.create_engine("postgresql+psycopg://127.0.0.1:1/shop")
    reply = Idempotency(engine, scope=lambda request: "ann").run(post("a"), lambda tx: (200, None))
    assert (reply.status, dict(reply.headers)["retry-after"]) == (503, "1")


def test_settings_that_are_wrong(tmp_path: Path) -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(ConfigError, match="for each request"):
        Idempotency(connection, scope=lambda request: "ann")
    connection.close()
    with pytest.raises(ConfigError, match="concurrency is 0"):
        Idempotency(lambda: connection, scope=lambda request: "ann", concurrency=0)
    once = Idempotency(lambda: sqlite3.connect(tmp_path / "a.db"), scope=lambda request: 7)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="scope returned a value of type int"):
        once.run(post("a"), lambda tx: (200, None))

    async def work(tx: Any) -> tuple[int, None]:
        return 200, None

    with pytest.raises(ConfigError, match="an async function, and its sessions are plain ones"):
        once.run(post("a"), work)
    with pytest.raises(ConfigError, match="cannot read a list"):
        once.run([], lambda tx: (200, None))
