"""I14: requests with an idempotency key."""

from collections import defaultdict
from collections.abc import Iterator

from proof.facts import Facts
from proof.history import Replied, Requested
from proof.violation import Violation

OTHER_BODY = 422  # the key belongs to a request with another body
# Refused by the application, a request with this key is running, the database is away: the key is as it was.
_WITHOUT_EFFECT = (402, 409, 503)


def idempotency_key(facts: Facts) -> Iterator[Violation]:
    """I14: a key has one effect at most. All successful answers of a key are those of its effect, to the byte, and a
    request with another body is refused."""
    effects: dict[str, list[Requested]] = defaultdict(list)
    for requested in facts.history.requests:
        effects[requested.key].append(requested)
    for key, found in effects.items():
        if len(found) > 1:
            yield Violation("I14", "a key has more than one effect", key, f"{len(found)} effects")
    for reply in facts.history.replies:
        sentence = _wrong(reply, effects.get(reply.key))
        if sentence is not None:
            yield Violation("I14", sentence, reply.key, f"status {reply.status}, body {reply.body}")


def _wrong(reply: Replied, effects: list[Requested] | None) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if reply.status in _WITHOUT_EFFECT:
        return None
    if reply.status == OTHER_BODY:
        if effects and effects[0].body != reply.body:
            return None
        return "refused for another body, which no committed request had"
    if reply.status >= 300:
        return "an answer that no request should get"
    if effects is None:
        return "answered with success, but nothing was committed"
    if effects[0].body != reply.body:
        return "another body was not refused"
    return None if effects[0].sha256 == reply.sha256 else "the answer is not that of the effect"
