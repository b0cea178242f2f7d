import asyncio
import base64
import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage
from pillarbox.publisher import PUBLISHED, UNTRIED, Publisher
from pillarbox.publishers import stdout as stdout_module
from pillarbox.publishers._json_lines import json_line
from pillarbox.publishers.stdout import FilePublisher, StdoutPublisher


@asynccontextmanager
async def opened(publisher: Publisher) -> AsyncIterator[Publisher]:
    await publisher.open()
    try:
        yield publisher
    finally:
        await publisher.close()


class Sink(io.RawIOBase):
    """A raw stream that takes at most ``chunk`` bytes at a time and fails after ``room`` bytes."""

    def __init__(self, *, chunk: int = 1 << 30, room: int = 1 << 30, code: int = errno.ENOSPC) -> None:
        self.chunk, self.room, self.code = chunk, room, code
        self.content = b""

    def write(self, data: Any, /) -> int:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        taken = bytes(data[: min(self.chunk, self.room)])
        self.room -= len(taken)
        self.content += taken
        return len(taken)


def ids(content: bytes) -> list[str]:
    assert content.endswith(b"\n") or not content
    return [json.loads(line)["id"] for line in content.split(b"\n")[:-1]]


class TestLine:
    def test_the_whole_line(self) -> None:
        at = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
        event = make_event(topic="t", key="k", tenant="x", stream="s", headers={"a": "ö"}, occurred_at=at, seq=3)
        line = json_line(event)
        assert line.endswith(b',"payload":' + event.payload + b"}\n")
        assert json.loads(line) == {
            "id": str(event.id),
            "seq": 3,
            "stream": "s",
            "tenant": "x",
            "topic": "t",
            "type": "order.created",
            "key": "k",
            "headers": {"a": "ö"},
            "occurred_at": "2024-05-06T07:08:09+00:00",
            "content_type": "application/json",
            "payload": {"order_id": 7},
        }

    @pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/cloudevents+JSON"])
    def test_kinds_of_json(self, content_type: str) -> None:
        assert b',"payload":{ "a": 1.0 }}\n' in json_line(
            make_event(payload=b'{ "a": 1.0 }', content_type=content_type)
        )

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"{",
            b"NaN",
            b'{"a":-Infinity}',
            b'{\n"a": 1}',
            b"[1,\r2]",
            b"\xff",
            b"[" * 100_000,
            b"\xef\xbb\xbf{}",
        ]
        + ["{}".encode(encoding) for encoding in ("utf-16", "utf-32")]
        + [b"1}\n{}", b"1" * 5000],
    )
    def test_what_is_not_json_on_one_line_is_base64(self, payload: bytes) -> None:
        line = json_line(make_event(payload=payload))
        assert line.count(b"\n") == 1
        assert base64.b64decode(json.loads(line)["payload_base64"]) == payload

    def test_another_content_type_is_base64(self) -> None:
        line = json.loads(json_line(make_event(payload=b"{}", content_type="text/plain")))
        assert base64.b64decode(line["payload_base64"]) == b"{}"
        assert "payload" not in line


class TestUrls:
    def test_stdout(self) -> None:
        assert StdoutPublisher.from_url("stdout:").description == "stdout"
        with pytest.raises(ConfigError, match=r"'stdout:\?x=1'.*no options"):
            StdoutPublisher.from_url("stdout:?x=1")

    def test_file(self) -> None:
        assert FilePublisher.from_url("file:///var/my%20out.jsonl").description == "file /var/my out.jsonl"

    @pytest.mark.parametrize(
        ("url", "remedy"),
        [
            ("file:out.jsonl", "whole path"),
            ("file://out.jsonl", "whole path"),
            ("file://host/out.jsonl", "whole path"),
            ("file:///", "whole path"),
            ("http:///out.jsonl", "whole path"),
            ("file:///out.jsonl?fsync=no", "no options"),
            ("file:///out#1", "no options"),
        ],
    )
    def test_a_wrong_file_url(self, url: str, remedy: str) -> None:
        with pytest.raises(ConfigError, match=remedy):
            FilePublisher.from_url(url)


