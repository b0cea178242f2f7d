"""Events as JSON lines, on standard output or at the end of a file."""

import asyncio
import errno
import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from pillarbox.batch import Batch
from pillarbox.errors import ConfigError, Outage
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.publishers._json_lines import json_line
from pillarbox.threads import Thread

logger = logging.getLogger(__name__)

_NEWLINE: Final = ord("\n")
_PATIENCE_SECONDS = 5.0
_WRONG_PATH: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
)
_REASONS: Final = {
    errno.EPIPE: "the reader of the pipe is gone; start the relay again with a reader",
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
}


class Sink(Protocol):
    """A raw stream of bytes. A write may take fewer bytes than it was given."""

    def write(self, data: memoryview, /) -> int | None: ...

    def flush(self) -> None: ...


class _LinePublisher(Publisher):
    """Writes a batch as lines in one go. Its events are published when all of it is written."""

    options: frozenset[str] = frozenset()

    def __init__(self) -> None:
        # One thread for all batches: a write that blocks must be over before the next one begins.
        self._thread: Thread | None = None
        self._closed: asyncio.Future[None] | None = None
        self._torn = False

    @abstractmethod
    def _prepare(self) -> None:
        """Get ready to write. In the thread."""

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Write all of it durably, or raise OSError or ValueError. In the thread."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close what ``_prepare`` opened. In the thread."""

    async def open(self) -> None:
        if self._closed is not None:
            return
        if self._thread is None:
            self._thread = Thread(f"pillarbox {self.description}")
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._thread.submit(self._prepare)), _PATIENCE_SECONDS)
        except TimeoutError as error:
            raise Outage(f"{self.description}: an earlier write still blocks; let its reader go on") from error
        except (OSError, ConfigError) as error:
            self._stop_thread()
            if isinstance(error, ConfigError):
                raise
            if error.errno in _WRONG_PATH:
                raise ConfigError(f"{self.description}: {error.strerror}; correct the path or its rights") from error
            raise Outage(self._sentence(error)) from error
        self._closed = asyncio.get_running_loop().create_future()

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures(joint=True)

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        if self._closed is None or self._thread is None:
            return [outage(f"{self.description} is not open; call open() first")] * len(batch)
        if not batch:
            return []
        call = asyncio.wrap_future(self._thread.submit(partial(self._write, b"".join(map(json_line, batch)))))
        try:
            await asyncio.wait({call, self._closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Takes the batch back unless its write has begun. A write that goes on may make an extra copy.
            call.cancel()
        if call.cancelled():
            return [UNTRIED] * len(batch)
        error = call.exception()
        if error is None:
            return [PUBLISHED] * len(batch)
        if not isinstance(error, OSError | ValueError):
            raise error
        return [outage(self._sentence(error))] * len(batch)

    async def close(self) -> None:
        closed, self._closed = self._closed, None
        if closed is None or self._thread is None:
            return
        last = asyncio.wrap_future(self._thread.submit(self._let_go))
        try:
            done, _ = await asyncio.wait({last}, timeout=_PATIENCE_SECONDS)
        finally:
            closed.set_result(None)
        if done:
            self._stop_thread()
        else:
            logger.warning("a write to %s still blocks; its events may be written twice", self.description)

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _write_all(self, sink: Sink, data: bytes) -> None:
        # The last write ended inside a line: the next event needs a new one.
        rest = memoryview(b"\n" + data if self._torn else data)
        while rest:
            written = sink.write(rest)
            if not written:
                raise BlockingIOError(errno.EAGAIN, "it takes no more now")
            self._torn = rest[written - 1] != _NEWLINE
            rest = rest[written:]
        sink.flush()

    def _sentence(self, error: OSError | ValueError) -> str:
        if not isinstance(error, OSError):
            return f"{self.description}: {error}"
        return f"{self.description}: {_REASONS.get(error.errno or 0) or error.strerror or type(error).__name__}"


class StdoutPublisher(_LinePublisher):
    """Events as JSON lines on standard output or another stream. They are published when it is flushed."""

    def __init__(self, stream: Sink | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._sink: Sink | None = None

    @classmethod
    def from_url(cls, url: str) -> "StdoutPublisher":
        """From ``stdout:``."""
        if url not in ("stdout:", "stdout://"):
            raise ConfigError(f"destination {url!r}: standard output takes no options; write `stdout:`")
        return cls()

    @property
    def description(self) -> str:
        return "stdout"

    def _prepare(self) -> None:
        self._sink = self._stream or _raw_stdout()

    def _let_go(self) -> None:
        """Standard output is not ours to close."""

    def _write(self, data: bytes) -> None:
        assert self._sink is not None
        self._write_all(self._sink, data)


class FilePublisher(_LinePublisher):
    """Events as JSON lines at the end of a file. They are published when they are on the disk.

    After the file was moved, for example by log rotation, a new one is made. Only one process may write to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)
        self._file: FileIO | None = None

    @classmethod
    def from_url(cls, url: str) -> "FilePublisher":
        """From ``file:///path/out.jsonl``; percent signs as in every URL."""
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or path in ("", "/") or path[0] != "/":
            raise ConfigError(f"destination {url!r}: write `file:///` and the whole path, as in file:///var/out.jsonl")
        if parts.query or parts.fragment:
            raise ConfigError(f"destination {url!r}: a file takes no options; write ? as %3F and # as %23")
        return cls(path)

    @property
    def description(self) -> str:
        return f"file {self._path}"

    def _prepare(self) -> None:
        self._let_go()
        is_new = not self._path.exists()
        # Before it is opened, because opening a named pipe would wait for its reader.
        if not is_new and not self._path.is_file():
            raise ConfigError(f"{self._path} is not a regular file; name a file, or use `stdout:` and a pipe")
        self._file = FileIO(self._path, "a+")
        if is_new:
            _sync_folder(self._path.parent)
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._torn = self._file.read(1) != b"\n"
        else:
            self._torn = False

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None or self._is_moved(self._file):
                self._prepare()
            assert self._file is not None
            self._write_all(self._file, data)
            os.fsync(self._file.fileno())
        except BaseException:
            # After a failed fsync the kernel forgets the unwritten bytes: read again what the file contains.
            self._let_go()
            raise

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _is_moved(self, file: FileIO) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return True


def _raw_stdout() -> Sink:
    # Python's own buffer would keep unwritten bytes and complain about them at exit.
    if sys.stdout is None:
        raise ConfigError("this process has no standard output; use `file:///...`")
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    sink: Sink | None = getattr(buffer, "raw", buffer)
    if sink is None:
        raise ConfigError("sys.stdout was replaced by something that takes no bytes; use `file:///...`")
    return sink


def _sync_folder(folder: Path) -> None:
    """Make a new file's name survive a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
