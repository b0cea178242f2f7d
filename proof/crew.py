"""The processes of a run: relays and writers."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from proof.databases.base import Database
from proof.network import Network
from proof.proxy import Proxy
from proof.worker import Orders
from proof.worker import as_argument as worker_argument
from proof.writer import Load
from proof.writer import as_argument as writer_argument


@dataclass(slots=True)
class Member:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]
    to_database: Proxy | None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def is_stopped(self) -> bool:
        """Whether a SIGSTOP has stopped it."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:  # it ended
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(slots=True)
class Worker(Member):
    """A relay."""

    def arm(self, number: signal.Signals, point: str) -> None:
        """Have it send itself this signal when it reaches that point."""
        self._tell(f"{number.name} {point}")

    def disarm(self) -> None:
        self._tell("")

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return


@dataclass(slots=True)
class Client(Member):
    """A writer."""

    load: Load


class Crew:
    """Starts and ends the processes; ``close`` ends all of them."""

    def __init__(self, folder: Path, orders: Orders, database: Database, network: Network) -> None:
        self.folder = folder
        self.network = network
        self._database = database
        self.orders = orders
        self.workers: list[Worker] = []
        self._alive: list[Worker] = []
        self.writers: list[Client] = []
        self.migrated: dict[str, subprocess.Popen[bytes]] = {}  # by the prefix of their tables
        self._taken: dict[
            str, tuple[int, float]
        ] = {}  # by worker: how many bytes of its trace were read, and its last take

    def start_worker(self, clock: float = 0.0) -> Worker:
        """``clock``: the error of its clock in seconds."""
        number = len(self.workers) + 1
        name = f"w{number}"
        orders = replace(self.orders, name=name)
        to_database, to_broker = self.network.to_database(), self.network.to_broker(number)
        if to_database is not None:
            orders.store = self._database.through(to_database.port)
        if to_broker:
            orders.broker = {**orders.broker, "servers": ",".join(f"127.0.0.1:{each.port}" for each in to_broker)}
        process = self._start("proof.worker", name, worker_argument(orders), clock=clock)
        worker = Worker(name, process, to_database)
        self.workers.append(worker)
        self._alive.append(worker)
        return worker

    def start_writer(self, load: Load, clock: float = 0.0) -> Client:
        """``clock``: the error of its clock in seconds. The ids of its events contain that clock."""
        load = replace(load, name=f"writer-{len(self.writers) + 1}", seed=load.seed + len(self.writers))
        proxy = self.network.to_database()
        if proxy is not None:
            load.url = self._database.through(proxy.port)
        process = self._start("proof.writer", load.name, writer_argument(load), clock=clock)
        client = Client(load.name, process, proxy, load)
        self.writers.append(client)
        return client

    def start_migration(self, seconds: float) -> subprocess.Popen[bytes]:
        """Start a migration that kills itself after so many seconds."""
        prefix = f"moved{len(self.migrated) + 1}"
        arguments = self._database.url, prefix, f"{seconds:.4f}"
        self.migrated[prefix] = process = self._start("proof.migrator", prefix, *arguments)
        return process

    def _start(self, module: str, name: str, *arguments: str, clock: float = 0.0) -> subprocess.Popen[bytes]:
        shifted = ["proof.shifted", str(clock)] if clock else []
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *shifted, module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def await_start(self, seconds: float = 60.0) -> None:
        """Wait until every relay has started and a first transaction has ended."""
        deadline = time.monotonic() + seconds
        files = [self.folder / f"trace-{worker.name}.jsonl" for worker in self.workers]
        files.append(self.folder / "writers.jsonl")
        while not all(file.exists() and file.stat().st_size for file in files):
            ended = [member.name for member in (*self.workers, *self.writers) if not member.is_alive]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not start; see {self.folder}/{ended[0] if ended else 'w1'}.log")
            time.sleep(0.05)

    def transactions(self) -> int:
        """The number of transactions that have ended."""
        path = self.folder / "writers.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def taken(self) -> dict[str, float]:
        """The instant at which each relay last took shards; without those that never did."""
        for worker in self.alive:
            path = self.folder / f"trace-{worker.name}.jsonl"
            if not path.exists():
                continue
            read, last = self._taken.get(worker.name, (0, 0.0))
            with path.open("rb") as file:
                file.seek(read)
                lines, _, _ = file.read().rpartition(b"\n")
            takes = [line for line in lines.splitlines() if b'"kind":"take"' in line]
            last = float(json.loads(takes[-1])["at"]) if takes else last
            self._taken[worker.name] = read + len(lines) + bool(lines), last
        return {name: last for name, (_, last) in self._taken.items() if last}

    def peak_mb(self) -> float:
        """The highest memory use of any relay."""
        return max((_peak_mb(worker.process.pid) for worker in self.alive), default=0.0)

    @property
    def alive(self) -> list[Worker]:
        # A campaign ends hundreds of relays: do not ask for those again. The sampler asks in a thread of its own; if it
        # replaced the list, it could lose a relay that starts at that moment.
        for worker in [worker for worker in self._alive if not worker.is_alive]:
            with suppress(ValueError):
                self._alive.remove(worker)
        return list(self._alive)

    @property
    def clients(self) -> list[Client]:
        """The writers that are alive."""
        return [writer for writer in self.writers if writer.is_alive]

    def stop_writers(self) -> None:
        for writer in self.clients:
            writer.signal(signal.SIGCONT)
            writer.signal(signal.SIGTERM)
        for writer in self.writers:
            if not writer.wait(60):
                writer.process.kill()
                writer.process.wait()

    def stop_workers(self, seconds: float = 30.0) -> list[str]:
        """Send SIGTERM to all relays. Returns the names of those that did not end."""
        for worker in self.alive:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        late = [worker for worker in self.workers if not worker.wait(max(0.1, deadline - time.monotonic()))]
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for worker in late:
                worker.signal(number)
            if late:
                time.sleep(0.5)
        self.close()
        return [worker.name for worker in late]

    def broken(self) -> list[str]:
        """The processes that ended by themselves, and not by SIGTERM or SIGKILL."""
        wanted = (0, -signal.SIGKILL, -signal.SIGTERM)  # -SIGTERM: before it had installed its handler
        return [
            f"{member.name} ({member.process.returncode})"
            for member in (*self.workers, *self.writers)
            if not member.is_alive and member.process.returncode not in wanted
        ]

    def close(self) -> None:
        for process in self.migrated.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for member in (*self.workers, *self.writers):
            if member.is_alive:
                member.process.send_signal(signal.SIGCONT)
                member.process.kill()
                member.process.wait()
            if member.process.stdin is not None:
                with suppress(BrokenPipeError):
                    member.process.stdin.close()


def _peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended meanwhile
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)
