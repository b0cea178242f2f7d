"""The runner: a consumer that takes the event of an uploaded video and does its work once.

The work is a document here. Whatever it writes into MongoDB with ``tx`` happens once.
"""

import argparse
import asyncio
import json
import logging
from typing import Any, Final
from uuid import uuid4

from pymongo import MongoClient
from pymongo.client_session import ClientSession

from examples.video_checkout.checkout import TOPIC, Checkout
from pillarbox import Consumer, Event, Handlers, Inbox

GROUP: Final = "video-runner"

log = logging.getLogger(__name__)


class Runner:
    """Makes a preview of each uploaded video."""

    def __init__(self, url: str) -> None:
        self.client: MongoClient[dict[str, Any]] = MongoClient(url)
        self.previews = self.client.get_default_database()["previews"]
        # The topic has events for others too; their types are skipped.
        self.handlers = Handlers()
        self.handlers.on("video.uploaded", max_attempts=3)(Inbox(GROUP).once(self.client)(self.make_preview))

    def make_preview(self, event: Event, tx: ClientSession) -> None:
        video = json.loads(event.payload)  # {"bucket": ..., "object": ..., "media_type": ...}
        place = {"_id": f"{video['bucket']}/{video['object']}"}
        made = {"$set": {"media_type": video["media_type"]}, "$inc": {"times": 1}}
        self.previews.update_one(place, made, upsert=True, session=tx)
        log.info("preview of %s", place["_id"])

    def consumer(self, kafka: str) -> Consumer:
        source = f"{kafka}?topic={TOPIC}&group={GROUP}&session.timeout.ms=6000"
        return Consumer(GROUP, source, to=self.handlers, on_dead="block")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make previews of uploaded videos, each once.")
    parser.add_argument("store", help="for example mongodb://localhost/video?replicaSet=rs0")
    parser.add_argument("kafka", help="for example kafka://localhost:9092")
    parser.add_argument("--upload", type=int, default=0, metavar="N", help="upload so many videos first")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for _ in range(chosen.upload):
        Checkout(chosen.store).upload("videos", f"{uuid4()}.mp4", "video/mp4")
    asyncio.run(Runner(chosen.store).consumer(chosen.kafka).run())
