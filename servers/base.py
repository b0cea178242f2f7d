"""The contract of a test server, and the life cycle that all of them share."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from subprocess import SubprocessError
from types import TracebackType
from typing import ClassVar, Self

import psutil

from . import process
from .errors import MissingError, ServerError, StartError


class Server(ABC):
    """A real server on 127.0.0.1 with a port and a data folder of its own. Nothing exists before `start`."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """Debian packages that it needs."""
    on_request: ClassVar[bool] = False
    """Whether it is fetched only when named."""
    ready_line: ClassVar[str]
    """The line in the server's log that says that it takes connections."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_seconds: ClassVar[float] = 60

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self._folder: Path | None = None
        self._port = 0
        self._main: subprocess.Popen[bytes] | None = None
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._log_start = 0
        self._cancelled = False
        self._last_log = ""

    def missing(self) -> str | None:
        """One sentence that names what is missing and the command that installs it, or None."""
        return None

    def fetched(self) -> bool:
        """Whether `fetch` has nothing left to download."""
        return True

    def fetch(self) -> None:  # noqa: B027 - some have nothing to fetch
        """Brings what the server needs into the cache; quick when it is there."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def prepare(self) -> None:
        """Fills the new folder: configuration and an initialised data folder."""

    @abstractmethod
    def command(self) -> Sequence[str]: ...

    def environment(self) -> Mapping[str, str]:
        """Variables to add to those of this process."""
        return {}

    def ready(self) -> bool:
        """Whether the server takes work; asked again and again after each start."""
        return self.ready_line in self._new_log()

    def after_first_start(self) -> None:  # noqa: B027 - most need nothing
        """Set up the server once, when it takes connections."""

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise ServerError(f"{self.name} has no folder before start() or after close()")
        return self._folder

    @property
    def port(self) -> int:
        if self._folder is None:
            raise ServerError(f"{self.name} has no port before start() or after close()")
        return self._port

    @property
    def running(self) -> bool:
        return self._main is not None and self._main.poll() is None

    def cpu_seconds(self) -> float:
        """The CPU time of all its processes since the start, also of those that have ended."""
        if self._main is None:
            raise ServerError(f"{self.name} has no process before start() or after stop()")
        main = psutil.Process(self._main.pid)
        seconds = 0.0
        for each in main.children(recursive=True):
            with suppress(OSError):  # it has just ended
                seconds += process.cpu_seconds(each.pid)
        ended = main.cpu_times()
        return seconds + process.cpu_seconds(main.pid) + ended.children_user + ended.children_system

    def start(self) -> Self:
        """Returns when the server takes work. A failed start leaves nothing behind."""
        if self.running:
            return self
        if sentence := self.missing():
            raise MissingError(sentence)
        self.fetch()
        first = self._folder is None
        try:
            if first:
                self._folder = process.make_folder(self.name)
                self._port = process.free_port()
                self.prepare()
            self._spawn()
            if first:
                self.after_first_start()
        except BaseException as error:
            self.close()
            if isinstance(error, StartError) or not isinstance(error, (ServerError, OSError, SubprocessError)):
                raise
            raise StartError(f"{self.name} did not start: {error}; its log ends:\n{self.log()}") from error
        return self

    def cancel(self) -> None:
        """Makes a `start` in another thread fail soon; for good."""
        self._cancelled = True

    def stop(self) -> None:
        """Ends the server as its operator would; the data stays for `restart`."""
        if self._main is not None and self.running:
            self.resume()
            self._main.send_signal(self.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                self._main.wait(timeout=30)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the server; the data stays for `restart`."""
        if self._folder is None:
            return
        process.kill(self._folder)
        for each in (self._main, *self._helpers):
            if each is not None:
                each.wait()
        self._main = None
        self._helpers.clear()

    def pause(self) -> None:
        """The server keeps its connections and answers nothing until `resume`."""
        process.pause(self.folder)

    def resume(self) -> None:
        process.resume(self.folder)

    def restart(self) -> None:
        """Again on the same port and data, whether the server runs, was stopped or was killed."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Ends the server and deletes its folder. Safe to call twice."""
        folder = self._folder
        if folder is None:
            return
        # Not stop(), which takes seconds to bring data to rest that is deleted here.
        self.kill()
        self._last_log = self.log()
        self._folder = None
        process.drop_folder(folder)

    def log(self) -> str:
        """The last lines of the server's own log, also after `close`."""
        if self._folder is None:
            return self._last_log
        return "\n".join(_read(self._log_file).splitlines()[-100:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _log_file(self) -> Path:
        return self.folder / "server.log"

    def _new_log(self) -> str:
        return _read(self._log_file, self._log_start)

    def _spawn(self) -> None:
        self._log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        main = self._main = self._launch(self.command())

        def ready() -> bool:
            if main.poll() is not None:
                raise ServerError(f"it ended with exit code {main.returncode}")
            return self.ready()

        self.wait_for(ready, what=f"{self.name} to be ready")

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """For the steps of a start: ends early when the start is cancelled."""

        def checked() -> bool:
            if self._cancelled:
                raise ServerError("it was cancelled")
            return ready()

        process.wait_until(checked, seconds=self.start_seconds, what=what)

    def launch_helper(self, command: Sequence[str]) -> None:
        """Starts a process that lives as long as the server's main one."""
        self._helpers.append(self._launch(command))

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log_file.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the test process, which stops the server.
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class ServerSet(Server):
    """Several nodes that are one server to a client. A single node is broken through `nodes`."""

    nodes: Sequence[Server]

    def missing(self) -> str | None:
        return self.nodes[0].missing()

    def fetched(self) -> bool:
        return self.nodes[0].fetched()

    def fetch(self) -> None:
        self.nodes[0].fetch()

    @property
    def running(self) -> bool:
        return all(node.running for node in self.nodes)

    def cancel(self) -> None:
        super().cancel()
        for node in self.nodes:
            node.cancel()

    def stop(self) -> None:
        in_parallel([node.stop for node in self.nodes])

    def kill(self) -> None:
        in_parallel([node.kill for node in self.nodes])

    def pause(self) -> None:
        in_parallel([node.pause for node in self.nodes])

    def resume(self) -> None:
        in_parallel([node.resume for node in self.nodes])

    def close(self) -> None:
        in_parallel([node.close for node in self.nodes])
        super().close()

    def log(self) -> str:
        return "\n".join(f"node {number}:\n{node.log()}" for number, node in enumerate(self.nodes, 1))

    def prepare(self) -> None:
        """The nodes have their own folders."""

    def command(self) -> Sequence[str]:
        raise NotImplementedError("a set has no process of its own")

    def _spawn(self) -> None:
        start_all(self.nodes)


def start_all(servers: Sequence[Server]) -> None:
    """Starts the servers at the same time; when one fails, the others are closed and its error is raised."""
    errors = [error for error in start_each(servers) if error]
    if errors:
        in_parallel([server.close for server in servers])
        raise errors[0]


def start_each(servers: Sequence[Server]) -> list[Exception | None]:
    """Starts the servers at the same time; returns what went wrong with each. Ctrl-C closes them all."""
    try:
        with ThreadPoolExecutor(max_workers=len(servers) or 1) as pool:
            futures = [pool.submit(server.start) for server in servers]
            try:
                # With a timeout, because a signal may reach another thread, and Python handles it only in this one.
                while wait(futures, timeout=0.1).not_done:
                    pass
            except BaseException:
                # Each ends in its own thread: to delete a folder that is being filled would leave half of it.
                for server in servers:
                    server.cancel()
                raise
    except BaseException:
        in_parallel([server.close for server in servers])
        raise
    errors = [future.exception() for future in futures]
    return [error if isinstance(error, Exception) else None for error in errors]


def in_parallel(calls: Sequence[Callable[[], object]]) -> None:
    """Makes every call, each in a thread; raises the first error after the last one returned."""
    with ThreadPoolExecutor(max_workers=len(calls) or 1) as pool:
        futures = [pool.submit(call) for call in calls]
    for future in futures:
        future.result()


def _read(file: Path, start: int = 0) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
