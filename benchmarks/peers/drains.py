"""Rows: how fast polling peers publish a backlog, in turn with ours."""

from pathlib import Path
from typing import Any

from benchmarks.bed import Bed
from benchmarks.drains import Drains, cpu
from benchmarks.failures import peer_side
from benchmarks.load import fill_postgres
from benchmarks.peers.environments import Environment
from benchmarks.report import Row
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale

FASTSTREAM_TUNED = {
    "max_workers": 16,
    "fetch_batch_size": 500,
    "terminal_flush_batch_size": 100,
    "min_fetch_interval": 0.1,
    "max_fetch_interval": 1.0,
}

TXOUTBOX = Environment("txoutbox")
_FASTSTREAM = Environment("faststream-outbox")
_OMNI = Environment("omni-box", since=(3, 12))


def _against(bed: Bed, scale: Scale, name: str, module: str, python: Path | None, share: int = 1, **told: Any) -> Row:
    """Both sides get the same backlog. ``share``: a slow peer publishes one part of so many."""
    drains = Drains(bed, name)

    def of_peer() -> dict[str, Any]:
        goal = scale.events // share
        with peer_side():
            return drains.run(f"peers.{module}", scale.events, None, python, strict=False, goal=goal, **told)

    ours, peer = in_turn(
        scale.rounds,
        lambda: drains.run("ours", scale.events, lambda: fill_postgres(bed.url, scale.events)),
        of_peer,
    )
    drains.close()
    return Row(
        name,
        "events/s",
        [each["per_second"] for each in ours],
        [each["per_second"] for each in peer],
        {
            "events": scale.events,
            "peer_events": scale.events // share,
            "ours_cpu_us_per_event": cpu(ours),
            "peer_cpu_us_per_event": cpu(peer),
            "peer_messages_beyond_settled": sum(each["messages"] - each["settled"] for each in peer),
        },
        against="peer",
    )


def loop(bed: Bed, scale: Scale) -> list[Row]:
    """A careful loop by hand, in our environment."""
    return [_against(bed, scale, "peer-loop", "drive_loop", None)]


def txoutbox(bed: Bed, scale: Scale) -> list[Row]:
    """One process with a batch flush and LISTEN."""
    python = TXOUTBOX.python()
    return [_against(bed, scale, "peer-txoutbox", "drive_txoutbox", python, share=2)]


def faststream_outbox(bed: Bed, scale: Scale) -> list[Row]:
    """With its default settings, and with those of its page on performance."""
    name = "peer-faststream-outbox"
    python = _FASTSTREAM.python()
    return [
        _against(bed, scale, name, "drive_faststream_outbox", python, share=50, options={}),
        _against(bed, scale, f"{name}-tuned", "drive_faststream_outbox", python, share=10, options=FASTSTREAM_TUNED),
    ]


def omni_box(bed: Bed, scale: Scale) -> list[Row]:
    """With the settings of its quick start; and with several workers and larger batches, which suit its slow claims."""
    name = "peer-omni-box"
    python = _OMNI.python()
    return [
        _against(bed, scale, name, "drive_omni_box", python, share=100, workers=1, batch_size=100),
        _against(bed, scale, f"{name}-tuned", "drive_omni_box", python, share=10, workers=4, batch_size=2500),
    ]
