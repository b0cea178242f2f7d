"""What a log line is about."""

from typing import Any, NamedTuple


class Subject(NamedTuple):
    """A stream of a relay, or a consumer. kind: ``stream`` or ``consumer``."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"

    def fields(self, action: str, **more: Any) -> dict[str, Any]:
        """The fields of a log line."""
        return {"action": action, self.kind: self.name, **more}

    @property
    def flag(self) -> str:
        """How a command of the operator names it."""
        return f"--{self.kind} {self.name}"


def stream_named(name: str) -> Subject:
    return Subject("stream", name)
