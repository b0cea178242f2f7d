"""Settings of the command line: flags override the environment, and that overrides the file."""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pillarbox.cli import secrets
from pillarbox.durations import seconds_of
from pillarbox.errors import ConfigError
from pillarbox.hints import hint

FILE: Final = "pillarbox.toml"
PREFIX: Final = "PILLARBOX_"
# The project's own tests use the first two; Kubernetes sets the others for a service that is named pillarbox.
_NOT_OURS: Final = ("PILLARBOX_TEST_", "PILLARBOX_CACHE", "PILLARBOX_SERVICE_", "PILLARBOX_PORT")

STORE, RELAY, STREAM, CONSUMER, LOG = "store", "relay", "stream", "consumer", "log"
DURATION: Final = "duration"


class Setting(NamedTuple):
    """One setting: ``batch_bytes`` in the file is ``--batch-bytes`` and ``PILLARBOX_BATCH_BYTES``."""

    name: str
    kind: type[str] | type[int] | type[bool] | Literal["duration"]
    scope: str
    help: str
    low: int | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.name.upper()}"


SETTINGS: Final[Mapping[str, Setting]] = {
    setting.name: setting
    for setting in (
        Setting("store", str, STORE, "where the outbox is, for example postgresql://user@host/database", secret=True),
        Setting("prefix", str, STORE, "prefix of the names of its tables (outbox)"),
        Setting("schema", str, STORE, "the database schema of its tables"),
        Setting("shards", int, STORE, "number of shards of a new outbox (16)", low=1),
        Setting("listen_url", str, STORE, "PostgreSQL behind a pooler: a direct URL for LISTEN", secret=True),
        Setting("wake_up", bool, STORE, "PostgreSQL: false only polls (true)"),
        Setting("pool_size", int, STORE, "PostgreSQL: most connections (10)", low=1),
        Setting("statement_cache", int, STORE, "PostgreSQL: number of prepared statements to keep (256)", low=0),
        Setting("stream", str, RELAY, "serve only this stream (all streams of the settings, or 'default')"),
        Setting("name", str, RELAY, "beginning of the worker's name (the host's name)"),
        Setting("processes", int, RELAY, "number of processes, one for each core that it may use (1)", low=1),
        Setting("keep_published", DURATION, RELAY, "how long published events are kept (24h)"),
        Setting("keep_dead", DURATION, RELAY, "how long dead letters are kept (7d)"),
        Setting("keep_inbox", DURATION, RELAY, "how long the inbox remembers a processed event (8d)"),
        Setting("keep_keys", DURATION, RELAY, "how long idempotency keys are kept (24h)"),
        Setting("prune_every", DURATION, RELAY, "interval of pruning (1h)"),
        Setting("watch_every", DURATION, RELAY, "interval of looking for streams that no relay serves (1m)"),
        Setting("rescue_every", DURATION, RELAY, "queue streams: interval of rescuing (a third of the lease)"),
        Setting("listen", str, RELAY, "address for /livez, /readyz and /metrics, for example 127.0.0.1:9808 (none)"),
        Setting("grace", DURATION, RELAY, "how long a stop takes at the most (20s)"),
        Setting(
            "to",
            str,
            STREAM,
            "where events go: kafka://host:9092?topic=orders, or MODULE:ATTRIBUTE in your code",
            secret=True,
        ),
        Setting("headers", str, STREAM, "the header builder of a destination's URL, as MODULE:ATTRIBUTE in your code"),
        Setting("mode", str, STREAM, "ordered or queue (ordered)", choices=("ordered", "queue")),
        Setting("slots", int, STREAM, "ordered streams: turns at once (as many as the publisher serves)"),
        Setting("concurrency", int, STREAM, "queue streams: events at once (8); a consumer: handlers at once (16)"),
        Setting("batch", int, STREAM, "most events in one turn (2000)"),
        Setting("batch_bytes", int, STREAM, "most bytes in one turn (4000000)"),
        Setting("retry", str, STREAM, "exponential, fixed:30s or linear:step=5s,limit=5m (exponential)"),
        Setting("max_attempts", int, STREAM, "attempts before an event is dead (20; in a consumer 5)"),
        Setting("on_dead", str, STREAM, "skip, block or, in a relay, park (skip)", choices=("skip", "block", "park")),
        Setting("lease", DURATION, STREAM, "how long a dead worker keeps its shards or events (15s)"),
        Setting("poll", DURATION, STREAM, "longest wait between two polls while events come (100ms)"),
        Setting("poll_limit", DURATION, STREAM, "longest wait between two polls at rest (2s)"),
        Setting("stuck", DURATION, STREAM, "queue streams: an event held for longer is taken from its worker (10m)"),
        Setting("consumer", str, CONSUMER, "run this consumer (the only one of the settings, or 'default')"),
        Setting(
            "from",
            str,
            CONSUMER,
            "where messages come from: kafka://host:9092?topic=orders, or MODULE:ATTRIBUTE in your code",
            secret=True,
        ),
        Setting("dead_to", str, CONSUMER, "where dead events go without a store: as 'to'", secret=True),
        Setting("window", int, CONSUMER, "most messages of a lane that are not settled (5000)"),
        Setting("window_bytes", int, CONSUMER, "most bytes of a lane that are not settled (4000000)"),
        Setting("ids", str, CONSUMER, "messages without an id: required refuses them", choices=("required", "place")),
        Setting("decoder", str, CONSUMER, "MODULE:ATTRIBUTE of a function from a message to its event"),
        Setting("replay_every", DURATION, CONSUMER, "interval of looking for replayed dead letters (5s)"),
        Setting("log_format", str, LOG, "text or json (text)", choices=("text", "json")),
        Setting("log_level", str, LOG, "debug, info, warning or error", choices=("debug", "info", "warning", "error")),
    )
}

