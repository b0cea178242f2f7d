"""`python -m servers`: servers by hand."""

from __future__ import annotations

import argparse
import difflib
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from . import REGISTRY, Server, ServerError, apt, start_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m servers", description="Real servers for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="which servers this machine has")
    fetch = commands.add_parser("fetch", help="bring what the servers need; as root, Debian packages too")
    fetch.add_argument("names", nargs="*", metavar="name")
    up = commands.add_parser("up", help="start servers and keep them until Ctrl-C")
    up.add_argument("names", nargs="+", metavar="name")
    arguments = parser.parse_args()
    if arguments.command == "list":
        return _list()
    unknown = [name for name in arguments.names if name not in REGISTRY]
    if unknown:
        print(f"pillarbox: {_unknown(unknown[0])}", file=sys.stderr)
        return 2
    if arguments.command == "up":
        return _up([REGISTRY[name]() for name in dict.fromkeys(arguments.names)])
    classes = [REGISTRY[name] for name in arguments.names] or [c for c in REGISTRY.values() if not c.on_request]
    return _fetch([each() for each in classes], {} if arguments.names else apt.TOOLS)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.4)
    return f"unknown server '{name}', " + (f"did you mean '{close[0]}'?" if close else f"known: {', '.join(REGISTRY)}")


def _list() -> int:
    for name, each in REGISTRY.items():
        server = each()
        state = server.missing()
        if state is None and not server.fetched():
            state = f"not fetched yet; run `python -m servers fetch {name}`"
        print(f"{name:<14} {f'missing: {state}' if state else 'present'}")
    return 0


def _fetch(servers: Sequence[Server], tools: Mapping[str, str]) -> int:
    groups = [server.packages for server in servers if server.packages and server.missing()]
    groups += [(package,) for program, package in tools.items() if shutil.which(program) is None]
    failures = apt.install(groups) if groups else []
    for server in servers:
        try:
            # A failure of apt is in the list already.
            if not (failures and server.packages and server.missing()):
                _fetch_one(server)
        except (ServerError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{server.name}: {error}")
    for failure in failures:
        print(f"pillarbox: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _fetch_one(server: Server) -> None:
    if sentence := server.missing():
        raise ServerError(sentence)
    server.fetch()


def _up(servers: Sequence[Server]) -> int:
    # SIGINT too: a shell that puts the command into the background has it ignored.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        start_all(servers)
        for server in servers:
            print(server.name, server.url, flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except ServerError as error:
        print(f"pillarbox: {error}", file=sys.stderr)
        return 1
    finally:
        for server in servers:
            server.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
