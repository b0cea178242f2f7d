"""The topics of a call's events as the cluster describes them, and the client's settings that follow from them."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pillarbox.event import Event
from pillarbox.publisher import Result
from pillarbox.publishers._link import Link
from pillarbox.publishers.kafka.call import Target
from pillarbox.publishers.kafka.outcomes import Outcomes
from pillarbox.publishers.kafka.topics import Topic, Topics, UnreachableError

TICK_SECONDS: Final = 0.1
QUIET_SECONDS: Final = 5.0
# A payload this much below the limit fits with its headers; if not, the broker says so.
_HEADROOM_BYTES: Final = 16_384


class Targets:
    """Looks up topics. Blocking."""

    def __init__(
        self, topics: Topics, link: Link, outcomes: Outcomes, default_topic: str, config: Mapping[str, Any]
    ) -> None:
        self._topics = topics
        self._link = link
        self._outcomes = outcomes
        self._default_topic = default_topic
        self._compresses = _compresses(config)

    def of(self, events: Sequence[Event], stop: threading.Event) -> dict[str, Target]:
        """The targets by the events' ``topic``; empty when stopped before the cluster answered."""
        names = {event.topic for event in events}
        silent_since = time.monotonic()
        while not stop.is_set():
            try:
                topics = self._topics.get({name or self._default_topic for name in names} - {""})
            except UnreachableError as error:
                if (seconds := time.monotonic() - silent_since) >= QUIET_SECONDS:
                    self._link.silent(seconds, str(error))
                stop.wait(TICK_SECONDS)
                continue
            return {name: self._target(name, topics) for name in names}
        return {}

    def _target(self, name: str, topics: Mapping[str, Topic]) -> Target:
        topic = topics.get(name or self._default_topic)
        if topic is None:
            waiting = self._outcomes.no_topic()
            self._link.waits("", waiting.error or "")
            return Target("", waiting, False, 0, 0)
        refusal = None if topic.problem is None else self._outcomes.topic(topic.problem, own=bool(name))
        if refusal is not None and refusal.result is Result.RETRY:
            self._link.waits(name, refusal.error or "")
        # An event that looks too large may fit when compressed: the broker decides.
        limit = 1 << 40 if self._compresses else topic.max_bytes
        roomy = max(limit - _HEADROOM_BYTES, limit // 2)
        return Target(topic.name, refusal, topic.compacted, limit, roomy)


def _compresses(config: Mapping[str, Any]) -> bool:
    return any(name in config for name in ("compression.type", "compression.codec"))


def sized(config: Mapping[str, Any], sizes: tuple[int, int]) -> dict[str, Any]:
    """The properties of a producer for topics with these limits, the smallest and the largest one."""
    smallest, largest = sizes
    # A whole batch is refused when it is too large, though each of its records would fit.
    batch = max(smallest - 512, smallest // 2)
    message = 100_000_000 if _compresses(config) else max(largest + 1024, 1000)
    return {
        **config,
        "batch.size": min(int(config.get("batch.size", batch)), batch),
        "message.max.bytes": min(int(config.get("message.max.bytes", message)), message),
    }
