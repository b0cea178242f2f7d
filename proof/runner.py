"""A run: servers, writers, relays and faults for a while, then rest; what it leaves is a history."""

import json
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from pillarbox import __version__
from proof.crew import Crew
from proof.databases import DATABASES
from proof.history import Delivery, History, Log, Run, Sample, save
from proof.injector import Injector
from proof.network import BROKER_PROXIES, Network
from proof.worker import STREAM, Orders, fingerprint
from proof.writer import Load
from tests.servers import Kafka

_PARTITIONS = 4
_REJECTED_BYTES = 300_000
_TOPIC_BYTES = 200_000
_KEYS = 24
_SAMPLE_SECONDS = 0.5


@dataclass(slots=True)
class Plan:
    """What is to be run."""

    store: str = "postgres"
    broker: str = "kafka"
    seconds: float = 30.0
    seed: int = 1
    workers: int = 3
    writers: int = 3
    faults: str = "all"  # none, term, or all
    on_dead: str = "skip"
    planted: str | None = None
    only: str | None = None  # one kind of fault


def perform(plan: Plan, folder: Path) -> History:
    """Run it, and read what it left."""
    folder.mkdir(parents=True, exist_ok=True)
    database = DATABASES[plan.store](folder)
    kafka = Kafka(proxies=BROKER_PROXIES) if plan.broker == "kafka" else None
    crew: Crew | None = None
    network: Network | None = None
    try:
        if kafka is not None:
            kafka.start()
        keys = [f"key-{number}" for number in range(_KEYS)]
        database.prepare(keys)
        orders = Orders("", str(folder), database.url, _broker(plan, kafka, folder), on_dead=plan.on_dead)
        orders.planted = plan.planted
        network = Network(database, kafka)
        crew = Crew(folder, orders, database, network)
        run = _run(plan, database, orders)
        save(folder, "run", run)
        for number in range(plan.writers):
            crew.start_writer(_load(plan, database, folder, keys, number))
        for _ in range(plan.workers):
            crew.start_worker()
        samples = Samples(database, crew, folder)
        injector = Injector(plan.faults, plan.only, random.Random(plan.seed), database, kafka, crew, folder)
        end = time.monotonic() + plan.seconds
        while time.monotonic() < end:
            injector.step(end)
            time.sleep(0.1)
        injector.heal()
        crew.stop_writers()
        run.healed = time.monotonic()
        _rest(samples, crew, plan)
        samples.close()
        late = crew.stop_workers()
        run.ended = time.monotonic()
        run.settings["late"] = late
        _collect(database, kafka, folder, run, orders)
        return History.read(folder)
    finally:
        if crew is not None:
            crew.close()
        if network is not None:
            network.close()
        if kafka is not None:
            kafka.close()
        database.close()


def _run(plan: Plan, database: Any, orders: Orders) -> Run:
    versions = {"pillarbox": __version__, "store": database.version(), "broker": plan.broker}
    settings = {
        "max_attempts": orders.max_attempts,
        "on_dead": orders.on_dead,
        "lease_seconds": orders.lease_seconds,
        "slots": orders.slots,
        "batch": orders.batch,
        "keys": _KEYS,
        "writers": plan.writers,
        "workers": plan.workers,
        "faults": plan.faults,
        "stream": STREAM,
    }
    now = time.monotonic()
    return Run(
        plan.seed,
        plan.store,
        plan.broker,
        plan.seconds,
        versions,
        settings,
        time.time() - now,
        now,
        planted=plan.planted,
    )


def _broker(plan: Plan, kafka: Kafka | None, folder: Path) -> dict[str, Any]:
    if kafka is None:
        return {"kind": "handlers", "ledger": str(folder / "ledger.jsonl"), "seed": plan.seed}
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 2})
    config = {"max.message.bytes": str(_TOPIC_BYTES)}
    topic = NewTopic("proof", num_partitions=_PARTITIONS, replication_factor=1, config=config)
    admin.create_topics([topic])["proof"].result(30)
    return {"kind": "kafka", "servers": kafka.bootstrap_servers, "topic": "proof"}


def _load(plan: Plan, database: Any, folder: Path, keys: list[str], number: int) -> Load:
    handlers = plan.broker == "handlers"
    return Load(
        f"writer-{number}",
        str(folder),
        plan.store,
        database.url,
        plan.seed * 1000 + number,
        keys,
        flaky=0.01 if handlers else 0.0,
        rejected_bytes=50 if handlers else _REJECTED_BYTES,
        pause_seconds=0.02 if plan.store == "sqlite" else 0.005,
    )


class Samples:
    """How the outbox and the relays are, twice a second; in a thread, because a server that is away does not answer."""

    def __init__(self, database: Any, crew: Crew, folder: Path) -> None:
        self._database = database
        self._crew = crew
        self._log = Log(folder / "samples.jsonl")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.quiet = 0  # so many in a row found nothing waiting

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            now = time.monotonic()
            try:
                waiting, oldest, connections = self._database.sample()
            except Exception:  # away, which is part of the run
                continue
            self.quiet = 0 if waiting else self.quiet + 1
            self._log.write(Sample(now, waiting, oldest, connections, self._crew.peak_mb()))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)


def _rest(samples: Samples, crew: Crew, plan: Plan, seconds: float = 60.0) -> None:
    """Until nothing waits, or it is clear that something will wait for ever."""
    while len(crew.alive) < plan.workers:
        crew.start_worker()
    deadline = time.monotonic() + seconds
    samples.quiet = 0
    while samples.quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.1)


def _collect(database: Any, kafka: Kafka | None, folder: Path, run: Run, orders: Orders) -> None:
    for name, records in (("witness", database.witness()), ("changes", database.changes())):
        log = Log(folder / f"{name}.jsonl")
        for record in records:
            log.write(record)
        log.close()
    log = Log(folder / "deliveries.jsonl")
    for delivery in _consume(kafka) if kafka is not None else _ledger(Path(orders.broker["ledger"])):
        log.write(delivery)
    log.close()
    save(folder, "final", database.final())
    save(folder, "run", run)


def _ledger(path: Path) -> list[Delivery]:
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    found = [Delivery(**json.loads(line)) for line in lines]
    for number, delivery in enumerate(found):
        delivery.place = [0, number]
    return found


def _consume(kafka: Kafka) -> list[Delivery]:
    """From the beginning of every partition to its end."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "proof", "log_level": 2})
    places = [TopicPartition("proof", number, 0) for number in range(_PARTITIONS)]
    ends = {place.partition: consumer.get_watermark_offsets(place, timeout=30)[1] for place in places}
    consumer.assign(places)
    found: list[Delivery] = []
    left = {number for number, end in ends.items() if end}
    while left:
        message = consumer.poll(30)
        if message is None or message.error():
            raise RuntimeError(f"the broker's log cannot be read: {message and message.error()}")
        headers = {name: value for name, value in message.headers() or []}
        key = message.key().decode() if message.key() is not None else None
        mark = headers.get("proof", b"").decode()
        sha256 = fingerprint(key, message.value() or b"", mark)
        event_id = headers["event_id"].decode()
        found.append(
            Delivery(event_id, key, sha256, [message.partition(), message.offset()], message.timestamp()[1] / 1000)
        )
        if message.offset() + 1 >= ends[message.partition()]:
            left.discard(message.partition())
    consumer.close()
    return sorted(found, key=lambda delivery: tuple(delivery.place))
