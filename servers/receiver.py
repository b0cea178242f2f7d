"""An HTTP server that takes webhooks and keeps what it took, also when it is killed."""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .base import Server


class Taken(NamedTuple):
    """One request to which it answered 204. The names of the headers are lowercase."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver(Server):
    """`most_bytes`: a larger body is answered with 413."""

    name = "receiver"
    ready_line = "ready"

    def __init__(self, *, most_bytes: int = 1 << 20) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def prepare(self) -> None:
        self._kept.touch()

    def command(self) -> Sequence[str]:
        program = Path(__file__).with_name("receiver_app.py")
        return [sys.executable, "-P", str(program), str(self.port), str(self._kept), str(self._most_bytes)]

    def taken(self) -> list[Taken]:
        """All requests since the first start, in order of arrival."""
        # A kill can leave half a line, of a request that has no answer.
        lines = [line for line in self._kept.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        found = [json.loads(line) for line in lines]
        return [Taken(each["at"], each["path"], each["headers"], b64decode(each["body"])) for each in found]

    def count(self, path: str = "") -> int:
        """The number of requests since the first start whose path begins like this."""
        return self._kept.read_bytes().count(f'"path": "{path}'.encode())

    @property
    def _kept(self) -> Path:
        return self.folder / "taken.jsonl"
