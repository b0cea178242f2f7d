"""Orders of several shops: a request's order, its events, its idempotency key and its answer are one transaction.

FastAPI and SQLAlchemy on PostgreSQL, and Pulsar. The relay runs in the application and publishes to a topic for each
tenant. A projector is a service of its own that counts the sales, each one once. See the README beside this file.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any
from uuid import UUID, uuid4

import httpx
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import (
    Aggregate,
    Consumer,
    Event,
    Handlers,
    Idempotency,
    Inbox,
    Outbox,
    Reject,
    Relay,
    Stream,
    UnitOfWork,
    current_tenant,
)
from pillarbox.observe.prometheus import Prometheus
from pillarbox.operations import count_dead
from pillarbox.store import Filter

URL = os.environ.get("ORDERS_URL", "postgresql://localhost/orders")
PULSAR = os.environ.get("ORDERS_PULSAR", "pulsar://localhost:6650")
TENANTS = ("acme", "rival")


class OrderPlaced(BaseModel):
    order_id: UUID
    item: str
    cents: int


class OrderPaid(BaseModel):
    order_id: UUID
    cents: int


class OrderCancelled(BaseModel):
    order_id: UUID
    reason: str


TYPES = {"order.placed": OrderPlaced, "order.paid": OrderPaid, "order.cancelled": OrderCancelled}
engine = create_async_engine(URL.replace("postgresql://", "postgresql+asyncpg://", 1))
sessions = async_sessionmaker(engine, expire_on_commit=False)
metrics = Prometheus()
outbox, handlers = Outbox(types=TYPES, observers=[metrics]), Handlers(unknown="skip")
inbox = Inbox("sales", observers=[metrics])


def topic_of(tenant: str) -> str:
    """Each tenant has a topic of its own."""
    return f"orders-{tenant}"


class Base(DeclarativeBase):
    pass


class Order(Base, Aggregate):
    """An aggregate: it checks its rules and records its events."""

    aggregate_type = "order"
    __tablename__ = "orders"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    item: Mapped[str]
    cents: Mapped[int]
    state: Mapped[str]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # SQLAlchemy reads it once

    @classmethod
    def place(cls, tenant: str, item: str, cents: int) -> "Order":
        order = cls(id=uuid4(), tenant=tenant, item=item, cents=cents, state="placed")
        order._tell("order.placed", OrderPlaced(order_id=order.id, item=item, cents=cents))
        return order

    def pay(self) -> None:
        self._move("placed", "paid")
        self._tell("order.paid", OrderPaid(order_id=self.id, cents=self.cents))

    def cancel(self, reason: str) -> None:
        self._move("placed", "cancelled")
        self._tell("order.cancelled", OrderCancelled(order_id=self.id, reason=reason))

    def _tell(self, type: str, payload: BaseModel) -> None:
        self.add_event(type, payload, topic=topic_of(self.tenant))

    def _move(self, before: str, after: str) -> None:
        if self.state != before:
            raise WrongState(f"the order is {self.state}, not {before}")
        self.state = after


class WrongState(Exception):
    """The order cannot do that any more."""


class Sales(Base):
    """A projection: what each tenant has sold. Only a tenant with a contract has a row."""

    __tablename__ = "sales"
    tenant: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int] = mapped_column(default=0)
    cents: Mapped[int] = mapped_column(default=0)


# From now on a session writes the events of its orders with the orders.
outbox.follow(Base)


class Orders:
    """The repository that a unit of work gives for Order."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._session: AsyncSession = uow.tx

    async def get(self, order_id: UUID) -> Order:
        found = await self._session.get(Order, order_id)
        if found is None:
            raise LookupError(f"there is no order {order_id}")
        return found


async def cancel(tenant: str, order_id: UUID, reason: str) -> None:
    """The back office works without HTTP: a unit of work is its transaction."""
    async with UnitOfWork(outbox, sessions, tenant=tenant, repositories={Order: Orders}) as uow:
        order: Order = await uow.repository(Order).get(order_id)
        order.cancel(reason)


