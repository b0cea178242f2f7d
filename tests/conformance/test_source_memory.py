from collections.abc import Mapping

import pytest

from pillarbox.conformance.source import SourceContract
from pillarbox.source import Source
from pillarbox.sources.memory import MemorySource, MemoryTopic


class TestMemory(SourceContract):
    can_share = True
    can_go_down = True
    quiet_seconds = 0.05

    @pytest.fixture(autouse=True)
    def topic(self) -> None:
        self.memory = MemoryTopic(4)

    def make(self) -> Source:
        return MemorySource(self.memory)

    async def send(self, body: bytes, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.memory.put(
            body,
            key=None if key is None else key.encode(),
            headers=[(name, value.encode()) for name, value in (headers or {}).items()],
        )

    async def go_down(self) -> None:
        self.memory.down()

    async def come_back(self) -> None:
        self.memory.up()