class TestStdout:
    @pytest.mark.asyncio
    async def test_writes_to_standard_output(self, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        events = [make_event(), make_event()]
        async with opened(StdoutPublisher()) as publisher:
            assert await publisher.publish(Batch.of(events)) == [PUBLISHED] * 2
            assert ids(capfdbinary.readouterr().out) == [str(e.id) for e in events]

    @pytest.mark.asyncio
    @pytest.mark.parametrize(("replacement", "reason"), [(None, "no standard output"), (io.StringIO(), "no bytes")])
    async def test_without_a_usable_stdout(
        self, monkeypatch: pytest.MonkeyPatch, replacement: object, reason: str
    ) -> None:
        monkeypatch.setattr(sys, "stdout", replacement)
        with pytest.raises(ConfigError, match=reason):
            await StdoutPublisher().open()

    @pytest.mark.asyncio
    async def test_a_stream_that_takes_a_few_bytes_at_a_time(self) -> None:
        sink, events = Sink(chunk=7), [make_event(), make_event()]
        async with opened(StdoutPublisher(sink)) as publisher:
            assert await publisher.publish(Batch.of(events)) == [PUBLISHED] * 2
        assert ids(sink.content) == [str(e.id) for e in events]

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (errno.EPIPE, "reader of the pipe is gone"),
            (errno.ENOSPC, "disk is full"),
            (errno.EIO, os.strerror(errno.EIO)),
        ],
    )
    async def test_a_line_cut_off_stays_alone(self, code: int, reason: str) -> None:
        first, second = make_event(), make_event()
        sink = Sink(room=len(json_line(first)) + 20, code=code)
        async with opened(StdoutPublisher(sink)) as publisher:
            outcomes = await publisher.publish(Batch.of([first, second]))
            assert all(outcome.is_outage for outcome in outcomes)
            assert (outcomes[0].error or "").startswith("stdout: ")
            assert reason in (outcomes[0].error or "")
            sink.room = 1 << 30
            assert await publisher.publish(Batch.of([first, second])) == [PUBLISHED] * 2
        cut = json_line(first) + json_line(second)[:20] + b"\n"
        assert sink.content == cut + json_line(first) + json_line(second)

    @pytest.mark.asyncio
    async def test_a_closed_stream_is_an_outage(self) -> None:
        stream = io.BytesIO()
        async with opened(StdoutPublisher(stream)) as publisher:
            stream.close()
            (outcome,) = await publisher.publish(Batch.of([make_event()]))
        assert outcome.is_outage

    @pytest.mark.asyncio
    async def test_a_stream_that_would_block_is_an_outage(self) -> None:
        sink = Sink(chunk=0)
        async with opened(StdoutPublisher(sink)) as publisher:
            (outcome,) = await publisher.publish(Batch.of([make_event()]))
        assert outcome.error == "stdout: it takes no more now"

    @pytest.mark.asyncio
    async def test_close_does_not_wait_for_ever_for_a_reader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stdout_module, "_PATIENCE_SECONDS", 0.05)
        loop, writing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        class FullPipe(Sink):
            def write(self, data: Any, /) -> int:
                loop.call_soon_threadsafe(writing.set)
                go_on.wait(30)
                return super().write(data)

        sink, events = FullPipe(), [make_event(), make_event(), make_event()]
        publisher = StdoutPublisher(sink)
        await publisher.open()
        calls = [asyncio.create_task(publisher.publish(Batch.of([event]))) for event in events[:2]]
        await writing.wait()
        await publisher.close()
        assert [await call for call in calls] == [[UNTRIED], [UNTRIED]]
        with pytest.raises(Outage, match="still blocks"):
            await publisher.open()
        go_on.set()
        async with opened(publisher):
            assert await publisher.publish(Batch.of(events[2:])) == [PUBLISHED]
        # The first had begun; the second was taken back.
        assert ids(sink.content) == [str(events[0].id), str(events[2].id)]

    def test_a_reader_that_leaves_causes_no_traceback(self) -> None:
        program = """
import asyncio, sys
from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.publishers.stdout import StdoutPublisher
async def main():
    publisher = StdoutPublisher()
    await publisher.open()
    print((await publisher.publish(Batch.of([make_event()])))[0].result, file=sys.stderr)
    sys.stdin.readline()
    print((await publisher.publish(Batch.of([make_event()])))[0].error, file=sys.stderr)
    await publisher.close()
asyncio.run(main())
"""
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            assert json.loads(process.stdout.readline())["type"] == "order.created"
            process.stdout.close()
            process.stdin.write(b"\n")
            process.stdin.flush()
            errors = process.stderr.read().decode().splitlines()
        assert errors == ["published", f"stdout: {stdout_module._REASONS[errno.EPIPE]}"]
        assert process.returncode == 0