@handlers.on("order.paid")
@inbox.once(sessions)
async def count_sale(event: Event, session: AsyncSession) -> None:
    """Adding is not idempotent. The inbox makes it happen once, however often the event comes."""
    sales = await session.get(Sales, event.tenant, with_for_update=True)
    if sales is None:
        raise Reject(f"{event.tenant} has no contract")  # a dead letter, until somebody makes one and replays it
    sales.orders += 1
    sales.cents += OrderPaid.model_validate_json(event.payload).cents


# Every event has a topic. The relay looks every 0.1 s while events come, and every 2 s at rest. PostgreSQL wakes it
# earlier.
relay = Relay(
    URL,
    [Stream("default", to=f"{PULSAR}?topic=*", poll="100ms", poll_limit="2s", max_attempts=5)],
    observers=[metrics],
)

# For ``pillarbox consume orders:projector``. Events without a handler are skipped.
projector = Consumer(
    "sales",
    f"{PULSAR}?topic={','.join(map(topic_of, TENANTS))}",
    to=handlers,
    store=URL,
    max_attempts=3,
    observers=[metrics],
)


async def make_tables() -> None:
    await relay.store.migrate()
    await relay.store.close()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()  # its connections belong to this event loop


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with relay.lifespan(app):
        yield
    await engine.dispose()


def tenant_of(request: Request) -> str | None:
    """An example has no passwords. Yours takes the tenant and the user from a token that it has checked."""
    return request.headers.get("x-tenant")


app = FastAPI(lifespan=lifespan)
once = Idempotency(sessions, scope=tenant_of, required=True, observers=[metrics])
app.mount("/outbox", relay.health)  # /outbox/livez, /outbox/readyz and /outbox/metrics
app.add_middleware(once.middleware, paths=["/orders"])


async def known_tenant(x_tenant: Annotated[str, Header()]) -> str:
    current_tenant.set(x_tenant)  # of the events that this request's orders record
    return x_tenant


Tenant = Annotated[str, Depends(known_tenant)]
Session = Annotated[AsyncSession, Depends(once.session)]


class NewOrder(BaseModel):
    item: str
    cents: int


class OrderOut(BaseModel):
    id: UUID
    item: str
    cents: int
    state: str
    version: int


def shown(order: Order) -> OrderOut:
    return OrderOut(id=order.id, item=order.item, cents=order.cents, state=order.state, version=order.version)


@app.post("/orders", status_code=201)
async def place(new: NewOrder, tenant: Tenant, session: Session) -> OrderOut:
    order = Order.place(tenant, new.item, new.cents)
    session.add(order)
    await session.flush()
    return shown(order)


@app.post("/orders/{order_id}/pay")
async def pay(order_id: UUID, tenant: Tenant, session: Session) -> OrderOut:
    found = await session.execute(select(Order).where(Order.id == order_id, Order.tenant == tenant).with_for_update())
    order = found.scalar_one_or_none()
    if order is None:
        raise HTTPException(404, "there is no such order")
    try:
        order.pay()
    except WrongState as error:
        raise HTTPException(409, str(error)) from error
    await session.flush()
    return shown(order)


@app.get("/sales")
async def sales(tenant: Tenant) -> dict[str, int]:
    async with sessions() as session:
        found = await session.get(Sales, tenant)
    return {"orders": found.orders, "cents": found.cents} if found else {"orders": 0, "cents": 0}


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Serve the application on a free port; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.wait([running], timeout=0.02)
        if running.done():
            raise SystemExit("the application did not start; its log says why")
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running


@contextmanager
def projecting() -> Iterator[None]:
    """The projector as a service."""
    words = [sys.executable, "-m", "pillarbox", "consume", "orders:projector", "--log-level", "error"]
    service = subprocess.Popen(words, cwd=os.path.dirname(os.path.abspath(__file__)))
    try:
        yield
    finally:
        service.terminate()
        service.wait()


