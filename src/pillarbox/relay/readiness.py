"""What a relay waits for until it serves all of its streams."""

import asyncio
from collections.abc import Iterable

from pillarbox.errors import PillarboxError


class Readiness:
    """The parts of a relay that do not serve yet. A part whose error no waiting mends has that error here.

    tells_errors: False while somebody waits who ends with the error; logging it too would say it twice."""

    def __init__(self, parts: Iterable[str]) -> None:
        self.tells_errors = True
        self._missing = set(parts)
        self._errors: dict[str, Exception] = {}
        self._changed = asyncio.Event()

    def serves(self, part: str) -> None:
        self._missing.discard(part)
        self._errors.pop(part, None)
        self._changed.set()

    def leaves(self, part: str) -> None:
        self._missing.add(part)

    def failed(self, part: str, error: Exception) -> bool:
        """Note an error. True: it has to be logged, because it is new."""
        known = repr(self._errors.get(part))
        self._missing.add(part)
        self._errors[part] = error
        self._changed.set()
        return self.tells_errors and repr(error) != known

    def stopped(self) -> None:
        self.failed("stop", PillarboxError("the relay was stopped before it served all of its streams"))

    def error(self, *parts: str) -> Exception | None:
        """The error of one of these parts; without parts: of any."""
        return next((error for part, error in self._errors.items() if not parts or part in parts), None)

    async def wait(self) -> None:
        """Wait until all parts serve. Raises an error that no waiting mends."""
        while self._missing:
            if (error := self.error()) is not None:
                raise error
            self._changed.clear()
            await self._changed.wait()
