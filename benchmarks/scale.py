"""The size of a run."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Scale:
    """Rounds, events and seconds. With the default scale a default run takes fourteen minutes."""

    rounds: int = 3
    promised_rounds: int = 5
    """Of rows that the documentation makes a promise about."""
    rounds_without_bar: int = 2
    """Of rows without a bar; two rounds still show a spread."""
    events: int = 80_000
    waiting: int = 1_000_000
    most_waiting: int = 5_000_000
    few_waiting: int = 20_000
    held: int = 100_000
    payload_bytes: int = 200_000_000
    """Of all large payloads of one drain together."""
    latency_seconds: float = 2.5
    idle_seconds: float = 5.0
    everyday_seconds: float = 10.0
    """Of each of the two phases of a round."""
    everyday_rounds: int = 1
    """A round takes half a minute and there are twelve rows."""

    def with_rounds(self, rounds: int) -> "Scale":
        return replace(self, rounds=rounds, promised_rounds=rounds, rounds_without_bar=rounds, everyday_rounds=rounds)

    def for_row(self, *, has_bar: bool, promised: bool) -> "Scale":
        """The scale of one row."""
        return replace(
            self, rounds=self.promised_rounds if promised else self.rounds if has_bar else self.rounds_without_bar
        )

    def with_events(self, events: int) -> "Scale":
        return replace(self, events=events)


QUICK = Scale(
    events=40_000,
    waiting=200_000,
    most_waiting=400_000,
    few_waiting=10_000,
    held=20_000,
    payload_bytes=20_000_000,
    latency_seconds=2.0,
    idle_seconds=2.0,
    everyday_seconds=2.0,
)
