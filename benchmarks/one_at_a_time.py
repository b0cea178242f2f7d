"""The loop of many systems on MongoDB: claim the oldest event, send it, mark it, and go on with the next."""

import asyncio
from typing import Any

from pymongo import AsyncMongoClient

from benchmarks.child import answer, settings_from_parent
from benchmarks.clock import Clock
from benchmarks.wire import BareProducer


async def run(settings: dict[str, Any]) -> Clock:
    clock = Clock(settings["events"])
    producer = BareProducer(settings["servers"], settings["topic"])
    async with AsyncMongoClient[dict[str, Any]](
        settings["url"], uuidRepresentation="standard", tz_aware=True, w="majority"
    ) as client:
        events = client.get_default_database()[f"{settings['prefix']}_event"]
        await events.create_index([("status", 1), ("created_at", 1)], name="age")
        claim, settle = {"$set": {"status": "processing"}}, {"$set": {"status": "published"}}
        while not clock.done.is_set():
            clock.begin()
            event = await events.find_one_and_update({"status": "pending"}, claim, sort=[("created_at", 1)])
            if event is None:
                raise RuntimeError("the backlog ended before the round")
            sent = [(event["_id"]["id"], event["key"], event["created_at"], event["payload"])]
            await asyncio.to_thread(producer.send, sent)
            await events.update_one({"_id": event["_id"], "status": "processing"}, settle)
            clock.settle(1)
    return clock


def main() -> None:
    answer(asyncio.run(run(settings_from_parent())).report())


if __name__ == "__main__":
    main()