async def agree(tenant: str) -> None:
    """Make a contract."""
    async with sessions.begin() as session:
        session.add(Sales(tenant=tenant, orders=0, cents=0))


async def replay() -> None:
    """What an operator types."""
    words = [sys.executable, "-m", "pillarbox", "dead", "replay", "--consumer", "sales", "--all"]
    environment = os.environ | {"PILLARBOX_STORE": URL}
    await asyncio.to_thread(subprocess.run, words, env=environment, check=True, stdout=subprocess.DEVNULL)


async def story(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, headers={"X-Tenant": "acme"}, timeout=30) as client:

        async def post(path: str, key: str, body: Any = None, tenant: str = "acme") -> httpx.Response:
            """As a client should: it sends the request again, with the same key, while the first one runs."""
            while True:
                reply = await client.post(path, json=body, headers={"Idempotency-Key": key, "X-Tenant": tenant})
                if reply.status_code != 409 or "retry-after" not in reply.headers:
                    return reply
                await asyncio.sleep(0.05)

        lamp = {"item": "lamp", "cents": 1999}
        first = await post("/orders", "order-1", lamp)
        placed = first.json()
        print(f"placed: {first.status_code}, {placed['state']}, version {placed['version']}")
        again = await post("/orders", "order-1", lamp)
        mark, is_equal = again.headers["idempotent-replayed"], again.content == first.content
        print(f"the same request again: {again.status_code}, replayed: {mark}, equal to the byte: {is_equal}")
        other = await post("/orders", "order-1", {"item": "lamp", "cents": 1})
        print(f"the same key with another body: {other.status_code}")
        theirs = await post("/orders", "order-1", lamp, tenant="rival")
        print(f"the same key of another tenant: {theirs.status_code}, own order: {theirs.json()['id'] != placed['id']}")

        paid = await asyncio.gather(*(post(f"/orders/{placed['id']}/pay", "pay-1") for _ in range(8)))
        codes, bodies = {each.status_code for each in paid}, {each.content for each in paid}
        print(f"one payment sent 8 times at once: status {codes}, different answers: {len(bodies)}")

        second = (await post("/orders", "order-2", {"item": "chair", "cents": 4900})).json()
        await cancel("acme", UUID(second["id"]), "out of stock")
        late = await post(f"/orders/{second['id']}/pay", "pay-2")
        print(f"payment of a cancelled order: {late.status_code}")

        await post(f"/orders/{theirs.json()['id']}/pay", "pay-1", tenant="rival")
        await relay.drain()

        async def sales_of(tenant: str) -> str:
            """Wait until the projector has counted one."""
            while True:
                sold = (await client.get("/sales", headers={"X-Tenant": tenant})).json()
                if sold["orders"]:
                    return f"{sold['orders']} order, {sold['cents']} cents"
                await asyncio.sleep(0.1)

        print(f"sales of acme: {await sales_of('acme')}")
        dead = 0
        while not dead:
            dead = await count_dead(relay.store, Filter(consumer="sales"))
            await asyncio.sleep(0.1)
        print("a sale of rival, which has no contract, is a dead letter")
        await agree("rival")
        await replay()
        print(f"replayed with a contract, sales of rival: {await sales_of('rival')}")


async def play() -> None:
    await make_tables()
    await agree("acme")
    async with serving() as url:
        with projecting():
            await story(url)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Play a story with orders, or make the tables and serve them.")
    arguments.add_argument("--serve", type=int, metavar="PORT", help="serve on this port, until you end it")
    chosen = arguments.parse_args()
    if chosen.serve is None:
        asyncio.run(play())
    else:
        asyncio.run(make_tables())
        uvicorn.run(app, host="127.0.0.1", port=chosen.serve)


if __name__ == "__main__":
    main()