# What a consumer has of its own, in its table or as flags; the rest of its settings are those of a relay.
CONSUMER_SETTINGS: Final = (
    *(name for name, setting in SETTINGS.items() if setting.scope == CONSUMER and name != "consumer"),
    *("to", "concurrency", "retry", "max_attempts", "on_dead"),
)
# Settings of a relay that a consumer has too.
SHARED_SETTINGS: Final = ("name", "keep_dead", "keep_inbox", "keep_keys", "prune_every", "grace", "listen")

_KINDS: Final = {str: "text", int: "a whole number", bool: "true or false"}
_METAVARS: Final = {str: "TEXT", int: "N", bool: "BOOL", DURATION: "DURATION"}
_BOOLS: Final = {"true": True, "false": False}


class Document(NamedTuple):
    """Settings of an application that take the place of the file. name: as an error names them."""

    name: str
    values: Mapping[str, Any]


class Given(NamedTuple):
    """A value and its origin."""

    value: Any
    origin: str


def is_text(text: str) -> bool:
    """Whether it is valid Unicode: the shell and the environment may pass on any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_text(setting: Setting, text: str, origin: str) -> Given:
    if not is_text(text):
        raise ConfigError(f"{origin} is not UTF-8 text; correct it, or the locale")
    if setting.kind == DURATION:
        return Given(seconds_of(origin, text), origin)
    value: Any = text
    try:
        if setting.kind is bool:
            value = _BOOLS[text.lower()]
        elif setting.kind is int:
            value = int(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{origin} is {text!r}; use {_KINDS[setting.kind]}") from None
    return _checked(setting, value, origin)


def _from_toml(setting: Setting, value: Any, origin: str) -> Given:
    if setting.kind == DURATION:
        return Given(seconds_of(origin, value), origin)
    if type(value) is not setting.kind:
        shown = "" if setting.secret or isinstance(value, dict | list) else f" {value!r}"
        raise ConfigError(f"{origin} is a {type(value).__name__}{shown}; use {_KINDS[setting.kind]}")
    return _checked(setting, value, origin)


def _checked(setting: Setting, value: Any, origin: str) -> Given:
    if setting.secret:
        secrets.remember(value)
        if secrets.is_garbled(value):
            raise ConfigError(
                f"{origin} is not a URL, or its password has unescaped characters; "
                "in a password write @ as %40, / as %2F, : as %3A, # as %23, ? as %3F and [ as %5B"
            )
    if setting.choices and value not in setting.choices:
        raise ConfigError(f"{origin} is {value!r}; {hint(value, setting.choices)}")
    if setting.low is not None and value < setting.low:
        raise ConfigError(f"{origin} is {value}; use {setting.low} or more")
    return Given(value, origin)


class Settings:
    """The settings that were given, each with its origin."""

    def __init__(
        self,
        flags: Mapping[str, str],
        environment: Mapping[str, str],
        config: str | None = None,
        own: Document | None = None,
    ) -> None:
        self.flags = {name: _from_text(SETTINGS[name], text, SETTINGS[name].flag) for name, text in flags.items()}
        self.environment = _read_environment(environment)
        path = config or environment.get(f"{PREFIX}CONFIG") or None
        if own is not None and path is None:
            self.path, document = own.name, dict(own.values)
        else:
            self.path, document = _read_file(path, "--config" if config else f"{PREFIX}CONFIG")
        of_streams = [name for name, setting in SETTINGS.items() if setting.scope == STREAM]
        self.tables = _tables("stream", document.pop("streams", {}), self.path, of_streams)
        self.consumer_tables = _tables("consumer", document.pop("consumers", {}), self.path, CONSUMER_SETTINGS)
        self.file = {name: self._file_setting(name, value) for name, value in document.items()}

    @classmethod
    def of(cls, chosen: Any) -> "Settings":
        """From parsed arguments and this process's environment."""
        flags = {name: value for name in SETTINGS if (value := getattr(chosen, f"set_{name}", None)) is not None}
        return cls(flags, os.environ, getattr(chosen, "config", None), getattr(chosen, "document", None))

    def _file_setting(self, name: str, value: Any) -> Given:
        if name not in SETTINGS:
            meant = hint(name, [*SETTINGS, "streams", "consumers"], "see `pillarbox relay --help` for the settings")
            raise ConfigError(f"{self.path} has an unknown setting {name!r}; {meant}")
        return _from_toml(SETTINGS[name], value, f"{name!r} in {self.path}")

    def given(self, name: str) -> Given | None:
        return self.flags.get(name) or self.environment.get(name) or self.file.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        found = self.given(name)
        return default if found is None else found.value

    def scope(self, scope: str) -> dict[str, Any]:
        """The given settings of this scope."""
        found = {name: self.given(name) for name, setting in SETTINGS.items() if setting.scope == scope}
        return {name: given.value for name, given in found.items() if given is not None}

    def streams(self) -> dict[str, dict[str, Any]]:
        """The streams by name, each with its given settings; empty if there are none."""
        chosen = self.given("stream")
        if not self.tables:
            own = self.scope(STREAM)
            return {chosen.value if chosen else "default": own} if own or chosen else {}
        if chosen is not None and chosen.value not in self.tables:
            raise ConfigError(
                f"{chosen.origin} is {chosen.value!r}, which is no stream of {self.path}; "
                f"{hint(chosen.value, self.tables)}"
            )
        return {name: self._stream(name) for name in ([chosen.value] if chosen else self.tables)}

    def consumer(self) -> tuple[str, dict[str, Any]]:
        """The consumer to run: its name and its given settings."""
        chosen = self.given("consumer")
        if chosen is None and len(self.consumer_tables) > 1:
            names = ", ".join(self.consumer_tables)
            raise ConfigError(f"{self.path} has several consumers: {names}; choose one with --consumer")
        name = chosen.value if chosen else next(iter(self.consumer_tables), "default")
        if chosen is not None and self.consumer_tables and name not in self.consumer_tables:
            raise ConfigError(
                f"{chosen.origin} is {name!r}, which is no consumer of {self.path}; {hint(name, self.consumer_tables)}"
            )
        table = self.consumer_tables.get(name, {})
        over = self.environment | self.flags
        for place in ("from", "to"):
            self._check_place(place, "consumers", name, table, over)
        of_file = {name: given for name, given in self.file.items() if SETTINGS[name].scope == CONSUMER}
        layers = {**of_file, **table, **over}
        return name, {key: given.value for key, given in layers.items() if key in CONSUMER_SETTINGS}

    def _check_place(
        self, place: str, kind: str, name: str, table: Mapping[str, Given], over: Mapping[str, Given]
    ) -> None:
        if place in over and place in table and over[place].value != table[place].value:
            what = "sources" if place == "from" else "destinations"
            raise ConfigError(
                f"{over[place].origin} and [{kind}.{name}] of {self.path} name different {what}; leave out one of them"
            )

    def _stream(self, name: str) -> dict[str, Any]:
        over = self.environment | self.flags
        table = self.tables[name]
        self._check_place("to", "streams", name, table, over)
        layers = {**self.file, **table, **over}
        return {key: given.value for key, given in layers.items() if SETTINGS[key].scope == STREAM}


