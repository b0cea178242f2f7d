"""The handler of both sides: it only counts its calls."""


class Handled:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    async def handle(self, _event: object) -> None:
        self.count += 1
