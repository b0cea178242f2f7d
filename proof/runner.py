"""A run: servers, writers, relays and faults for a while, then rest. It leaves a history."""

import asyncio
import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from pillarbox import __version__
from pillarbox.errors import PillarboxError
from proof.brokers import HANDLERS, Broker, broker_of
from proof.content import QUEUE, STREAM, keys_of
from proof.crew import Crew
from proof.databases import kind_of
from proof.databases.base import Database
from proof.deliveries import from_ledger
from proof.history import IN_STATE, History, Log, Run, save
from proof.injector import Injector
from proof.migrator import migrate
from proof.network import Network
from proof.samples import Samples
from proof.worker import Orders
from proof.writer import Load

_REJECTED_BYTES: Final = 300_000  # more than LARGEST_BYTES of the brokers
_KEYS: Final = 24
_TASKS: Final = 8  # keys of the queue
_LONG_RUN_SECONDS: Final = 120.0
_LONG_KEY: Final = "key-long"
_LONG_HOLD_SECONDS: Final = 45.0
_CONNECTIONS_BOUND: Final = 150
_MEMORY_BOUND_MB: Final = 400
_PATIENT_SECONDS: Final = 60.0
# Less than the timeout of a transaction, and both are shorter than a pause.
EXACTLY_ONCE_LEASE: Final = 3.0
_QUIET_SAMPLES: Final = 4  # after this many empty samples in a row the outbox is at rest


@dataclass(slots=True)
class Plan:
    """The settings of a run.

    rejected, flaky, held, queued, requests: shares of the load; None: the default of the store and the broker.
    """

    store: str = "postgres"
    broker: str = "kafka"
    seconds: float = 30.0  # of load, after everything has started
    seed: int = 1
    workers: int = 3
    writers: int = 3
    faults: str = "all"  # none, term, or all
    on_dead: str = "skip"
    planted: str | None = None
    delivery: Literal["at-least-once", "exactly-once"] = "at-least-once"
    only: str | None = None  # one kind of fault; after a colon its detail
    lease_seconds: float = 4.0
    prune_seconds: float = 5.0
    least_faults: int = 0  # the load goes on until there were this many faults
    least_transactions: int = 0
    least_kills: int = 0
    every_point: bool = False  # and until a relay was killed at each point
    stuck_seconds: float = 60.0  # a backlog that does not change for this long is stuck
    rejected: float | None = None
    flaky: float | None = None
    held: float | None = None
    queued: float | None = None
    requests: float | None = None
    hold_seconds: float = 2.0  # the longest that a transaction is held open
    writers_clock: float = 0.0  # the error of the first writer's clock in seconds


def _silent(line: str) -> None:
    """Print nothing."""


def perform(plan: Plan, folder: Path, tell: Callable[[str], None] = _silent) -> History:
    """Run the plan and read its history. ``tell`` gets lines about the progress."""
    folder.mkdir(parents=True, exist_ok=True)
    tell(f"starting {plan.store} and {plan.broker}")
    database = kind_of(plan.store)(folder)
    broker = broker_of(plan.broker, exactly_once=plan.delivery == "exactly-once")
    crew: Crew | None = None
    network: Network | None = None
    try:
        if broker is not None:
            broker.server.start()
        keys = keys_of(STREAM, _KEYS)
        tasks = keys_of(QUEUE, _TASKS)
        database.prepare([*keys, *tasks, _LONG_KEY])
        orders = _orders(plan, database, broker, folder)
        network = Network(database, broker)
        crew = Crew(folder, orders, database, network)
        for number in range(plan.writers):
            crew.start_writer(_load(plan, database, folder, keys, tasks), plan.writers_clock if number == 0 else 0.0)
        if plan.seconds >= _LONG_RUN_SECONDS and database.port is not None:
            crew.start_writer(_long_load(_load(plan, database, folder, [_LONG_KEY], tasks)))
        for _ in range(plan.workers):
            crew.start_worker()
        crew.await_start()
        run = _run(plan, database, broker, orders)
        save(folder, "run", run)
        samples = Samples(database, crew, folder)
        _break_things(plan, database, broker, crew, tell)
        run.healed = time.monotonic()
        crew.stop_writers()
        tell("all faults have ended; waiting until the outbox is at rest")
        _rest(samples, crew, plan)
        samples.close()
        run.settings["late"] = crew.stop_workers()
        run.settings["broken"] = crew.broken() + _half_made(database, crew)
        run.ended = time.monotonic()
        tell("collecting the history")
        _collect(database, broker, folder, run, orders)
        return History.read(folder)
    finally:
        if crew is not None:
            crew.close()
        if network is not None:
            network.close()
        if broker is not None:
            broker.server.close()
        database.close()


def _break_things(
    plan: Plan, database: Database, broker: Broker | None, crew: Crew, tell: Callable[[str], None]
) -> None:
    chance = random.Random(plan.seed)
    server = None if broker is None else broker.server
    injector = Injector(
        plan.faults,
        plan.only,
        chance,
        database,
        server,
        crew,
        plan.seconds,
        plan.least_faults,
        plan.every_point,
        plan.least_kills,
    )
    begun = told = time.monotonic()
    while (now := time.monotonic()) < begun + plan.seconds or (
        not (injector.is_enough() and crew.transactions() >= plan.least_transactions)
        and now < begun + plan.seconds + _PATIENT_SECONDS
    ):
        injector.step()
        if now >= told + 5.0:
            told = now
            tell(f"{now - begun:.0f} of {plan.seconds:g} s, {injector.done} faults, {len(crew.alive)} relays")
        time.sleep(0.05)
    injector.heal()


