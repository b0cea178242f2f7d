"""`pillarbox demo` as a user meets it: in a terminal, in a pipe, interrupted, and in trouble."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from pillarbox.cli import main
from pillarbox.demo.crew import Crew, DemoFailed
from pillarbox.demo.shop import Files
from tests.terminal import Terminal

COMMAND = [sys.executable, "-W", "error", "-m", "pillarbox", "demo"]
WORKER = re.compile(r"(worker-\d) starts \(process (\d+)\)")
END_SECONDS = 30
# Makes the terminal the one that sends Ctrl-C, then becomes the demo.
IN_FRONT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Demo:
    """The demo in a pipe, with a folder of its own for what it leaves behind."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*COMMAND, *flags],
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.text = ""

    def read_until(self, words: str) -> None:
        assert self.process.stdout is not None
        while words not in self.text:
            line = self.process.stdout.readline()
            assert line, f"ended before {words!r}: {self.text}"
            self.text += line

    def end(self) -> tuple[int, str]:
        """Its exit code and what it complained of; nothing may be left."""
        rest, complaint = self.process.communicate(timeout=END_SECONDS)
        self.text += rest or ""
        self.assert_no_worker_left()
        assert list(self.folder.iterdir()) == []
        return self.process.returncode, complaint

    def workers(self) -> dict[str, int]:
        return {name: int(pid) for name, pid in WORKER.findall(self.text)}

    def assert_no_worker_left(self) -> None:
        assert not [pid for pid in self.workers().values() if psutil.pid_exists(pid)]


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.process.kill()
        demo.process.communicate()


@pytest.fixture
def demo(tmp_path: Path, demos: list[Demo]) -> Demo:
    demos.append(Demo(tmp_path))
    return demos[0]


def test_in_a_pipe_it_tells_the_story_and_proves_the_promise(tmp_path: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp_path, "--duration", "500ms"))
    assert demo.end() == (0, "")
    story = ("worker-2 starts", "is killed with SIGKILL", "worker-2 took over", "worker-3 starts", "The shop is closed")
    places = [demo.text.index(words) for words in (*story, "The promise held.")]
    assert places == sorted(places)
    assert "\x1b" not in demo.text


def test_json_is_one_document(tmp_path: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(tmp_path, "--duration", "500ms", "--json"))
    assert demo.end() == (0, "")
    proof = json.loads(demo.text)
    assert proof["holds"] is True
    assert proof["committed"] == proof["delivered"] > 0
    assert proof["rolled_back"] > 0
    assert (proof["lost"], proof["phantom"], proof["keys_out_of_order"]) == (0, 0, 0)
    assert proof["copies"] <= proof["copies_limit"] == proof["slots"] * proof["batch"]
    assert set(proof["deliveries"]) >= {"worker-1", "worker-2"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_nothing(demo: Demo, number: signal.Signals) -> None:
    demo.read_until("shards: worker-1")
    demo.process.send_signal(number)
    assert demo.end() == (128 + number, "")
    assert demo.text.endswith("Interrupted: nothing is proven, and nothing is left behind.\n")


def test_a_closed_pipe_ends_it_and_leaves_nothing(demo: Demo) -> None:
    demo.read_until("worker-2 starts")
    assert demo.process.stdout is not None
    demo.process.stdout.close()
    demo.process.stdout = None
    assert demo.end() == (141, "")


def test_a_worker_that_dies_by_itself_is_told(demo: Demo) -> None:
    demo.read_until("worker-2 starts")
    os.kill(demo.workers()["worker-2"], signal.SIGKILL)
    assert demo.end() == (1, "pillarbox: worker-2 ended unexpectedly, by signal 9\n")


def test_workers_end_with_a_demo_that_was_killed(demo: Demo) -> None:
    demo.read_until("shards: worker-1")
    workers = [psutil.Process(pid) for pid in demo.workers().values()]
    demo.process.kill()
    assert psutil.wait_procs(workers, timeout=END_SECONDS)[1] == []


def test_a_worker_that_cannot_start_is_told(tmp_path: Path) -> None:
    crew = Crew(tmp_path, Files.in_folder(tmp_path), module="pillarbox.cli.absent")
    try:
        crew.start("worker-1").process.wait(END_SECONDS)
        with pytest.raises(DemoFailed, match=r"worker-1 ended unexpectedly, with exit code 1: .*No module named"):
            crew.check()
    finally:
        crew.end()


def test_no_folder_to_write_to_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert main(["demo"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("pillarbox: the demo cannot make a folder for its databases: No such file or directory;")
    assert "set TMPDIR" in told


@pytest.mark.parametrize("blocks", [10, 300])
def test_a_full_disk_is_one_sentence(tmp_path: Path, blocks: int) -> None:
    limited = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *COMMAND]
    # Without `make coverage`, which would write in this process too.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment = {**inherited, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=END_SECONDS)
    assert ended.returncode == 1
    assert re.fullmatch(r"pillarbox: .*; free disk space.*\n", ended.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "2h"])
def test_a_wrong_duration_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"--duration={text}"]) == 2
    assert f"--duration is '{text}'; use " in capsys.readouterr().err


