"""The middleware on every database: status codes, replays, races, streams, background tasks, clients that leave."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
import pytest_asyncio
from fastapi import Depends, FastAPI
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel
from pymongo.errors import InvalidOperation
from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Idempotency
from pillarbox.errors import ConfigError, NotInTransaction
from tests.idempotency.places import DATABASES, Place, new_key
from tests.idempotency.shop import Shop, stored_part, user_of

every_database = pytest.mark.parametrize("place", DATABASES, indirect=True)
only_postgres = pytest.mark.parametrize("place", ["postgres"], indirect=True)


@pytest_asyncio.fixture
async def handle(place: Place) -> AsyncIterator[Any]:
    made = place.handle(connect_args={"timeout": 30}) if place.database == "sqlite" else place.handle()
    yield made
    await place.close(made)


@pytest.fixture
def shop(place: Place, handle: Any) -> Shop:
    return Shop(place, handle)


@every_database
@pytest.mark.asyncio
async def test_every_status_code(place: Place, handle: Any) -> None:
    shop = Shop(place, handle, required=True, body_limit=200)
    key = new_key()
    first = await shop.post(key)
    assert (first.status_code, first.headers["set-cookie"]) == (
        201,
        "visit=1; Path=/; SameSite=lax, other=2; Path=/; SameSite=lax",
    )
    replayed = await shop.post(key)
    assert replayed.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert "set-cookie" not in replayed.headers
    assert "x-hop" not in replayed.headers
    assert stored_part(replayed) == stored_part(first)
    assert place.orders(key) == shop.calls == 1

    problems = {
        "other body": await shop.post(key, label="other"),
        "other query": await shop.post(key, path="/orders?a=1"),
        "missing": await shop.post(None),
        "malformed": await shop.post("k" * 256),
        "large": await shop.post(new_key(), raw=b"1" * 201),
    }
    assert {name: each.status_code for name, each in problems.items()} == {
        "other body": 422,
        "other query": 422,
        "missing": 400,
        "malformed": 400,
        "large": 413,
    }
    for each in problems.values():
        assert each.headers["content-type"] == "application/problem+json"
        assert each.json().keys() == {"type", "title", "status", "detail"}
        assert each.json()["status"] == each.status_code
    assert shop.calls == 1


@every_database
@pytest.mark.asyncio
async def test_a_failed_request_leaves_its_key_free(shop: Shop) -> None:
    key = new_key()
    assert (await shop.post(key, do="raise")).status_code == 500
    assert (await shop.post(key, do="refuse")).status_code == 402
    assert (await shop.post(key, do="redirect")).status_code == 307
    assert (await shop.post(key, raw=b"no json")).status_code == 500
    assert shop.place.orders(key) == 0
    assert (await shop.post(key)).status_code == 201
    assert shop.place.orders(key) == 1


@every_database
@pytest.mark.asyncio
async def test_of_16_concurrent_requests_one_has_an_effect(shop: Shop) -> None:
    key = new_key()
    answers = await asyncio.gather(*(shop.post(key) for _ in range(16)))
    good = [each for each in answers if each.status_code == 201]
    assert {each.status_code for each in answers} <= {201, 409}
    assert len({str(stored_part(each)) for each in good}) == 1
    assert sum("idempotent-replayed" not in each.headers for each in good) == 1
    assert shop.place.orders(key) == 1
    assert stored_part(await shop.post(key)) == stored_part(good[0])
    if shop.place.database == "sqlite":
        assert len(good) == 16


@every_database
@pytest.mark.asyncio
async def test_a_request_that_still_runs(shop: Shop) -> None:
    key, running, go_on = new_key(), asyncio.Event(), asyncio.Event()

    async def wait(tx: Any) -> None:
        running.set()
        await go_on.wait()

    shop.hook = wait
    first = asyncio.create_task(shop.post(key))
    await running.wait()
    if shop.place.database == "sqlite":
        second = asyncio.create_task(shop.post(key))
        go_on.set()
        assert (await second).headers["idempotent-replayed"] == "true"
    else:
        busy = await shop.post(key)
        assert (busy.status_code, busy.headers["retry-after"]) == (409, "1")
        go_on.set()
    assert (await first).status_code == 201
    assert shop.place.orders(key) == 1


@every_database
@pytest.mark.asyncio
async def test_two_callers_may_use_one_key(shop: Shop) -> None:
    key = new_key()
    answers = [await shop.post(key, user=user) for user in ("ann", "bob", "ann", None, None)]
    assert [each.json()["call"] for each in answers] == [1, 2, 1, 3, 4]
    assert shop.place.orders(key) == 4


@every_database
@pytest.mark.asyncio
async def test_the_answer_is_sent_after_the_commit_and_before_background_tasks(shop: Shop) -> None:
    key = new_key()
    seen: list[Any] = []

    async def late(tx: Any) -> None:
        seen.append("background")
        with pytest.raises((NotInTransaction, InvalidRequestError, InvalidOperation)):
            await shop.place.order(tx, key)
        seen.append("refused")

    async def send(message: Any) -> None:
        seen.append((message["type"], shop.place.orders(key)))

    shop.background = late
    for _ in range(2):
        await shop.app(scope_of(key), receiving(body_of(label=key)), send)
    sent: list[Any] = [("http.response.start", 1), ("http.response.body", 1)]
    assert seen == [*sent, "background", "refused", *sent]
    assert shop.place.orders(key) == 1


@every_database
@pytest.mark.asyncio
async def test_a_stream_is_held_back_and_stored(place: Place, handle: Any) -> None:
    shop, key = Shop(place, handle, answer_limit=100), new_key()
    first = await shop.post(key, do="stream", lines=10)
    assert (first.status_code, first.content.count(b"\n")) == (201, 10)
    again = await shop.post(key, do="stream", lines=10)
    assert stored_part(again) == stored_part(first)
    large = await shop.post(f"{key} large", do="stream", lines=1000)
    assert large.status_code == 500
    assert "answer_limit" in large.json()["detail"]
    assert (place.orders(key), place.orders(f"{key} large")) == (1, 0)
    assert (await shop.post(f"{key} large")).status_code == 201


def scope_of(key: str, **more: Any) -> dict[str, Any]:
    headers = [(b"idempotency-key", key.encode()), (b"user", b"ann")]
    asked = {"type": "http", "method": "POST", "path": "/orders", "query_string": b"", "headers": headers}
    return {**asked, "asgi": {"version": "3.0", "spec_version": "2.3"}, **more}


def body_of(**asked: Any) -> list[dict[str, Any]]:
    body = json.dumps(asked).encode()
    parts = [body[:5], body[5:]]
    return [{"type": "http.request", "body": part, "more_body": part is parts[0]} for part in parts]


def receiving(messages: list[dict[str, Any]]) -> Any:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


DISCONNECT = {"type": "http.disconnect"}


@every_database
@pytest.mark.asyncio
async def test_clients_that_leave(shop: Shop) -> None:
    key, sent = new_key(), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def gone(message: Any) -> None:
        raise OSError("the client has gone")

    # while it sends the body
    await shop.app(scope_of(key), receiving([body_of(label=key)[0], DISCONNECT]), send)
    assert (shop.calls, sent) == (0, [])
    # during a stream
    endless = body_of(label=key, do="stream", lines=0)
    await shop.app(scope_of(key), receiving([*endless, DISCONNECT]), send)
    assert sent == []
    assert shop.place.orders(key) == 0
    # when the answer is sent
    with pytest.raises(OSError, match="gone"):
        await shop.app(scope_of(key), receiving(body_of(label=key)), gone)
    assert shop.place.orders(key) == 1
    await shop.app(scope_of(key), receiving(body_of(label=key)), send)
    assert (sent[0]["status"], (b"idempotent-replayed", b"true") in sent[0]["headers"]) == (201, True)
    assert shop.place.orders(key) == 1


@every_database
@pytest.mark.asyncio
async def test_a_request_that_is_cancelled_leaves_its_key_free(shop: Shop) -> None:
    key, running = new_key(), asyncio.Event()

    async def wait(tx: Any) -> None:
        running.set()
        await asyncio.Event().wait()

    shop.hook = wait
    request = asyncio.create_task(shop.post(key))
    await running.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    shop.hook = None
    assert (await shop.post(key)).status_code == 201
    assert shop.place.orders(key) == 1


@every_database
@pytest.mark.asyncio
async def test_a_transaction_that_the_database_ends_is_503(shop: Shop) -> None:
    key, ran = new_key(), []

    async def end(tx: Any) -> None:
        match shop.place.database:
            case "mongo":
                await tx.client.admin.command("killSessions", [tx.session_id])
            case "sqlite":
                connection = await (await tx.connection()).get_raw_connection()
                await connection.driver_connection.close()
            case "postgres":
                await tx.connection()
                await kill(shop, "SELECT pg_terminate_backend({})", "SELECT pg_backend_pid()", tx)
            case _:
                await kill(shop, "KILL {}", "SELECT connection_id()", tx)

    async def background(tx: Any) -> None:
        ran.append(tx)

    shop.hook, shop.background = end, background
    answer = await shop.post(key)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["content-type"] == "application/problem+json"
    assert not ran, "a background task of an answer that was not sent"
    shop.hook = None
    assert (await shop.post(key)).status_code == 201
    assert shop.place.orders(key) == 1


async def kill(shop: Shop, text: str, question: str, tx: AsyncSession) -> None:
    number = (await (await tx.connection()).exec_driver_sql(question)).scalar_one()
    async with shop.handle() as other:
        await (await other.connection()).exec_driver_sql(text.format(number))


@only_postgres
@pytest.mark.asyncio
async def test_a_commit_that_fails_is_500_and_nothing_was_sent_before(shop: Shop) -> None:
    key, table = new_key(), f"{shop.place.prefix}_deferred"
    async with shop.handle.begin() as session:
        await (await session.connection()).exec_driver_sql(
            f"CREATE TABLE {table} (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"
        )

    async def twice(tx: AsyncSession) -> None:
        await (await tx.connection()).exec_driver_sql(f"INSERT INTO {table} VALUES (1), (1)")

    shop.hook = twice
    answer = await shop.post(key)
    assert (answer.status_code, answer.json()["title"]) == (500, "The request failed")
    assert shop.place.orders(key) == 0
    shop.hook = None
    assert (await shop.post(key)).status_code == 201


@only_postgres
@pytest.mark.asyncio
async def test_requests_that_need_a_second_connection_do_not_starve(place: Place) -> None:
    handle = place.handle(pool_size=2, max_overflow=2, pool_timeout=60)
    shop = Shop(place, handle)
    both = asyncio.Barrier(2)

    async def second(tx: Any) -> None:
        await both.wait()  # as many requests as have a transaction at once
        async with handle() as session:
            await session.connection()

    shop.hook = second
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(shop.post(new_key()) for _ in range(8)))
    assert [each.status_code for each in answers] == [201] * 8
    await place.close(handle)


@only_postgres
@pytest.mark.asyncio
async def test_a_key_costs_no_commit(shop: Shop) -> None:
    engine, ended = shop.handle.kw["bind"].sync_engine, Counter[str]()
    for name in ("begin", "commit", "rollback"):
        event.listen(engine, name, lambda connection, name=name: ended.update([name]))
    event.listen(engine, "before_cursor_execute", lambda *call: ended.update(["statements"]))
    await shop.post(None)
    without = ended.copy()
    await shop.post(new_key())
    with_key = ended - without
    assert (without["begin"], without["commit"], without["rollback"]) == (1, 1, 0)
    assert with_key == without + Counter(statements=2)  # the claim and the answer


@every_database
@pytest.mark.asyncio
async def test_other_requests_pass(shop: Shop) -> None:
    async with AsyncClient(transport=ASGITransport(shop.app), base_url="http://shop") as client:
        with pytest.raises(NotInTransaction, match="add its path"):
            await client.request("GET", "/orders", json={"label": "never"})
        assert (await client.post("/ordersandmore")).status_code == 404


class NewOrder(BaseModel):
    label: str


@every_database
@pytest.mark.asyncio
async def test_a_dependency_of_fastapi(place: Place, handle: Any) -> None:
    once = Idempotency(handle, scope=user_of, prefix=place.prefix)
    app = FastAPI()
    app.add_middleware(once.middleware, paths=["/orders"])

    @app.post("/orders", status_code=201)
    async def create(order: NewOrder, session: Annotated[Any, Depends(once.session)]) -> NewOrder:
        await place.order(session, order.label)
        return order

    key = new_key()
    headers = {"idempotency-key": key, "user": "ann"}
    async with AsyncClient(transport=ASGITransport(app), base_url="http://shop", headers=headers) as client:
        assert (await client.post("/orders", json={})).status_code == 422
        answers = [await client.post("/orders", json={"label": key}) for _ in range(2)]
    assert [each.json() for each in answers] == [{"label": key}] * 2
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert place.orders(key) == 1
    assert once.session is once.session, "an override of a dependency finds it by its identity"


def test_settings_that_are_wrong() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("never called")

    plain = Idempotency(lambda: sqlite3.connect(":memory:"), scope=user_of)
    with pytest.raises(ConfigError, match=r"once\.run"):
        plain.middleware(app)

    async def open_nothing() -> None:
        raise AssertionError("never called")

    awaited = Idempotency(open_nothing, scope=user_of)
    with pytest.raises(ConfigError, match="pass a list"):
        awaited.middleware(app, paths="/orders")
