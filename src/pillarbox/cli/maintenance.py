"""``pillarbox prune`` and ``pillarbox rescue``: one run of a relay's maintenance."""

from typing import Any, Final

from pillarbox.cli import output
from pillarbox.cli.output import Progress
from pillarbox.cli.parser import command
from pillarbox.cli.session import open_store
from pillarbox.cli.settings import RELAY, STREAM, Settings, add_flags
from pillarbox.maintenance.prune import Prune, Pruned
from pillarbox.maintenance.rescue import Rescue

_KEPT: Final = ("keep_published", "keep_dead", "keep_inbox", "keep_keys")


def add(group: Any) -> None:
    """Register the commands."""
    pruning = command(group, "prune", prune, "delete old published events, dead letters, inbox rows and keys")
    add_flags(pruning, (RELAY,), lambda setting: setting.name in _KEPT)
    rescuing = command(group, "rescue", rescue, "take events of queue streams from workers that died or hang")
    rescuing.add_argument("--stream", metavar="TEXT", help="only this stream")
    add_flags(rescuing, (STREAM,), lambda setting: setting.name == "stuck")


async def prune(chosen: Any) -> int:
    settings = Settings.of(chosen)
    keep = {name: settings.get(name) for name in _KEPT if settings.given(name)}
    async with open_store(settings) as store:
        with Progress("pruning") as progress:

            def told(so_far: Pruned) -> None:
                progress(sum(so_far))

            service = Prune(store, **keep, on_progress=told)
            done = await service.run_once()
    if chosen.json:
        output.print_json(done._asdict())
    else:
        events, letters = output.count(done.published, "published event"), output.count(done.dead, "dead letter")
        rows, keys = output.count(done.inbox, "row"), output.count(done.keys, "idempotency key")
        print(f"pruned {events}, {letters}, {rows} of the inbox and {keys}")
    return 0


async def rescue(chosen: Any) -> int:
    settings = Settings.of(chosen)
    configured = settings.streams()
    rows = []
    async with open_store(settings) as store:
        streams = [chosen.stream] if chosen.stream else [each.stream for each in await store.gauges(1)]
        for name in streams:
            given = {**settings.scope(STREAM), **configured.get(name, {})}
            options = {"stuck": given["stuck"]} if "stuck" in given else {}
            done = await Rescue(store, name, **options).run_once()
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
