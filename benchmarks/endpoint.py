"""Row: an endpoint behind the middleware of idempotency keys, against the same one with a transaction of its own."""

import asyncio
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from benchmarks.bed import Bed, say
from benchmarks.idempotent import BODY, ORDERS, PREFIX, TURNS, pairs, tables
from benchmarks.pairs import Work, speeds
from benchmarks.report import Row
from benchmarks.scale import Scale
from pillarbox import Idempotency, Outbox

_outbox = Outbox(prefix=PREFIX)


class _Base(DeclarativeBase):
    """Of the table below."""


class _Order(_Base):
    __tablename__ = ORDERS
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


class OrderIn(BaseModel):
    """The body of a request."""

    customer: str
    amount: int


async def _create(session: AsyncSession, given: OrderIn) -> dict[str, Any]:
    order = _Order(customer=given.customer, amount=given.amount)
    session.add(order)
    await session.flush()
    _outbox.add(session, "order.created", given.model_dump(), key=order.id)
    return {"id": order.id}


def with_key(sessions: async_sessionmaker[AsyncSession]) -> FastAPI:
    app = FastAPI()
    once = Idempotency(sessions, scope=lambda _: "c-17", prefix=PREFIX)
    app.add_middleware(once.middleware, paths=["/orders"])

    @app.post("/orders", status_code=201)
    async def create(given: OrderIn, session: Annotated[AsyncSession, Depends(once.session)]) -> dict[str, Any]:
        return await _create(session, given)

    return app


def without_key(sessions: async_sessionmaker[AsyncSession]) -> FastAPI:
    app = FastAPI()

    @app.post("/orders", status_code=201)
    async def create(given: OrderIn) -> dict[str, Any]:
        async with sessions.begin() as session:
            return await _create(session, given)

    return app


def caller(app: FastAPI) -> Work:
    """Calls the application as a server does, without a client in between."""

    async def call(key: str) -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": BODY, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/orders",
            "raw_path": b"/orders",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await app(scope, receive, send)
        assert sent[0]["status"] == 201, sent

    return call


async def measure(url: str, rounds: int, turns: int) -> Row:
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:", 1), pool_size=2)
    sessions = async_sessionmaker(engine)
    async with tables(url) as connection:
        ours, floor = caller(with_key(sessions)), caller(without_key(sessions))
        found = await pairs(connection, rounds, turns, ours, floor)
    await engine.dispose()
    return Row("idempotent-endpoint", "requests/s", *speeds(found))


def endpoint(bed: Bed, scale: Scale) -> Row:
    """FastAPI with SQLAlchemy's sessions on asyncpg: a request that writes an order and an event."""
    row = asyncio.run(measure(bed.url, scale.rounds, TURNS))
    say(f"  {row.name}: ratio {row.as_dict()['ratio']}")
    return row
