"""`python -m benchmarks [--only NAME ...] [--rounds N] [--quick]`"""

import argparse
import asyncio
import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import drains, latency, report, writers
from benchmarks.bed import Bed, say
from benchmarks.drains import QUICK, Scale
from benchmarks.peers import debezium
from benchmarks.peers import drains as peers
from benchmarks.peers import latency as peers_latency
from benchmarks.report import Row

_ROWS: dict[str, Callable[[Bed, Scale], Row | list[Row]]] = {
    "postgres-kafka": drains.postgres,
    "postgres-kafka-deleted": drains.postgres_deleted,
    "postgres-latency": latency.latency,
    "postgres-hot-key": drains.hot_key,
    "sqlite-kafka": drains.sqlite,
    "postgres-idle": latency.idle,
    "postgres-backlog-1m": drains.many_waiting,
    "postgres-memory": drains.memory,
    "mysql-kafka": drains.mysql,
    "mysql-backlog-1m": drains.mysql_many_waiting,
    "mariadb-kafka": drains.mariadb,
    "mariadb-backlog-1m": drains.mariadb_many_waiting,
    "mongo-kafka": drains.mongo,
    "mongo-one-at-a-time": drains.mongo_one_at_a_time,
    "mongo-backlog-1m": drains.mongo_many_waiting,
    "add": writers.writers,
}
# Left out unless asked for: they install what is not ours.
_PEERS: dict[str, Callable[[Bed, Scale], list[Row]]] = {
    "peer-debezium": debezium.warm,
    "peer-debezium-cold": debezium.cold,
    "peer-debezium-latency": peers_latency.debezium,
    "peer-txoutbox": peers.txoutbox,
    "peer-txoutbox-latency": peers_latency.txoutbox,
    "peer-faststream-outbox": peers.faststream_outbox,
    "peer-omni-box": peers.omni_box,
    "peer-loop": peers.loop,
}
_ALL_PEERS = "peers"
_FILE = Path("build/bench.json")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Floor, ours and ratio.")
    choices = [*_ROWS, _ALL_PEERS, *_PEERS]
    parser.add_argument("--only", nargs="+", choices=choices, metavar="NAME", help=f"of {', '.join(choices)}")
    parser.add_argument("--rounds", type=int, help="of each side (default 3)")
    parser.add_argument("--quick", action="store_true", help="smaller backlogs: to see that it works, not how fast")
    return parser.parse_args()


def chosen(only: list[str] | None) -> list[str]:
    """The rows to measure, each once: without a choice all but the peers, which have a name for all of them."""
    names = list(_ROWS) if only is None else only
    each = [_PEERS if name == _ALL_PEERS else [name] for name in names]
    return list(dict.fromkeys(name for names in each for name in names))


def _measure(bed: Bed, names: list[str], scale: Scale) -> list[Row]:
    rows: list[Row] = []
    say("warming up")
    drains.warm_up(bed, scale)
    for name in names:
        say(name)
        found = {**_ROWS, **_PEERS}[name](bed, scale)
        rows += found if isinstance(found, list) else [found]
    return rows


def main() -> None:
    arguments = _arguments()
    scale = QUICK if arguments.quick else Scale()
    if arguments.rounds:
        scale = dataclasses.replace(scale, rounds=arguments.rounds)
    # As Ctrl-C, so that the servers are closed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()
    with Bed() as bed:
        version = asyncio.run(bed.question("SHOW server_version"))
        print(report.heading(" ".join(["python -m benchmarks", *sys.argv[1:]]), version), flush=True)
        rows = _measure(bed, chosen(arguments.only), scale)
    report.write(rows, _FILE)
    print(f"took      {time.monotonic() - begun:.0f} s, {scale.rounds} rounds of each side in turn\n")
    print(report.table(rows))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the servers are closed and nothing was written")