class TestFile:
    @pytest.mark.asyncio
    async def test_appends(self, tmp_path: Path) -> None:
        path, events = tmp_path / "out.jsonl", [make_event(), make_event()]
        for event in events:
            async with opened(FilePublisher(path)) as publisher:
                assert await publisher.publish(Batch.of([event])) == [PUBLISHED]
        assert path.read_bytes() == b"".join(map(json_line, events))

    @pytest.mark.asyncio
    async def test_a_line_cut_off_by_a_crash_stays_alone(self, tmp_path: Path) -> None:
        path, event = tmp_path / "out.jsonl", make_event()
        path.write_bytes(b'{"id":"0')
        async with opened(FilePublisher(path)) as publisher:
            await publisher.publish(Batch.of([event]))
        assert path.read_bytes() == b'{"id":"0\n' + json_line(event)

    @pytest.mark.asyncio
    async def test_published_only_after_fsync(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, event, fsync = tmp_path / "out.jsonl", make_event(), os.fsync

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        async with opened(FilePublisher(path)) as publisher:
            monkeypatch.setattr(os, "fsync", fail)
            (outcome,) = await publisher.publish(Batch.of([event]))
            assert outcome.is_outage
            assert outcome.error == f"file {path}: Input/output error"
            monkeypatch.setattr(os, "fsync", fsync)
            assert await publisher.publish(Batch.of([event])) == [PUBLISHED]
        assert set(ids(path.read_bytes())) == {str(event.id)}

    @pytest.mark.asyncio
    async def test_a_full_disk_is_an_outage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class FullDisk(io.FileIO):
            def write(self, data: Any, /) -> int:
                if len(data) <= 20:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data[:-20])

        path, event = tmp_path / "out.jsonl", make_event()
        with monkeypatch.context() as patch:
            patch.setattr(stdout_module, "FileIO", FullDisk)
            publisher = FilePublisher(path)
            await publisher.open()
            (outcome,) = await publisher.publish(Batch.of([event]))
        assert outcome.error == f"file {path}: the disk is full; free some space"
        assert await publisher.publish(Batch.of([event])) == [PUBLISHED]
        await publisher.close()
        assert path.read_bytes() == json_line(event)[:-20] + b"\n" + json_line(event)

    @pytest.mark.asyncio
    async def test_a_rotated_file_is_made_anew(self, tmp_path: Path) -> None:
        path, events = tmp_path / "out.jsonl", [make_event(), make_event()]
        async with opened(FilePublisher(path)) as publisher:
            await publisher.publish(Batch.of(events[:1]))
            path.rename(tmp_path / "out.1")
            assert await publisher.publish(Batch.of(events[1:])) == [PUBLISHED]
        assert path.read_bytes() == json_line(events[1])

    @pytest.mark.asyncio
    async def test_a_folder_that_goes_away_is_an_outage(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        async with opened(FilePublisher(folder / "out.jsonl")) as publisher:
            folder.rename(tmp_path / "other")
            (outcome,) = await publisher.publish(Batch.of([make_event()]))
        assert outcome.is_outage
        assert "No such file" in (outcome.error or "")

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("missing/out.jsonl", "No such file or directory; correct the path"),
            ("", "is not a regular file; name a file"),
            ("file/out.jsonl", "Not a directory; correct the path"),
            ("fifo", "is not a regular file; name a file"),
            ("loop", "symbolic links; correct the path"),
            ("x" * 300, "File name too long; correct the path"),
            ("/sys/kernel/uevent_seqnum", "correct the path or its rights"),  # not even root may write to it
        ],
    )
    async def test_a_wrong_path_does_not_open(self, tmp_path: Path, name: str, said: str) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(ConfigError, match=said):
            await FilePublisher(tmp_path / name).open()
