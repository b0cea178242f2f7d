"""The runner of the checkout, killed at its work."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pymongo.collection import Collection

from servers import Kafka, Mongo
from tests.examples.shops import Relays, Shop, until
from tests.mongo_outbox import database_url

ROOT = Path(__file__).parents[2]
VIDEOS = 30


class Runners:
    """One runner at a time."""

    def __init__(self, *arguments: str) -> None:
        self._words = [sys.executable, "-m", "examples.video_checkout.runner", *arguments]
        self.running = self._start()

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()
        self.running = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def has_made(previews: Collection[dict[str, Any]], count: int) -> Callable[[], bool]:
    return lambda: previews.count_documents({}) >= count


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_work_of_each_event_is_done_once_though_the_runner_is_killed(
    mongo: Mongo, kafka: Kafka, relays: Relays
) -> None:
    url = database_url(mongo.url, f"runner_{uuid4().hex[:12]}")
    with closing(Shop(url, kafka)) as shop:
        shop.make()
        previews = shop.checkout.client.get_default_database()["previews"]
        relays(1, url, kafka)
        runner = Runners(url, kafka.url)
        try:
            for number in range(VIDEOS):
                shop.checkout.upload("videos", f"{number}.mp4", "video/mp4")
                if number % 10 == 9 and number < 25:
                    until(has_made(previews, number - 4), "the runner to work")
                    runner.kill()
            # A transaction of a runner that was killed keeps its inbox row for a minute, until MongoDB ends it.
            until(has_made(previews, VIDEOS), "all previews", seconds=150)
        finally:
            runner.running.kill()
            runner.running.wait()
        assert {each["times"] for each in previews.find()} == {1}
        assert {each["media_type"] for each in previews.find()} == {"video/mp4"}
