"""RabbitMQ from Debian's package, as a node of its own beside the one that Debian would run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import apt
from .base import Server
from .errors import ServerError
from .process import free_port

# Not the programs on the PATH: those wrappers want to be root and to become another user.
HOMES = Path("/usr/lib/rabbitmq/lib")


class RabbitMQ(Server):
    """`settings` are lines of rabbitmq.conf."""

    name = "rabbitmq"
    packages = ("rabbitmq-server",)
    ready_line = "Server startup complete"

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings)
        self._names_port = free_port()
        self._distribution_port = free_port()

    def missing(self) -> str | None:
        if not list(HOMES.glob("rabbitmq_server-*/sbin")) or shutil.which("epmd") is None:
            return f"RabbitMQ is missing; {apt.hint(self.packages)}"
        return None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def prepare(self) -> None:
        settings = {
            "disk_free_limit.absolute": "50MB",
            "log.console": "true",
            "log.file": "false",
            **self.settings,
        }
        lines = (f"{key} = {value}\n" for key, value in settings.items())
        (self.folder / "rabbitmq.conf").write_text("".join(lines))
        (self.folder / "enabled_plugins").write_text("[].\n")
        self._copy_home(next(HOMES.glob("rabbitmq_server-*")))

    def command(self) -> Sequence[str]:
        # Otherwise Erlang starts its name server as a daemon that outlives the node.
        self.launch_helper(["epmd", "-address", "127.0.0.1", "-port", str(self._names_port)])
        return [str(self.folder / "sbin" / "rabbitmq-server")]

    def messages(self, queue: str) -> int:
        """The messages that a queue has, also those that a consumer has not settled."""
        lines = self.ctl("--silent", "list_queues", "name", "messages").splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == queue)

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on this node. Returns what it prints."""
        program = next(HOMES.glob("rabbitmq_server-*")) / "escript" / "rabbitmqctl"
        environment = {**os.environ, **self.environment()}
        done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ServerError(f"rabbitmqctl {arguments[0]} failed: {done.stderr or done.stdout}")
        return done.stdout

    def _copy_home(self, home: Path) -> None:
        # Erlang looks for each of a thousand modules in every folder of its path. Without the plugins of
        # the package, of which none is used, the start takes half the time.
        shutil.copytree(home / "sbin", self.folder / "sbin")
        (self.folder / "plugins").mkdir()
        for application in _needed_by("rabbit", home / "plugins"):
            (self.folder / "plugins" / application.name).symlink_to(application)

    def environment(self) -> Mapping[str, str]:
        own = {
            "NODENAME": f"pillarbox{self.port}@localhost",
            "NODE_IP_ADDRESS": "127.0.0.1",
            "NODE_PORT": str(self.port),
            "DIST_PORT": str(self._distribution_port),
            "MNESIA_BASE": str(self.folder / "data"),
            "LOG_BASE": str(self.folder / "logs"),
            "PID_FILE": str(self.folder / "pid"),
            "CONFIG_FILE": str(self.folder / "rabbitmq"),
            "ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "CONF_ENV_FILE": os.devnull,
            "SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        return {
            **{f"RABBITMQ_{key}": value for key, value in own.items()},
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # The start script then becomes the server instead of waiting for it.
            "RUNNING_UNDER_SYSTEMD": "true",
        }


def _needed_by(application: str, plugins: Path) -> Iterable[Path]:
    """The folders of the application and of all that it needs, except those of Erlang itself."""
    found: dict[str, Path] = {}
    wanted = [application]
    while wanted:
        name = wanted.pop()
        folder = next(plugins.glob(f"{name}-[0-9]*"), None)
        if folder is None or name in found:
            continue
        found[name] = folder
        described = (folder / "ebin" / f"{name}.app").read_text()
        needs = re.search(r"{applications,\s*\[([^]]*)]", described)
        wanted += re.findall(r"\w+", needs[1]) if needs else []
    return found.values()
