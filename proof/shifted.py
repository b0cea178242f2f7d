"""Runs a module with a wrong wall clock: `python -m proof.shifted SECONDS MODULE ARGUMENT ...`

The monotonic clock stays right. Only Python sees the wrong clock: the threads of a broker's client would hang with it.
"""

import datetime
import runpy
import sys
import time
from typing import Any

_real = datetime.datetime


class _Kind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _real)


def shift(seconds: float) -> None:
    """Shift the clock of all modules that are imported from now on."""
    now, now_ns, off = time.time, time.time_ns, datetime.timedelta(seconds=seconds)

    class Shifted(_real, metaclass=_Kind):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return _real.now(tz) + off

        @classmethod
        def utcnow(cls) -> Any:
            return _real.now(datetime.UTC).replace(tzinfo=None) + off

    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    datetime.datetime = Shifted  # type: ignore[misc]


def main() -> None:
    module = sys.argv[2]
    shift(float(sys.argv[1]))
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