def _read_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    known = {setting.variable: setting for setting in SETTINGS.values()}
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(_NOT_OURS) or variable == f"{PREFIX}CONFIG":
            continue
        if variable not in known:
            meant = hint(variable, [*known, f"{PREFIX}CONFIG"], "unset it, or see `pillarbox relay --help`")
            raise ConfigError(f"the environment has an unknown setting {variable}; {meant}")
        if text:
            found[known[variable].name] = _from_text(known[variable], text, variable)
    return found


def _read_file(path: str | None, origin: str) -> tuple[str, dict[str, Any]]:
    if path is None and not Path(FILE).is_file():
        return FILE, {}
    name = path or FILE
    try:
        # Some editors begin a file with a byte order mark.
        return name, tomllib.loads(Path(name).read_text("utf-8-sig"))
    except OSError as error:
        said = f"{origin} names {name}, which" if path else name
        raise ConfigError(f"{said} cannot be read ({error.strerror}); correct the path, or leave it out") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text; save it as such") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply; write [streams.NAME] tables with plain values") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {_lowered(str(error))}; correct that line") from None


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _tables(kind: str, tables: Any, path: str, known: Sequence[str]) -> dict[str, dict[str, Given]]:
    """The tables of all streams or consumers. known: the settings that such a table may have."""
    if not isinstance(tables, dict):
        raise ConfigError(f"'{kind}s' in {path} is not a table; write [{kind}s.NAME] with the settings of the {kind}")
    found: dict[str, dict[str, Given]] = {}
    for title, table in tables.items():
        if not isinstance(table, dict) and title in known:
            raise ConfigError(f"[{kind}s] in {path} has {title!r} but no {kind}; write it under [{kind}s.NAME]")
        if not isinstance(table, dict):
            raise ConfigError(f"'{kind}s.{title}' in {path} is not a table; write [{kind}s.{title}]")
        found[title] = {}
        for name, value in table.items():
            if name not in known:
                at_top = name in SETTINGS and SETTINGS[name].scope not in (STREAM, CONSUMER)
                meant = "move it to the top of the file" if at_top else hint(name, known)
                raise ConfigError(f"[{kind}s.{title}] in {path} has an unknown setting {name!r}; {meant}")
            found[title][name] = _from_toml(SETTINGS[name], value, f"{name!r} of [{kind}s.{title}] in {path}")
    return found


def add_flags(parser: Any, scopes: tuple[str, ...], wanted: Callable[[Setting], bool] = lambda _: True) -> None:
    """Add the flags of these settings; their values stay text until all sources are combined."""
    for setting in SETTINGS.values():
        if setting.scope in scopes and wanted(setting):
            metavar = "URL" if setting.secret else _METAVARS[setting.kind]
            parser.add_argument(
                setting.flag,
                dest=f"set_{setting.name}",
                metavar="|".join(setting.choices) or metavar,
                default=None,
                help=setting.help.replace("%", "%%"),
            )
