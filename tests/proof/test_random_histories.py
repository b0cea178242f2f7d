"""Random histories that keep the promise pass; with one corruption they fail."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from proof.checker import check
from proof.history import Change, Delivery, Effect, History
from tests.proof.world import STREAM, World

KEYS = st.sampled_from(["a", "b", None])
STEPS = st.one_of(
    st.tuples(st.just("commit"), st.lists(KEYS, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["reject", "flaky", "hopeless", "schedule"]), KEYS),
    st.tuples(st.sampled_from(["abandon"]), st.sampled_from(["rolled_back", "failed", "unknown"])),
    st.tuples(st.just("turn"), st.integers(1, 5)),
    st.tuples(st.just("kill"), st.sampled_from(["read", "sent", "confirmed", "settling"])),
    st.tuples(st.sampled_from(["pause", "hand_over", "outage", "reenter_due", "replay", "discard"]), st.none()),
)


def act(world: World, steps: list[tuple[str, object]]) -> History:
    worker, number = "w1", 1
    world.take(worker)
    for step, detail in steps:
        dead = list(world.history.final.dead)
        match step, detail:
            case "commit", list(keys):
                world.commit(*keys)
            case (("reject" | "flaky"), key):
                world.commit(key if isinstance(key, str) else None, fate=step)
            case "hopeless", key:
                (event_id,) = world.commit(key if isinstance(key, str) else None, fate="flaky")
                world.failures[event_id] = 99
            case "schedule", key:
                world.commit(key if isinstance(key, str) else None, scheduled=True)
            case "abandon", str(result):
                world.abandon(result)
            case "turn", int(limit):
                world.turn(worker, limit)
            case (("kill" | "pause" | "hand_over"), point):
                number += 1
                successor = f"w{number}"
                if step == "pause":
                    world.pause(worker, successor)
                else:
                    if step == "kill":
                        world.turn(worker, dies=str(point))
                    else:
                        world.give(worker)
                    world.take(successor)
                worker = successor
            case "outage", _:
                world.outage(worker)
            case "reenter_due", _:
                world.reenter_due()
            case (("replay" | "discard"), _) if dead:
                (world.replay if step == "replay" else world.discard)(dead[0])
    world.commit("a", "b", "a")  # so that there is something to corrupt
    return world.rest()


WORLDS = st.builds(
    act,
    st.sampled_from(["skip", "block", "park"]).map(World),
    st.lists(STEPS, max_size=25),
)


@settings(deadline=None)
@given(WORLDS)
def test_a_world_that_keeps_the_promise_passes(history: History) -> None:
    assert check(history).findings == []


def corrupt(history: History, how: str, which: int) -> str | None:
    """Corrupt the history. Returns the invariant that must fail; None: this history cannot be corrupted so."""
    delivered = Counter(line.event_id for line in history.deliveries)
    audited = {line.event_id for line in history.changes if line.kind == "audit"}
    plain = [event_id for event_id in delivered if event_id not in audited and event_id not in history.final.dead]
    if not plain:
        return None
    victim = plain[which % len(plain)]
    last = history.changes[-1]
    match how:
        case "lose":
            history.deliveries[:] = [line for line in history.deliveries if line.event_id != victim]
            return "I1"
        case "phantom":
            history.deliveries.append(Delivery("ghost", "a", "", [0, 99_999]))
            return "I2"
        case "corrupt":
            next(line for line in history.deliveries if line.event_id == victim).sha256 = "another"
            return "I3"
        case "uncommit":
            history.witness[:] = [line for line in history.witness if line.event_id != victim]
            return "I4"
        case "reorder":
            return "I5" if _reorder(history, plain, which) else None
        case "token":
            first = next(line.token for line in history.changes if line.kind == "lease")
            for after, token in enumerate((-1, first), 1):
                history.changes.append(Change(last.seq + after, last.at, "lease", STREAM, 0, owner="w1", token=token))
            return "I7"
        case "cross":
            settled = [line for line in history.changes if line.kind == "event" and line.new == "published"]
            settled[which % len(settled)].token = 999
            return "I8"
        case "revive":
            history.changes.append(
                Change(last.seq + 1, last.at, "event", STREAM, 0, victim, None, "published", "pending")
            )
            return "I9"
        case "apply_again":
            history.effects.append(Effect(victim))
            return "I12"
        case "lose_effect":
            history.effects.remove(Effect(victim))
            return "I12"
        case _:
            copies = sum(victim in trace.event_ids for trace in history.traces if trace.kind == "publish")
            line = next(line for line in history.deliveries if line.event_id == victim)
            history.deliveries += [replace(line, place=[0, 50_000 + n]) for n in range(copies)]
            return "I10"


def _reorder(history: History, plain: list[str], which: int) -> bool:
    """Swap the first deliveries of two events of one key."""
    firsts: dict[str, Delivery] = {}
    for line in history.deliveries:
        firsts.setdefault(line.event_id, line)
    placed = [line for line in history.witness if line.key == "a" and line.event_id in plain and not line.scheduled]
    if len(placed) < 2:
        return False
    at = which % (len(placed) - 1)
    one, other = firsts[placed[at].event_id], firsts[placed[at + 1].event_id]
    one.place, other.place = other.place, one.place
    # A copy between the two could hide the swap.
    return len(history.deliveries) == len(firsts)


@settings(deadline=None)
@given(
    WORLDS,
    st.sampled_from(
        [
            *("lose", "phantom", "corrupt", "uncommit", "reorder", "token", "cross", "revive", "copy"),
            *("apply_again", "lose_effect"),
        ]
    ),
    st.integers(0, 100),
)
def test_one_corruption_is_found(history: History, how: str, which: int) -> None:
    expected = corrupt(history, how, which)

    report = check(history)

    assert expected is None or expected in {finding.invariant for finding in report.findings}
