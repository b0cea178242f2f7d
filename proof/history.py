"""The history of a run: files of JSON lines, so that an old history can be checked again.

Instants are seconds of the machine's monotonic clock, which no process can set. Instants that a database wrote are unix
time. ``Run.clock`` plus a monotonic instant is unix time.
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
    """run.json: the settings of the run."""

    seed: int
    store: str
    broker: str  # kafka, rabbitmq, pulsar, nats, redis, http, or handlers
    seconds: float  # how long events were written
    versions: dict[str, str]
    settings: dict[str, Any]  # max_attempts, on_dead, lease_seconds, slots, batch, keys, writers, workers ...
    clock: float = 0.0
    began: float = 0.0
    healed: float = 0.0  # when the last fault had ended
    ended: float = 0.0
    planted: str | None = None  # the name of a planted bug


@dataclass(slots=True)
class Witness:
    """witness.jsonl: the committed events. A business transaction writes each; all are read at the end of the run."""

    event_id: str
    stream: str
    key: str | None
    n: int  # grows by one within (stream, key), under the key's lock
    sha256: str  # of key, payload and the header "proof"
    fate: str = "deliver"  # or "reject": always rejected; "flaky": fails at first
    scheduled: bool = False


@dataclass(slots=True)
class Attempted:
    """writers.jsonl: one business transaction, as its client saw it."""

    at: float
    result: str  # ok, failed, rolled_back or unknown
    event_ids: Sequence[str]


@dataclass(slots=True)
class Delivery:
    """deliveries.jsonl: the broker's log or the handlers' ledger, in its order."""

    event_id: str
    key: str | None
    sha256: str
    place: Sequence[int]  # partition and offset, or the line of the ledger
    at: float = 0.0


@dataclass(slots=True)
class Effect:
    """effects.jsonl: what the handlers committed, read at the end of the run. No key keeps an event from having two."""

    event_id: str


@dataclass(slots=True)
class Requested:
    """requests.jsonl: what requests with an idempotency key committed, read at the end. No key hides a second one."""

    key: str
    body: str  # of the request
    sha256: str  # of the answer


@dataclass(slots=True)
class Replied:
    """replies.jsonl: one answer, as its client saw it. A request without an answer leaves no line."""

    at: float
    key: str
    body: str  # of the request
    status: int
    is_replayed: bool
    sha256: str


@dataclass(slots=True)
class Change:
    """changes.jsonl: the changes that the database logged, in the order of ``seq``.

    kind "event": ``old`` and ``new`` are states, None before the insert and after the delete. ``token`` is that of the
    shard's lease at this moment, in a queue stream that of the event's lease.
    kind "lease": owner, token and until after the change.
    kind "held_key": ``old`` and ``new`` are modes, None while the key is not held.
    kind "dead": a dead letter was added (``new`` is "dead") or removed (``old`` is "dead").
    kind "audit": ``new`` is the action of an operator.
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
    """trace-WORKER.jsonl: the calls of a relay, one line before and one after each call.

    kind: read_begin, read, publish, published, settle, settled, refused (the lease was lost), recovering (the events of
    the last ticket), recovered (those that it settled), take, give, renew, lost, start, stop.
    """

    at: float
    worker: str
    kind: str
    stream: str = ""
    shard: int | None = None
    token: int | None = None
    event_ids: Sequence[str] = ()
    # Of published: published, retry, rejected, untried. Of settled and refused: published, failed, dead, parked, held.
    # Of recovered: gone, once for each event that the database has lost. Of take: took_over, if the owner before had
    # died.
    outcomes: Sequence[str] = ()


@dataclass(slots=True)
class Scrape:
    """scrape-WORKER.jsonl: the counters on a relay's page of metrics. A killed relay's last line is shortly before its
    end."""

    at: float
    worker: str
    counters: dict[str, float]  # by name and the values of its labels, such as "outbox_failed_total retry proof"


@dataclass(slots=True)
class Fault:
    """faults.jsonl: one fault. ``until``: when it was mended; the same as ``at`` if it lasts no time."""

    at: float
    kind: str  # kill, stop, term, start, database, sessions, failover, broker, proxy:MODE, clock, operator ...
    worker: str | None = None
    point: str | None = None  # of a kill: where
    until: float = 0.0


@dataclass(slots=True)
class Sample:
    """samples.jsonl: the backlog and the relays, a few times a second."""

    at: float
    waiting: int
    oldest_seconds: float
    connections: int
    peak_mb: float


# The prefix of counters that count the events in a state.
IN_STATE = "in state "


@dataclass(slots=True)
class Final:
    """final.json: the outbox at rest."""

    states: dict[str, str]  # by event id, without deleted ones
    dead: dict[str, dict[str, Any]]  # by event id: attempts, error, permanent
    audit: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)  # of the relays and of the store


_LINES = {
    "witness": Witness,
    "writers": Attempted,
    "deliveries": Delivery,
    "effects": Effect,
    "requests": Requested,
    "replies": Replied,
    "changes": Change,
    "faults": Fault,
    "samples": Sample,
}


class Log:
    """Appends records to one file. No line is buffered, so that a killed process loses none."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: Any) -> None:
        os.write(self._file, json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


@dataclass(slots=True)
class History:
    """A history in memory."""

    run: Run
    witness: list[Witness]
    writers: list[Attempted]
    deliveries: list[Delivery]
    effects: list[Effect]
    requests: list[Requested]
    replies: list[Replied]
    changes: list[Change]
    traces: list[Trace]
    faults: list[Fault]
    samples: list[Sample]
    final: Final
    scrapes: list[Scrape] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self:
        lists: dict[str, Any] = {name: list(_read(folder / f"{name}.jsonl", kind)) for name, kind in _LINES.items()}
        traces = [line for path in sorted(folder.glob("trace-*.jsonl")) for line in _read(path, Trace)]
        scrapes = [line for path in sorted(folder.glob("scrape-*.jsonl")) for line in _read(path, Scrape)]
        return cls(
            run=Run(**json.loads((folder / "run.json").read_text())),
            traces=sorted(traces, key=lambda trace: trace.at),
            final=Final(**json.loads((folder / "final.json").read_text())),
            scrapes=sorted(scrapes, key=lambda scrape: scrape.at),
            **lists,
        )


def save(folder: Path, name: str, record: Run | Final) -> None:
    (folder / f"{name}.json").write_text(json.dumps(asdict(record)))


def _read(path: Path, kind: Any) -> Iterator[Any]:
    if not path.exists():
        return
    decode = msgspec.json.Decoder(kind).decode  # several times as fast as the standard library, for millions of lines
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return  # its process was killed in the middle of this line
            yield decode(line)
