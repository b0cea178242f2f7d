"""The handler of both sides: it does nothing, and is counted."""


class Handled:
    """Success is to return None."""

    def __init__(self) -> None:
        self.count = 0

    async def handle(self, _event: object) -> None:
        self.count += 1
