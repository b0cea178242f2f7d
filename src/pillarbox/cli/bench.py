"""``pillarbox bench``: measures the user's own store and destination."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from pillarbox import __version__
from pillarbox.cli import output, relay
from pillarbox.cli.output import Column, Progress
from pillarbox.cli.parser import command
from pillarbox.cli.session import run, store_maker
from pillarbox.cli.settings import RELAY, STORE, STREAM, Setting, Settings, add_flags
from pillarbox.durations import seconds_of
from pillarbox.errors import ConfigError
from pillarbox.relay import Stream

if TYPE_CHECKING:
    from pillarbox.bench import Figures, Make, Scale
    from pillarbox.store import Store

_HELP: Final = """
It makes an outbox of its own beside yours, named bench_ and eight digits. It fills that outbox, lets the real relay
publish the events, and removes it again. Yours is not touched. The events DO arrive at the destination, with the type
pillarbox.bench: give them a topic of their own, as in --to 'kafka://host:9092?topic=bench'. Without a destination only
the database is measured."""
# The settings that decide how fast a relay is.
_WANTED: Final = (
    *("store", "schema", "shards", "listen_url", "wake_up", "pool_size", "statement_cache"),
    *(
        "to",
        "headers",
        "stream",
        "mode",
        "slots",
        "concurrency",
        "batch",
        "batch_bytes",
        "poll",
        "poll_limit",
    ),
    "keep_published",
)
_NOT_OF_A_BENCH: Final = ("retry", "max_attempts", "stuck")
_LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "events": (10, 10_000_000),
    "rounds": (1, 100),
    "bytes": (16, 1_000_000),
    "rate": (0.1, 100_000),
}
_PACKAGES: Final = {
    "postgresql": "asyncpg",
    "mysql": "asyncmy",
    "mariadb": "asyncmy",
    "mongodb": "pymongo",
    "mongodb+srv": "pymongo",
    "kafka": "confluent-kafka",
    "amqp": "aiormq",
    "amqps": "aiormq",
    "nats": "nats-py",
    "tls": "nats-py",
    "redis": "redis",
    "rediss": "redis",
}
_RATES: Final = (
    Column("what"),
    *(Column(name, right=True) for name in ("events/s", "low", "high", "floor", "ratio")),
)
_LATENCIES: Final = (Column("what"), *(Column(name, right=True) for name in ("p50 ms", "p95 ms", "p99 ms")))
_BUSY: Final = "On a busy machine these figures are worth little."


def add(group: Any) -> None:
    """Register the command."""
    parser = command(group, "bench", bench, "measure your own store and destination with the real relay", store=False)
    parser.description += _HELP
    parser.add_argument("--events", type=int, default=20_000, metavar="N", help="events of one backlog (20000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of measurements (3)")
    parser.add_argument("--bytes", type=int, default=250, metavar="N", help="bytes of a payload (250)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="N", help="latency: events per second (200)")
    parser.add_argument("--duration", default="5s", metavar="DURATION", help="latency: for how long (5s)")
    parser.add_argument("--clean", action="store_true", help="remove the outboxes that killed runs have left")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with settings (pillarbox.toml, if it exists)")
    add_flags(parser, (STORE, RELAY, STREAM), _is_wanted)


def _is_wanted(setting: Setting) -> bool:
    return setting.name in _WANTED


def bench(chosen: Any) -> int:
    settings = Settings.of(chosen)
    make = store_maker(settings)
    url = str(settings.get("store"))
    if url.startswith("memory:") or ":memory:" in url:
        raise ConfigError("a store in memory cannot be measured; name a database, for example sqlite:///shop.db")

    def make_own(prefix: str) -> "Store":
        return make(prefix=prefix)

    if chosen.clean:
        return run(_clean(chosen, make_own))
    scale, stream = _scale(chosen), _stream(settings)
    return run(_bench(chosen, settings, make_own, scale, stream))


def _scale(chosen: Any) -> "Scale":
    from pillarbox.bench import Scale

    for name, (low, high) in _LIMITS.items():
        if not low <= getattr(chosen, name) <= high:
            raise ConfigError(f"--{name} is {getattr(chosen, name):g}; use {low:,g} to {high:,.0f}")
    seconds = seconds_of("--duration", chosen.duration, "100ms", "1h")
    return Scale(**{name: getattr(chosen, name) for name in _LIMITS}, seconds=seconds)


def _stream(settings: Settings) -> Stream:
    from pillarbox.bench import Nowhere

    streams = settings.streams() or {"default": {}}
    if len(streams) > 1:
        raise ConfigError(f"{settings.path} has {len(streams)} streams; choose one with --stream: {', '.join(streams)}")
    ((name, options),) = streams.items()
    if urlsplit(options.get("to", "")).scheme == "stdout":
        raise ConfigError("standard output shows the figures; name another destination, or none")
    wanted = {key: value for key, value in options.items() if key not in _NOT_OF_A_BENCH}
    if "to" in wanted:
        return relay.stream(name, wanted)
    wanted.pop("headers", None)
    return Stream(name, to=Nowhere(), **wanted)


async def _bench(chosen: Any, settings: Settings, make: "Make", scale: "Scale", stream: Stream) -> int:
    from pillarbox.bench import measure, remains

    left = await remains(make)
    if left:
        print(
            f"pillarbox: other runs of the bench have left {', '.join(left)}; "
            "if none is running now, remove them with `pillarbox bench --clean`",
            file=sys.stderr,
        )
    with _Line() as line:
        keep = settings.get("keep_published", "24h")
        figures, about = await measure(make, stream, scale, keep_published=keep, on_progress=line)
    found = _found(settings, scale, stream, figures, about)
    if chosen.json:
        output.print_json(found)
    else:
        _print(found)
    return 0


class _Line:
    """The current measurement, on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._doing = ""
        self._progress = Progress("")

    def __call__(self, doing: str, done: int) -> None:
        if doing != self._doing:
            self._progress.__exit__()
            self._doing, self._progress = doing, Progress(f"{doing},")
        self._progress(done)

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.__exit__()


