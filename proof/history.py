"""What a run leaves behind: files of JSON lines, so that the checker can be run again on an old history.

Instants are seconds of the machine's monotonic clock, which no process can set; those that a database wrote are its own
unix time, and ``Run.clock`` is what has to be added to a monotonic instant to compare the two.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec


@dataclass(slots=True)
class Run:
    """run.json: how it was made."""

    seed: int
    store: str
    broker: str  # kafka, or handlers
    seconds: float  # of load; rest and healing come after
    versions: dict[str, str]
    settings: dict[str, Any]  # max_attempts, on_dead, lease_seconds, slots, batch, keys, writers, workers ...
    clock: float = 0.0
    began: float = 0.0
    healed: float = 0.0  # from here on nothing was broken any more
    ended: float = 0.0
    planted: str | None = None  # the name of a bug that was switched on


@dataclass(slots=True)
class Witness:
    """witness.jsonl: what was committed, read from the database at the end; written in the business transaction."""

    event_id: str
    stream: str
    key: str | None
    n: int  # grows by one within (stream, key), under the key's lock
    sha256: str  # of key, payload and the header "proof"
    fate: str = "deliver"  # or "reject": the destination refuses it for good; "flaky": fails a few times, then passes
    scheduled: bool = False


@dataclass(slots=True)
class Attempted:
    """writers.jsonl: a business transaction as its client saw it."""

    at: float
    result: str  # ok, failed, rolled_back or unknown
    event_ids: Sequence[str]


@dataclass(slots=True)
class Delivery:
    """deliveries.jsonl: read independently from the broker's log, or from the handlers' ledger, in its order."""

    event_id: str
    key: str | None
    sha256: str
    place: Sequence[int]  # partition and offset; or the line of the ledger
    at: float = 0.0


@dataclass(slots=True)
class Change:
    """changes.jsonl: what the database logged, in the order of ``seq``.

    kind "event": ``old`` and ``new`` are states (none: it was not there, or is deleted), ``token`` is that of its
    shard's lease at this moment (queue streams: of its own lease). kind "lease": owner, token and until after the
    change. kind "aside": a key is set aside (``new`` is the mode) or released (none). kind "dead": a dead letter comes
    (``new`` is "dead") or goes (none). kind "audit": ``new`` is what an operator did.
    """

    seq: int
    at: float  # the database's clock
    kind: str
    stream: str
    shard: int | None = None
    event_id: str | None = None
    key: str | None = None
    old: str | None = None
    new: str | None = None
    attempts: int | None = None
    owner: str | None = None
    token: int | None = None
    until: float | None = None


@dataclass(slots=True)
class Trace:
    """trace-WORKER.jsonl: what a relay did, written before and after each call of the contracts.

    kind: read, read_begin, publish, published, settle, settled, refused (LeaseLost), take, give, renew, lost, start,
    stop.
    """

    at: float
    worker: str
    kind: str
    stream: str = ""
    shard: int | None = None
    token: int | None = None
    event_ids: Sequence[str] = ()
    outcomes: Sequence[str] = ()  # of published: published, retry, rejected, untried


@dataclass(slots=True)
class Fault:
    """faults.jsonl: what the injector did. ``until``: when it was healed (same as ``at`` for what is over at once)."""

    at: float
    kind: str  # kill, stop, term, start, database, sessions, failover, broker, proxy:MODE, clock, operator ...
    worker: str | None = None
    point: str | None = None  # of a kill: where
    until: float = 0.0


@dataclass(slots=True)
class Sample:
    """samples.jsonl: how the outbox and the relays were, twice a second."""

    at: float
    waiting: int
    oldest_seconds: float
    connections: int
    peak_mb: float


# How the names of those counters begin that say how many events are in a state.
IN_STATE = "in state "


@dataclass(slots=True)
class Final:
    """final.json: the outbox at rest."""

    states: dict[str, str]  # event id -> state, of those that are still there
    dead: dict[str, dict[str, Any]]  # event id -> attempts, error, permanent
    audit: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)  # what the relays counted, and the store


_LINES = {
    "witness": Witness,
    "writers": Attempted,
    "deliveries": Delivery,
    "changes": Change,
    "faults": Fault,
    "samples": Sample,
}


class Log:
    """Appends records to one file; each line is with the system at once, so that a killed process keeps its own."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: Any) -> None:
        os.write(self._file, json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


@dataclass(slots=True)
class History:
    """All of it, in memory."""

    run: Run
    witness: list[Witness]
    writers: list[Attempted]
    deliveries: list[Delivery]
    changes: list[Change]
    traces: list[Trace]
    faults: list[Fault]
    samples: list[Sample]
    final: Final

    @classmethod
    def read(cls, folder: Path) -> Self:
        lists: dict[str, Any] = {name: list(_read(folder / f"{name}.jsonl", kind)) for name, kind in _LINES.items()}
        traces = [line for path in sorted(folder.glob("trace-*.jsonl")) for line in _read(path, Trace)]
        return cls(
            run=Run(**json.loads((folder / "run.json").read_text())),
            traces=sorted(traces, key=lambda trace: trace.at),
            final=Final(**json.loads((folder / "final.json").read_text())),
            **lists,
        )


def save(folder: Path, name: str, record: Run | Final) -> None:
    (folder / f"{name}.json").write_text(json.dumps(asdict(record)))


def _read(path: Path, kind: Any) -> Iterator[Any]:
    if not path.exists():
        return
    decode = msgspec.json.Decoder(kind).decode  # millions of lines: several times as fast as the standard library
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return  # the process was killed while it wrote
            yield decode(line)
