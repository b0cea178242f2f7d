"""The history of a run of consumers: files of JSON lines, so that an old history can be checked again."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from proof.history import Fault


@dataclass(slots=True)
class Message:
    """messages.jsonl: the broker's log, read at the end of the run. Some events are there several times."""

    event_id: str
    key: str
    n: int  # grows by one within a key
    fate: str  # deliver, flaky (fails at first), reject (always rejected) or other (no handler knows its type)
    partition: int
    offset: int


@dataclass(slots=True)
class Applied:
    """effects.jsonl: what the handlers committed, in the order in which they wrote. No key hides a second effect."""

    event_id: str
    key: str
    n: int


@dataclass(slots=True)
class Letter:
    """letters.jsonl: the dead letters at the end. waits: for a replay."""

    event_id: str
    attempts: int
    error: str
    waits: bool


@dataclass(slots=True)
class Run:
    """run.json: the settings of a run, and how it ended."""

    seed: int
    store: str
    seconds: float
    versions: dict[str, str]
    consumers: int
    partitions: int
    planted: str | None = None
    broker: str = "kafka"
    assignments: int = 0  # how often a consumer got partitions
    began: float = 0.0
    healed: float = 0.0
    rested: float | None = None  # when all was committed; None: never
    unfinished: dict[str, int] = field(default_factory=dict)  # by partition: messages that are not committed at the end
    late: list[str] = field(default_factory=list)  # did not stop when they were asked to
    broken: list[str] = field(default_factory=list)  # ended by themselves
    inbox: list[str] = field(default_factory=list)  # the ids that it has at the end


_LINES = {"messages": Message, "effects": Applied, "letters": Letter, "faults": Fault}


@dataclass(slots=True)
class History:
    """A history in memory."""

    run: Run
    messages: list[Message]
    effects: list[Applied]
    letters: list[Letter]
    faults: list[Fault]

    @classmethod
    def read(cls, folder: Path) -> Self:
        lists: dict[str, Any] = {}
        for name, kind in _LINES.items():
            file = folder / f"{name}.jsonl"
            decode: Any = msgspec.json.Decoder(kind).decode
            lists[name] = [decode(line) for line in file.read_bytes().splitlines()] if file.exists() else []
        return cls(run=Run(**json.loads((folder / "run.json").read_text())), **lists)


def is_history(folder: Path) -> bool:
    return (folder / "messages.jsonl").exists()


def save(folder: Path, run: Run) -> None:
    (folder / "run.json").write_text(json.dumps(asdict(run)))
