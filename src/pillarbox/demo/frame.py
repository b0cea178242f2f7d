"""The view of the demo as lines of text. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pillarbox.demo.shop import Snapshot

_STATES: Final = ("pending", "failed", "held", "dead", "published")
_RATE_SECONDS: Final = 1.0
_BAR_SECONDS: Final = 0.5
_BARS: Final = 20
_SLOW_LAG_SECONDS: Final = 0.5
_COLOURS: Final = {"dim": "2", "red": "31", "green": "32", "yellow": "33", "bold": "1"}


class Piece(NamedTuple):
    """Text and its colour, so that a line can be cut without cutting a colour code."""

    text: str
    colour: str = ""


class Marks(NamedTuple):
    """The characters for bars and shards, from those of the terminal's encoding."""

    bars: str
    owned: str
    orphaned: str
    other: str


BLOCKS: Final = Marks("▁▂▃▄▅▆▇█", "█", "▒", "·")
ASCII: Final = Marks("_.:-=+*#", "#", "x", ".")


class WorkerSeen(NamedTuple):
    """One worker at one moment."""

    name: str
    state: str  # starting, serving, killed, stopped
    delivered: int
    shards: frozenset[int]


class Scene(NamedTuple):
    """One moment of the demo."""

    seconds: float  # since the demo began
    committed: int
    rolled_back: int
    snapshot: Snapshot
    workers: tuple[WorkerSeen, ...]

    @property
    def delivered(self) -> int:
        return sum(self.snapshot.delivered.values()) - self.snapshot.copies


@dataclass(slots=True)
class History:
    """The rates of the last seconds, and one bar for each half second."""

    scenes: deque[Scene] = field(default_factory=deque)
    committed_bars: deque[float] = field(default_factory=lambda: deque(maxlen=_BARS))
    delivered_bars: deque[float] = field(default_factory=lambda: deque(maxlen=_BARS))
    lag_bars: deque[float] = field(default_factory=lambda: deque(maxlen=_BARS))
    _bar_began: Scene | None = None

    def add(self, scene: Scene) -> None:
        self.scenes.append(scene)
        while len(self.scenes) > 2 and self.scenes[1].seconds <= scene.seconds - _RATE_SECONDS:
            self.scenes.popleft()
        began = self._bar_began
        if began is None:
            self._bar_began = scene
        elif (passed := scene.seconds - began.seconds) >= _BAR_SECONDS:
            self.committed_bars.append((scene.committed - began.committed) / passed)
            self.delivered_bars.append((scene.delivered - began.delivered) / passed)
            self.lag_bars.append(scene.snapshot.lag_seconds)
            self._bar_began = scene

    def rates(self) -> tuple[float, float]:
        """Committed and delivered per second, over the last second."""
        if len(self.scenes) < 2:
            return 0.0, 0.0
        first, last = self.scenes[0], self.scenes[-1]
        passed = last.seconds - first.seconds
        if passed <= 0:
            return 0.0, 0.0
        return (last.committed - first.committed) / passed, (last.delivered - first.delivered) / passed


def spark(values: Iterable[float], highest: float, marks: Marks) -> str:
    """One character for each value."""
    steps = len(marks.bars) - 1
    return "".join(marks.bars[min(steps, max(0, round(value / highest * steps)))] for value in values)


def frame(scene: Scene, history: History, marks: Marks) -> list[list[Piece]]:
    """The live view: the shop, the relays, the outbox, then a line for each worker."""
    committed_rate, delivered_rate = history.rates()
    highest = max([1.0, *history.committed_bars, *history.delivered_bars])
    lag = scene.snapshot.lag_seconds
    lag_colour = "green" if lag < _SLOW_LAG_SECONDS else "yellow" if lag < 2 * _SLOW_LAG_SECONDS else "red"
    states = "  ".join(f"{state} {scene.snapshot.states.get(state, 0):,}" for state in _STATES)
    lines = [
        _rate("committed", scene.committed, committed_rate, spark(history.committed_bars, highest, marks)),
        _rate("delivered", scene.delivered, delivered_rate, spark(history.delivered_bars, highest, marks)),
        [
            Piece(f"{'waiting':<11} {scene.snapshot.waiting:6,}"),
            Piece(f" lag {lag:3.1f} s", lag_colour),
            Piece("  "),
            Piece(spark(history.lag_bars, max([2.0, *history.lag_bars]), marks), lag_colour),
        ],
        [Piece(f"{'rolled back':<11} {scene.rolled_back:6,}  copies {scene.snapshot.copies:,}")],
        [Piece(f"{'outbox':<11} {states}", "dim")],
    ]
    return lines + [_worker(worker, len(scene.snapshot.owners), marks) for worker in scene.workers]


def _rate(name: str, count: int, rate: float, bars: str) -> list[Piece]:
    return [Piece(f"{name:<11} {count:6,}  {rate:6,.0f}/s  "), Piece(bars, "green")]


def _worker(worker: WorkerSeen, shards: int, marks: Marks) -> list[Piece]:
    colour = {"killed": "red", "serving": "green"}.get(worker.state, "dim")
    mine = marks.orphaned if worker.state == "killed" else marks.owned
    owned = "".join(mine if shard in worker.shards else marks.other for shard in range(shards))
    return [
        Piece(f"{worker.name:<11} "),
        Piece(f"{worker.state:<8}", colour),
        Piece(f" {owned} ", colour),
        Piece(f"{len(worker.shards):2} {'shard ' if len(worker.shards) == 1 else 'shards'}"),
        Piece(f"  {worker.delivered:6,} delivered"),
    ]


def sentence(scene: Scene, history: History) -> str:
    """One moment on one line, for an output that is not a terminal."""
    committed_rate, delivered_rate = history.rates()
    snapshot = scene.snapshot
    parts = (
        f"{scene.seconds:5.1f} s",
        f"committed {scene.committed:,} ({committed_rate:.0f}/s)",
        f"delivered {scene.delivered:,} ({delivered_rate:.0f}/s)",
        f"waiting {snapshot.waiting:,}",
        f"lag {snapshot.lag_seconds:.1f} s",
        "shards: " + ", ".join(f"{worker.name} {_hands(worker)}" for worker in scene.workers),
    )
    return "  ".join(parts)


def _hands(worker: WorkerSeen) -> str:
    return f"{len(worker.shards)} (killed)" if worker.state == "killed" else str(len(worker.shards))


def cut(line: Sequence[Piece], width: int, coloured: bool) -> str:
    """The line with its colours, cut to this many columns."""
    parts = []
    for piece in line:
        text = piece.text[:width]
        width -= len(text)
        code = _COLOURS.get(piece.colour) if coloured else None
        if text:
            parts.append(f"\x1b[{code}m{text}\x1b[0m" if code else text)
    return "".join(parts).rstrip(" ")
