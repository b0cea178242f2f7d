"""Relays in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.video_checkout.checkout import TOPIC
from servers import Kafka
from tests.examples.shops import WAIT, Relays


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[Relays]:
    """`relays(3, url, kafka)` starts so many; returns their logs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(count: int, store: str, kafka: Kafka, options: str = "") -> list[Path]:
        environment = os.environ | {"PILLARBOX_STORE": store}
        to = f"{kafka.url}?topic={TOPIC}&envelope=legacy{options}"
        words = [sys.executable, "-m", "pillarbox", "relay", "--to", to]
        logs = [tmp_path / f"relay-{len(started) + number}.log" for number in range(count)]
        for log in logs:
            with log.open("wb") as file:
                started.append(subprocess.Popen(words, env=environment, stderr=file))
        return logs

    yield start
    for each in started:
        each.terminate()
    try:
        assert [each.wait(timeout=WAIT) for each in started] == [0] * len(started)
    finally:
        for each in started:
            each.kill()
            each.wait()
