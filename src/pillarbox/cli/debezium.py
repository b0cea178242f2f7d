"""``pillarbox debezium``: the settings of a connector of Debezium that publishes this outbox in place of a relay."""

import sys
from typing import Any, Final

from pillarbox.cli import output, secrets
from pillarbox.cli.connector import FROM_ENVIRONMENT, Connector, Outbox, connector
from pillarbox.cli.parser import command
from pillarbox.cli.settings import RELAY, STREAM, Settings, add_flags
from pillarbox.errors import ConfigError
from pillarbox.kafka.settings import check_topic, parse_url
from pillarbox.names import Names
from pillarbox.urls import without_driver

_HELP: Final = """
It asks neither the database nor Kafka, and changes nothing. Give its output to Kafka Connect as the configuration of a
connector. Read docs/howto/debezium.md before: in which order relay and connector start and stop decides whether events
are lost."""


def add(commands: Any) -> None:
    """Register the command."""
    parser = command(
        commands, "debezium", debezium, "print the configuration of a Debezium connector for this outbox", json=False
    )
    parser.description += _HELP
    parser.add_argument(
        "--name", default="pillarbox", help="the connector's name, also of its slot and its publication (pillarbox)"
    )
    parser.add_argument(
        "--publication", action="store_true", help="PostgreSQL: print the statement that makes its publication instead"
    )
    add_flags(parser, (RELAY, STREAM), lambda setting: setting.name in ("stream", "to"))


def debezium(chosen: Any) -> int:
    # Late, because it imports Kafka's client.
    from pillarbox.publishers.kafka.settings import OPTIONS

    settings = Settings.of(chosen)
    url = settings.get("store")
    if url is None:
        raise ConfigError("no store is given; set PILLARBOX_STORE, or give --store, for example postgresql://host/shop")
    stream, to = _destination(settings)
    kafka = parse_url(to, OPTIONS)
    topic = _topic(kafka.options.get("topic", ""))
    names = Names(settings.get("prefix", "outbox"), settings.get("schema"))
    outbox = Outbox(without_driver(url), names.prefix, names.schema, stream, kafka.servers, topic)
    found = connector(chosen.name, outbox)
    if chosen.publication:
        if found.publication is None:
            raise ConfigError("--publication is for PostgreSQL; leave it out")
        print(found.publication)
        return 0
    output.print_json(dict(found.settings))
    _warn(found, kafka.options.get("envelope", "raw"), secrets.has_password(url))
    return 0


def _destination(settings: Settings) -> tuple[str, str]:
    """The stream and its destination."""
    streams = settings.streams()
    if len(streams) > 1:
        raise ConfigError(f"{settings.path} has several streams: {', '.join(streams)}; choose one with --stream")
    for stream, options in streams.items():
        if str(options.get("to", "")).startswith("kafka:"):
            return stream, options["to"]
    raise ConfigError(
        "the stream has no destination on Kafka; give --to, for example kafka://localhost:9092?topic=orders"
    )


def _topic(topic: str) -> str:
    """The default topic; empty: there is none."""
    if topic in ("", "*"):
        return ""
    check_topic(topic)
    return topic


def _warn(found: Connector, envelope: str, has_password: bool) -> None:
    if envelope != found.envelope:
        print(
            f"pillarbox: a relay with envelope={envelope} sends other headers than this connector; "
            f"the same messages come with envelope={found.envelope}",
            file=sys.stderr,
        )
    if has_password:
        print(
            f"pillarbox: the password is not shown: Kafka Connect reads {FROM_ENVIRONMENT} from its environment if its "
            "worker has config.providers=env and "
            "config.providers.env.class=org.apache.kafka.common.config.provider.EnvVarConfigProvider",
            file=sys.stderr,
        )
