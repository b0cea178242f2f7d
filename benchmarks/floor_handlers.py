"""A bare loop that awaits a function for each event, with the reads and settles of the bare drain to Kafka."""

import asyncio
from typing import Any

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor
from benchmarks.handled import Handled


class HandlersFloor(Floor[Handled]):
    """A floor with one function for all slots."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.handled = Handled()

    def destination(self) -> Handled:
        return self.handled

    async def send(self, destination: Handled, rows: list[Any]) -> None:
        for row in rows:
            await destination.handle(row)


def main() -> None:
    floor = HandlersFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer({**floor.clock.report(), "handled": floor.handled.count})


if __name__ == "__main__":
    main()