def _found(
    settings: Settings, scale: "Scale", stream: Stream, figures: "Figures", about: Mapping[str, str]
) -> dict[str, Any]:
    import importlib.metadata
    import platform

    schemes = [urlsplit(str(settings.get("store"))).scheme]
    if isinstance(stream.to, str):
        schemes.append(urlsplit(stream.to).scheme)
    versions = {"pillarbox": __version__, "python": platform.python_version(), schemes[0]: about["server"]}
    for package in filter(None, map(_PACKAGES.get, schemes)):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "store": about["store"],
        "destination": about["destination"],
        "versions": versions,
        **{name: getattr(scale, name) for name in (*_LIMITS, "seconds")},
        **figures.as_dict(),
    }


def _print(found: Mapping[str, Any]) -> None:
    drain, latency = found["drain"], found["latency"]
    alone = "" if drain["floor"] else " (nothing leaves this process: only the database is measured)"
    rounds = output.count(found["rounds"], "round")
    output.print_record(
        {
            "store": found["store"],
            "destination": found["destination"] + alone,
            "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
            "measured": f"{found['events']:,} events of {found['bytes']:,} bytes, {rounds}",
        }
    )
    print()
    batch = found["write_batch"]["events_per_transaction"]
    rows = [
        _rate("write, each in a transaction", found["write_single"]),
        _rate(f"write, {batch} in a transaction", found["write_batch"]),
        _rate("drain by the relay", drain, drain["floor"], drain["ratio"]),
    ]
    output.print_table(_RATES, rows)
    print()
    rows = [
        _latency("write, until the commit returns", latency["write_ms"]),
        _latency("from there until it is acknowledged", latency["commit_to_acknowledgement_ms"]),
    ]
    if latency["floor_ms"]:
        rows.append(_latency("floor: straight to the destination", latency["floor_ms"]))
    output.print_table(_LATENCIES, rows)
    print()
    asked = "" if latency["reached_rate"] > 0.95 * found["rate"] else f" instead of {found['rate']:g}"
    print(f"Latency of {latency['events']:,} events, written at {latency['reached_rate']:g} per second{asked}.")
    if drain["floor"]:
        print("Floor: the same destination without a database. Ratio: the median of the rounds (low-high).")
    memory = "" if found["peak_memory_mb"] is None else f"; peak memory {found['peak_memory_mb']:.0f} MB"
    print(f"This process, which also writes: {drain['cpu_us_per_event']:g} us of CPU per drained event{memory}.")
    print(_BUSY)


def _rate(
    what: str, own: Mapping[str, Any], floor: Mapping[str, Any] | None = None, ratio: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    row = {"what": what, "events/s": own["median"], "low": own["low"], "high": own["high"]}
    if floor and ratio:
        row |= {"floor": floor["median"], "ratio": f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"}
    return row


def _latency(what: str, found: Mapping[str, float]) -> dict[str, Any]:
    return {"what": what, **{f"{name} ms": f"{value:.2f}" for name, value in found.items()}}


async def _clean(chosen: Any, make: "Make") -> int:
    from pillarbox.bench import clean, remains

    found: Sequence[str] = await remains(make)
    where = make("bench").description
    if not chosen.json:
        for prefix in found:
            print(prefix)
        output.flush()
    removed = await clean(make, found)
    if chosen.json:
        output.print_json({"store": where, "found": list(found), "removed": list(removed)})
    elif removed:
        print(f"removed {output.count(len(removed), 'outbox', 'outboxes')} from {where}")
    else:
        print(f"no bench run has left an outbox in {where}")
    return 0
