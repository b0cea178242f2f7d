"""``pillarbox prune`` and ``pillarbox rescue``: one run of a relay's maintenance."""

from typing import Any

from pillarbox.cli import output
from pillarbox.cli.output import Progress
from pillarbox.cli.parser import command
from pillarbox.cli.session import open_store
from pillarbox.cli.settings import Settings
from pillarbox.maintenance.prune import DAY_SECONDS, Prune, Pruned
from pillarbox.maintenance.rescue import Rescue
from pillarbox.operations import seconds


def add(group: Any) -> None:
    """Register the commands."""
    pruning = command(group, "prune", prune, "delete published events and dead letters that are old enough")
    pruning.add_argument(
        "--keep", metavar="DURATION", help="how long published events are kept (keep_published_seconds, 24h)"
    )
    pruning.add_argument(
        "--dead-keep", metavar="DURATION", help="how long dead letters are kept (keep_dead_seconds, 7d)"
    )
    rescuing = command(group, "rescue", rescue, "take events of queue streams from workers that died or hang")
    rescuing.add_argument("--stream", metavar="TEXT", help="only this stream")
    rescuing.add_argument("--stuck", metavar="DURATION", help="an event held for longer is stuck (stuck_seconds, 10m)")


async def prune(chosen: Any) -> int:
    settings = Settings.of(chosen)
    keep = settings.get("keep_published_seconds", DAY_SECONDS)
    keep_dead = settings.get("keep_dead_seconds", 7 * DAY_SECONDS)
    if chosen.keep is not None:
        keep = seconds(chosen.keep, "--keep")
    if chosen.dead_keep is not None:
        keep_dead = seconds(chosen.dead_keep, "--dead-keep")
    async with open_store(settings) as store:
        with Progress("pruning") as progress:

            def told(so_far: Pruned) -> None:
                progress(so_far.published + so_far.dead)

            service = Prune(store, keep_published_seconds=keep, keep_dead_seconds=keep_dead, on_progress=told)
            done = await service.run_once()
    if chosen.json:
        output.print_json(done._asdict())
    else:
        events, letters = output.count(done.published, "published event"), output.count(done.dead, "dead letter")
        print(f"pruned {events} and {letters}")
    return 0


async def rescue(chosen: Any) -> int:
    settings = Settings.of(chosen)
    configured = settings.streams()
    rows = []
    async with open_store(settings) as store:
        streams = [chosen.stream] if chosen.stream else [each.stream for each in await store.streams()]
        for name in streams:
            options = configured.get(name, {})
            stuck = options.get("stuck_seconds", 600.0)
            if chosen.stuck is not None:
                stuck = seconds(chosen.stuck, "--stuck")
            done = await Rescue(store, name, stuck_seconds=stuck).run_once()
            if done.retried or done.dead or chosen.stream:
                rows.append({"stream": name, **done._asdict()})
    if chosen.json:
        output.print_json(rows)
    elif not any(row["retried"] or row["dead"] for row in rows):
        print("nothing to rescue")
    else:
        for row in rows:
            back = output.count(row["retried"], "event")
            print(f"stream {row['stream']!r}: {back} to be tried again, {row['dead']:,} dead")
    return 0
