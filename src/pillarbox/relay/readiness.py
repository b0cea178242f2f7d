"""What a relay or a consumer waits for until it serves."""

import asyncio
from collections.abc import Collection, Iterable

from pillarbox.errors import PillarboxError


class Readiness:
    """The parts of a relay or a consumer that do not serve yet, each with its error, if no waiting mends that.

    stopped_error: for those who wait when it is stopped. tells_errors: False while somebody waits who ends with the
    error; logging it too would say it twice.
    """

    def __init__(
        self,
        parts: Iterable[str],
        stopped_error: str = "the relay was stopped before it served all of its streams",
    ) -> None:
        self.tells_errors = True
        self._stopped_error = stopped_error
        self._missing = set(parts)
        self._errors: dict[str, Exception] = {}
        self._changed = asyncio.Event()

    @property
    def missing(self) -> Collection[str]:
        """The parts that do not serve yet, or not any more."""
        return set(self._missing)

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
        self.failed("stop", PillarboxError(self._stopped_error))

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
