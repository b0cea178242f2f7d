"""The processes of a run, which two threads of the harness ask for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from proof.crew import Crew


class Relay:
    """A stand-in for a process. ``ask`` is called while somebody asks whether it is alive."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    @property
    def is_alive(self) -> bool:
        return self._ask()


def test_a_relay_that_starts_while_another_thread_asks_is_not_lost(tmp_path: Path) -> None:
    crew: Any = Crew(tmp_path, cast("Any", None), cast("Any", None), cast("Any", None))
    started = Relay(lambda: True)
    steps = iter([True])

    def ask() -> bool:
        if next(steps, False):  # what the other thread does meanwhile
            assert len(crew.alive) == 0
            crew._alive.append(started)
        return False

    crew._alive.append(Relay(ask))

    assert [*crew.alive, *crew.alive][-1:] == [started]
