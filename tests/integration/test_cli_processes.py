"""``pillarbox relay --processes``: one service on several cores."""

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import psutil
import pytest

from pillarbox.cli.processes import Processes
from pillarbox.errors import ConfigError
from tests.integration.commands import Command, Started
from tests.integration.relays import until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def shop(tmp_path: Path) -> Command:
    command = Command(tmp_path, f"sqlite:///{tmp_path / 'shop.db'}")
    assert command("init").code == 0
    return command


@contextmanager
def served(command: Command, *words: str, log: Path) -> Iterator[Started]:
    with (
        log.open("wb") as err,
        command.start("relay", "--to", f"file:{log.parent / 'sent.jsonl'}", *words, stderr=err) as running,
    ):
        yield running


def children(running: Started) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(running.pid).children()]
    except psutil.NoSuchProcess:
        return []


def workers(command: Command) -> list[str]:
    found: Any = command("status", "--json").json
    return [worker["name"] for stream in found for worker in stream["worker_list"] if worker["live"]]


def gone(pids: list[int]) -> Callable[[], bool]:
    return lambda: not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.asyncio
async def test_the_processes_share_the_streams_and_stop_together(shop: Command, tmp_path: Path) -> None:
    with served(shop, "--processes", "2", log=tmp_path / "log") as running:
        await until(lambda: len(workers(shop)) == 2)
        pids = children(running)
        assert len(pids) == 2
        assert sorted(int(name.split("-")[-2]) for name in workers(shop)) == sorted(pids)
        running.terminate()
        assert running.wait(30) == 0
        assert gone(pids)()
    assert workers(shop) == []


@pytest.mark.asyncio
async def test_one_that_dies_is_replaced_and_said(shop: Command, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with served(shop, "--processes", "2", "--log-format", "json", log=log) as running:
        await until(lambda: len(workers(shop)) == 2)
        killed, other = children(running)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(children(running)) == 2 and killed not in children(running))
        assert other in children(running)
        # One that Ctrl-C finds in its imports ends as any program does, with 130.
        await until(lambda: log.read_text().count('"action": "started"') == 3)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
    said = [json.loads(line) for line in log.read_text().splitlines()]
    died = [line for line in said if line.get("action") == "process_died"]
    assert [line["message"] for line in died] == [
        f"process {killed} of 'pillarbox' was killed by SIGKILL; another one takes its place"
    ]


@pytest.mark.asyncio
async def test_they_end_when_the_service_is_killed(shop: Command, tmp_path: Path) -> None:
    with served(shop, "--processes", "2", log=tmp_path / "log") as running:
        await until(lambda: len(workers(shop)) == 2)
        pids = children(running)
        running.kill()
        running.wait(30)
        # Their parent is gone; whoever adopted them may not have asked how they ended.
        await until(lambda: all(not psutil.pid_exists(pid) or _has_ended(pid) for pid in pids))
    assert workers(shop) == []


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_drain_ends_with_all_of_them(shop: Command, tmp_path: Path) -> None:
    for number in range(6):
        shop("events", "add", "order.created", json.dumps({"id": number}), "--key", str(number))
    ended = shop("relay", "--drain", "--to", f"file:{tmp_path / 'sent.jsonl'}", "--processes", "3")
    assert ended.code == 0, ended.err
    assert len((tmp_path / "sent.jsonl").read_text().splitlines()) == 6
    assert ended.err.count("is drained") == 3


def test_a_wrong_setting_ends_them_all(shop: Command) -> None:
    ended = shop("relay", "--to", "kafka://localhost:1", "--processes", "2")
    assert ended.code == 2
    assert set(ended.err.splitlines()) == {ended.err.splitlines()[0]}
    assert "topic" in ended.err


@pytest.mark.asyncio
async def test_each_listens_on_a_port_of_its_own(shop: Command, tmp_path: Path) -> None:
    with closing(socket()) as one, closing(socket()) as two:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        try:
            two.bind(("127.0.0.1", port + 1))
        except OSError:
            pytest.fail("the port after a free port is taken; run it again")
    with served(shop, "--processes", "2", "--listen", f"127.0.0.1:{port}", log=tmp_path / "log") as running:
        await until(lambda: all(answers(f"http://127.0.0.1:{each}/livez") for each in (port, port + 1)))
        running.terminate()
        assert running.wait(30) == 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_without_fork_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ConfigError, match="start a service for each process"):
        Processes(2)
