"""Rows: how fast polling peers publish a backlog, in turn with ours."""

from collections.abc import Sequence
from functools import partial
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
    (row,) = _kept_and_deleted(bed, scale, name, module, python, share, (True,), **told)
    return row


def _kept_and_deleted(
    bed: Bed,
    scale: Scale,
    name: str,
    module: str,
    python: Path | None,
    share: int,
    keeps: Sequence[bool] = (True, False),
    **told: Any,
) -> list[Row]:
    """One row for each setting of ours, in the same run: what was published is kept, or deleted."""
    drains = Drains(bed, name)

    def of_peer() -> dict[str, Any]:
        goal = scale.events // share
        with peer_side():
            return drains.run(f"peers.{module}", scale.events, None, python, strict=False, goal=goal, **told)

    def of_ours(keep: bool) -> dict[str, Any]:
        return drains.run("ours", scale.events, lambda: fill_postgres(bed.url, scale.events), keep=keep)

    *ours, peer = in_turn(scale.rounds, *(partial(of_ours, keep) for keep in keeps), of_peer)
    drains.close()
    names = [name if keep else f"{name}-deleted" for keep in keeps]
    return [_row(each, scale, share, found, peer) for each, found in zip(names, ours, strict=True)]


def _row(name: str, scale: Scale, share: int, ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> Row:
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
    """One process with a batch flush and LISTEN. Ours keeps what it has published, and in a second row deletes it."""
    python = TXOUTBOX.python()
    return _kept_and_deleted(bed, scale, "peer-txoutbox", "drive_txoutbox", python, share=2)


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