def _orders(plan: Plan, database: Database, broker: Broker | None, folder: Path) -> Orders:
    return Orders(
        "",
        str(folder),
        plan.store,
        database.url,
        _broker(plan, broker, folder),
        on_dead=plan.on_dead,
        lease_seconds=plan.lease_seconds,
        prune_seconds=plan.prune_seconds,
        planted=plan.planted,
        delivery=plan.delivery,
    )


def _run(plan: Plan, database: Database, broker: Broker | None, orders: Orders) -> Run:
    versions = {
        "pillarbox": __version__,
        "python": platform.python_version(),
        "store": database.version(),
        "broker": plan.broker if broker is None else broker.version(),
        "commit": commit(),
    }
    settings = {
        "max_attempts": orders.max_attempts,
        "on_dead": orders.on_dead,
        "delivery": orders.delivery,
        "lease_seconds": orders.lease_seconds,
        "slots": orders.slots,
        "batch": orders.batch,
        "keys": _KEYS,
        "writers": plan.writers,
        "workers": plan.workers,
        "faults": plan.faults,
        "only": plan.only,
        "stream": STREAM,
        "inbox": broker is None,
        "queue_streams": [] if orders.exactly_once else [QUEUE],
        "keep_seconds": orders.keep_seconds,
        "memory_bound": _MEMORY_BOUND_MB,
        "connections_bound": _CONNECTIONS_BOUND,
        "outage_attempts_bound": orders.slots * orders.batch,
    }
    now = time.monotonic()
    run = Run(plan.seed, plan.store, plan.broker, plan.seconds, versions, settings, planted=plan.planted)
    run.clock, run.began = time.time() - now, now
    return run


def commit() -> str:
    """The commit of the working tree, with a plus if it has uncommitted changes."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=folder, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # not a clone
        return "unknown"
    return found.stdout.strip()


def _half_made(database: Database, crew: Crew) -> list[str]:
    """Complete the migrations that were killed. Returns those that cannot be completed."""
    found = []
    for prefix in crew.migrated:
        try:
            asyncio.run(migrate(database.url, prefix))
        except PillarboxError as error:
            found.append(f"migration {prefix} ({error})")
    return found


def _broker(plan: Plan, broker: Broker | None, folder: Path) -> dict[str, Any]:
    if broker is not None:
        return broker.prepare()
    ledger, shut = folder / "ledger.jsonl", folder / "shut"
    return {"kind": HANDLERS, "ledger": str(ledger), "shut": str(shut), "seed": plan.seed}


def _load(plan: Plan, database: Database, folder: Path, keys: list[str], tasks: list[str]) -> Load:
    handlers = plan.broker == HANDLERS
    load = Load(
        "",
        str(folder),
        plan.store,
        database.url,
        plan.seed * 1000,
        keys,
        tasks,
        flaky=0.01 if handlers else 0.0,
        rejected_bytes=50 if handlers else _REJECTED_BYTES,
        # SQLite has one writer at a time: with a shorter pause the relays hardly get to write.
        pause_seconds=0.02 if plan.store == "sqlite" else 0.005,
        hold_seconds=plan.hold_seconds,
        planted=plan.planted,
    )
    load.reject = load.reject if plan.rejected is None else plan.rejected
    load.flaky = load.flaky if plan.flaky is None else plan.flaky
    load.held = load.held if plan.held is None else plan.held
    load.queued = load.queued if plan.queued is None else plan.queued
    load.queued = 0.0 if plan.delivery == "exactly-once" else load.queued
    load.requests = load.requests if plan.requests is None else plan.requests
    return load


def _long_load(load: Load) -> Load:
    """A writer whose transactions stay open while thousands of others commit. It has a key of its own."""
    return replace(load, held=1.0, hold_seconds=_LONG_HOLD_SECONDS, queued=0.0, rolled_back=0.0, reject=0.0)


def _rest(samples: Samples, crew: Crew, plan: Plan) -> None:
    """Wait until the backlog is empty, or until it is clear that it is stuck."""
    while len(crew.alive) < plan.workers:
        crew.start_worker()
    samples.quiet, samples.moved = 0, time.monotonic()
    while samples.quiet < _QUIET_SAMPLES and time.monotonic() < samples.moved + plan.stuck_seconds:
        time.sleep(0.05)


async def _counted(store: Any) -> dict[str, int]:
    """The store's own counts of events by state."""
    found: Counter[str] = Counter()
    for stream in (STREAM, QUEUE):
        for status, events in (await store.count(stream)).items():
            found[f"{IN_STATE}{status}"] += events
    return dict(found)


def _collect(database: Database, broker: Broker | None, folder: Path, run: Run, orders: Orders) -> None:
    deliveries = from_ledger(Path(orders.broker["ledger"])) if broker is None else broker.deliveries()
    files: dict[str, Any] = {
        "witness": database.witness(),
        "changes": database.changes(),
        "deliveries": deliveries,
        "effects": database.effects(),
        "requests": database.requests(),
    }
    for name, records in files.items():
        log = Log(folder / f"{name}.jsonl")
        for record in records:
            log.write(record)
        log.close()
    final = database.final()
    final.counters = database.ask(_counted)
    save(folder, "final", final)
    save(folder, "run", run)
