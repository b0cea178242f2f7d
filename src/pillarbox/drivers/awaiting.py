"""Results for the caller: at once on plain drivers, with ``await`` on drivers that have to be awaited."""

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, overload

from pillarbox.drivers.contract import Build, Driver

T = TypeVar("T")


class _Reply(Generic[T]):
    """call: names the caller's method in the error for a forgotten ``await``."""

    def __init__(self, driver: Driver, build: Build[T], call: str) -> None:
        self._run = partial(driver.run, build)
        self._call = call
        self._results: list[T] = []
        # Started here, so that Python warns if it is never awaited.
        self._running: Any = self._run()
        if not driver.is_awaited:
            self._results.append(self._running)

    def __await__(self) -> Generator[Any, Any, T]:
        if not self._results:
            running = self._running or self._run()
            self._results.append((yield from running.__await__()))
        return self._results[0]

    def _result(self) -> T:
        if not self._results:
            if self._running is not None:
                self._running.close()  # the error is warning enough
                self._running = None
            raise TypeError(f"this driver has to be awaited: write `await {self._call}(...)`")
        return self._results[0]


class YesOrNo(_Reply[bool]):
    """True or false; ``await`` it on drivers that have to be awaited."""

    def __bool__(self) -> bool:
        return self._result()


class Chosen(_Reply[Sequence[T]], Sequence[T]):
    """Some of the values that were passed, in their order; ``await`` it on drivers that have to be awaited."""

    def __len__(self) -> int:
        return len(self._result())

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._result()[index]
