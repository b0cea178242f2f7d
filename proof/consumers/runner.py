"""A run of consumers: servers, messages and faults for a while, then rest. It leaves a history."""

import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pillarbox import __version__
from proof.consumers.brokers import AWAY, BROKERS, Broker, Group
from proof.consumers.crew import Crew
from proof.consumers.databases import start
from proof.consumers.feed import Feed
from proof.consumers.history import History, Run, save
from proof.consumers.injector import Injector
from proof.consumers.worker import LEASE_SECONDS, Orders
from proof.history import Log
from proof.proxy_thread import ProxyThread
from proof.runner import commit

_PATIENT_SECONDS: Final = 120.0  # for the faults that the plan demands
_STUCK_SECONDS: Final = 60.0  # a lag that does not change for so long is stuck
_STOP_SECONDS: Final = 40.0
_REPLAY_SECONDS: Final = 2 * LEASE_SECONDS  # a consumer that is killed keeps the lease of a replay


@dataclass(slots=True)
class Plan:
    """The settings of a run."""

    store: str = "postgres"
    broker: str = "kafka"
    seconds: float = 30.0
    seed: int = 1
    consumers: int = 3
    per_second: float = 60.0  # messages
    faults: str = "all"  # or none
    only: str | None = None  # some kinds of faults, with commas
    restless: bool = True  # a member joins and leaves the group every second
    protocol: str = "classic"
    least_kills: int = 0  # the run goes on until there were this many
    planted: str | None = None


def _silent(line: str) -> None:
    """Print nothing."""


def perform(plan: Plan, folder: Path, tell: Callable[[str], None] = _silent) -> History:
    """Run the plan and read its history. ``tell`` gets lines about the progress."""
    folder.mkdir(parents=True, exist_ok=True)
    tell(f"starting {plan.store} and {plan.broker}")
    database = start(plan.store)
    broker = BROKERS[plan.broker]()
    network = ProxyThread()
    crew: Crew | None = None
    try:
        broker.server.start()
        database.prepare()
        broker.prepare()
        doors = [network.open("127.0.0.1", each.target, port=each.listen) for each in broker.proxies()]
        orders = Orders(
            "",
            plan.store,
            database.url,
            broker.servers,
            broker.topic,
            plan.seed,
            plan.protocol,
            plan.planted,
            plan.broker,
        )
        run = _run(plan, database.version(), broker)
        feed, crew = Feed(broker.writer(), plan.seed, plan.per_second), Crew(folder, orders, plan.consumers, doors)
        crew.fill()
        feed.start()  # a consumer of RabbitMQ is told of the queue with the first message
        _await_start(crew)
        restless = broker.restless(orders) if plan.restless else None
        if restless is not None:
            restless.start()
        chance = random.Random(plan.seed)
        injector = Injector(chance, plan.only, database, broker.server, crew, folder, network)
        _break_things(plan, injector, feed, tell)
        if restless is not None:
            restless.stop()
            tell(f"the group was joined {restless.joined} times by the member that leaves")
        feed.stop()
        run.healed = time.monotonic()
        tell(f"all faults have ended; waiting until {feed.written} messages are settled")
        _rest(run, broker.group(), crew, database)
        run.late = crew.stop(_STOP_SECONDS)
        run.broken = crew.broken()
        run.assignments = crew.assignments()
        tell("collecting the history")
        run.inbox = list(database.inbox())
        _write(folder, "messages", broker.read())
        _write(folder, "effects", database.effects())
        _write(folder, "letters", database.letters())
        save(folder, run)
        return History.read(folder)
    finally:
        if crew is not None:
            crew.close()
        network.close()
        broker.server.close()
        database.close()


def _await_start(crew: Crew) -> None:
    """Wait until a consumer has partitions."""
    deadline = time.monotonic() + _PATIENT_SECONDS
    while not crew.at_work:
        if crew.broken() or time.monotonic() > deadline:
            raise RuntimeError(f"no consumer started; see {crew.members[0].log}")
        time.sleep(0.1)


def _run(plan: Plan, version: str, broker: Broker) -> Run:
    versions = {
        "pillarbox": __version__,
        "python": platform.python_version(),
        "store": version,
        "broker": broker.version() + (f", {plan.protocol} protocol" if plan.broker == "kafka" else ""),
        "commit": commit(),
    }
    run = Run(
        plan.seed, plan.store, plan.seconds, versions, plan.consumers, broker.partitions, plan.planted, plan.broker
    )
    run.began = time.monotonic()
    return run


def _break_things(plan: Plan, injector: Injector, feed: Feed, tell: Callable[[str], None]) -> None:
    begun = told = time.monotonic()
    while (now := time.monotonic()) < begun + plan.seconds or (
        injector.kills < plan.least_kills and now < begun + plan.seconds + _PATIENT_SECONDS
    ):
        if plan.faults == "all":
            injector.step()
        if now >= told + 5.0:
            told = now
            tell(f"{now - begun:.0f} of {plan.seconds:g} s, {injector.kills} kills, {feed.written} messages")
        time.sleep(0.05)
    injector.heal()


def _rest(run: Run, group: Group, crew: Crew, database: Any) -> None:
    """Wait until everything is settled and no replay waits, or until it is clear that it is stuck."""
    moved, before = time.monotonic(), {"all": 1}
    while time.monotonic() < moved + (_STUCK_SECONDS if before else _REPLAY_SECONDS):
        crew.fill()
        try:
            run.unfinished = group.unfinished()
        except AWAY:  # it has just come back
            run.unfinished = {"all": 1}
        if run.unfinished != before:
            moved, before = time.monotonic(), run.unfinished
        if not run.unfinished and not any(letter.waits for letter in database.letters()):
            run.rested = time.monotonic()
            break
        time.sleep(0.3)
    group.close()


def _write(folder: Path, name: str, records: Any) -> None:
    log = Log(folder / f"{name}.jsonl")
    for record in records:
        log.write(record)
    log.close()