class InTerminal:
    """The demo in a pseudo-terminal of this width."""

    def __init__(self, folder: Path, columns: int, *flags: str, **environment: str) -> None:
        self.terminal = Terminal(columns)
        self.written = ""
        self._undecoded = b""
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        settings = {**os.environ, "TERM": "xterm", "NO_COLOR": "", "TMPDIR": str(folder), **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_FRONT, *COMMAND, *flags],
            env=settings,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)

    def read(self) -> bool:
        """False at the end."""
        try:
            self._undecoded += os.read(self._fd, 65536)
        except OSError:  # how Linux says that the other side has closed
            return False
        text = self._undecoded.decode(errors="ignore")
        if text.encode() == self._undecoded:
            self._undecoded = b""
            self.written += text
            self.terminal.feed(text)
        return True

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.terminal.text):
            assert self.read(), f"ended before {pattern!r}: {self.terminal.text}"

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def end(self) -> int:
        while self.read():
            pass
        return self.process.wait(END_SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


class Open(Protocol):
    def __call__(self, columns: int, *flags: str, **environment: str) -> InTerminal: ...


@pytest.fixture
def in_terminal(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as opened:

        def open_one(columns: int, *flags: str, **environment: str) -> InTerminal:
            demo = InTerminal(tmp_path, columns, *flags, **environment)
            opened.callback(demo.close)
            return demo

        yield open_one


def test_in_a_narrow_terminal_the_kill_is_seen(in_terminal: Open) -> None:
    demo = in_terminal(40, "--duration", "500ms")
    demo.read_until("killed   ·*▒")
    assert not demo.terminal.cursor_shown
    demo.read_until("killed   ·{16}")
    assert demo.end() == 0
    terminal = demo.terminal
    assert terminal.cursor_shown
    assert terminal.coloured
    assert terminal.wrapped == 0
    assert terminal.lines[-2:] == ["The promise held.", ""]
    assert terminal.text.count("worker-1    killed") == 1


def test_ctrl_c_in_a_terminal_leaves_nothing(tmp_path: Path, in_terminal: Open) -> None:
    demo = in_terminal(100, NO_COLOR="1")
    demo.read_until("worker-2    serving")
    demo.press(b"\x03")
    assert demo.end() == 130
    assert demo.terminal.cursor_shown
    assert not demo.terminal.coloured
    assert demo.terminal.wrapped == 0
    assert "Traceback" not in demo.written
    assert "Interrupted: nothing is proven" in demo.terminal.text
    assert not [pid for _, pid in WORKER.findall(demo.written) if psutil.pid_exists(int(pid))]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("columns", "kind"), [(20, "xterm"), (80, "dumb")])
def test_a_terminal_that_is_too_little_gets_plain_lines(in_terminal: Open, columns: int, kind: str) -> None:
    demo = in_terminal(columns, TERM=kind)
    demo.read_until("shards: worker-1")
    demo.press(b"\x03")
    assert demo.end() == 130
    assert "\x1b" not in demo.written
