import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from pillarbox.conformance.publisher import Delivery, PublisherContract
from pillarbox.publisher import Publisher
from pillarbox.publishers.stdout import FilePublisher, StdoutPublisher


def deliveries(content: bytes) -> list[Delivery]:
    found = []
    for line in content.split(b"\n")[:-1]:
        fields = json.loads(line)
        if "payload_base64" in fields:
            payload = base64.b64decode(fields["payload_base64"])
        else:
            payload = line.partition(b',"payload":')[2][:-1]
        found.append(Delivery(fields["id"], fields["key"], payload))
    return found


class Pipe(io.BytesIO):
    broken = False

    def write(self, data: object, /) -> int:
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(data)  # type: ignore[arg-type]


class TestStdout(PublisherContract):
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self) -> AsyncIterator[StdoutPublisher]:
        self.pipe = Pipe()
        publisher = StdoutPublisher(self.pipe)
        await publisher.open()
        yield publisher
        await publisher.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return deliveries(self.pipe.getvalue())

    async def go_down(self) -> None:
        self.pipe.broken = True

    async def come_back(self) -> None:
        self.pipe.broken = False


class TestFile(PublisherContract):
    can_go_down = True

    @pytest_asyncio.fixture
    async def publisher(self, tmp_path: Path) -> AsyncIterator[FilePublisher]:
        self.folder, self.away = tmp_path / "out", tmp_path / "away"
        self.folder.mkdir()
        publisher = FilePublisher(self.folder / "events.jsonl")
        await publisher.open()
        yield publisher
        await publisher.close()

    async def delivered(self, publisher: Publisher) -> list[Delivery]:
        return deliveries((self.folder / "events.jsonl").read_bytes())

    async def go_down(self) -> None:
        self.folder.rename(self.away)

    async def come_back(self) -> None:
        self.away.rename(self.folder)
