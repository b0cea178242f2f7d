"""Settings of Pulsar's publisher and source: their URLs, names of topics, and what their clients are made of."""

import os
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypedDict
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pillarbox.errors import ConfigError
from pillarbox.hints import hint
from pillarbox.imports import load_object

SCHEMES: Final = ("pulsar", "pulsar+ssl")
LOGIN_OPTIONS: Final = ("token", "token_file", "tls_ca", "tls_cert", "tls_key", "tls_hostname")
PUBLISHER_OPTIONS: Final = (
    "topic", "envelope", "headers", "source", "batching", "hash", "compression", "max_message_bytes", "producers",
    "stuck", "connect_timeout", *LOGIN_OPTIONS,
)  # fmt: skip
SOURCE_OPTIONS: Final = ("topic", "start", "connect_timeout", *LOGIN_OPTIONS)
_HOST: Final = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
_PLAIN_NAME: Final = re.compile(r"[-=:.\w]+")
_NUMBERS: Final = ("producers", "max_message_bytes")
_YES: Final = {"true": True, "1": True, "false": False, "0": False}


class LoginOptions(TypedDict, total=False):
    """Arguments that say how to reach a cluster, and as whom.

    tls: use TLS. tls_ca: a file with the certificates to trust; none: those of the system. tls_cert, tls_key: the files
    of the client's own certificate. tls_hostname: whether the broker's certificate must have its name; true.
    user and password, token, or token_file, which is read again for each connection: the client's credentials.
    """

    tls: bool
    user: str
    password: str
    token: str
    token_file: str
    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_hostname: bool


class Login(NamedTuple):
    """How to reach one cluster, and as whom; see LoginOptions. hosts: ``host:port``, several with commas."""

    hosts: str
    tls: bool = False
    user: str = ""
    password: str = ""
    token: str = ""
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_hostname: bool = True

    @property
    def description(self) -> str:
        return f"pulsar {self.hosts}"

    def check(self) -> None:
        """Raise ConfigError for what cannot work."""
        given = [name for name in ("user", "token", "token_file", "tls_cert") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given for Pulsar; log in with one of them")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key go together: give the client's certificate and its key")
        if not self.tls and (self.tls_ca or self.tls_cert):
            raise ConfigError("tls_ca, tls_cert and tls_key need TLS; begin the URL with pulsar+ssl://")
        for name in ("token_file", "tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"{name}={path!r} cannot be read; name a file that this process may read")


class Namespace(NamedTuple):
    """Where topics without a full name are."""

    tenant: str = "public"
    name: str = "default"

    def topic(self, name: str) -> str:
        """The full name: of ``orders``, of ``tenant/namespace/orders``, or of one that has its scheme already."""
        if "://" in name:
            return name
        return f"persistent://{name}" if name.count("/") == 2 else f"persistent://{self.tenant}/{self.name}/{name}"


def parse_url(url: str, options: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from ``pulsar://[user:password@]host[:6650][,host...][/tenant/namespace][?option=value&...]``.

    options: the names that may stand after the question mark.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"a Pulsar URL starts with pulsar:// or pulsar+ssl://, not {parts.scheme or url.partition(':')[0]}://"
        )
    arguments: dict[str, Any] = {"servers": _servers(parts), "namespace": _namespace(parts)}
    if parts.scheme == "pulsar+ssl":
        arguments["tls"] = True
    user, at, _ = parts.netloc.rpartition("@")
    if at:
        name, _, password = user.partition(":")
        arguments |= {"user": unquote(name), "password": unquote(password)}
    for option, value in parse_qsl(parts.query, keep_blank_values=True):
        if option not in options:
            meant = hint(option, options, f"use one of: {', '.join(options)}")
            raise ConfigError(f"unknown option {option!r} in the Pulsar URL; {meant}")
        arguments[option] = _converted(option, value)
    return arguments


def _servers(parts: SplitResult) -> str:
    hosts = parts.netloc.rpartition("@")[2].split(",")
    # The text is not shown: with an unescaped password, a part of that would be taken for a host or a path.
    if parts.fragment or not all(_HOST.fullmatch(host) for host in hosts):
        raise ConfigError(
            "the Pulsar URL names no broker, or a port that is no number; write "
            "pulsar://user:password@host:6650/tenant/namespace?topic=orders, in a password @ as %40, / as %2F, "
            "# as %23 and ? as %3F"
        )
    port = 6651 if parts.scheme == "pulsar+ssl" else 6650
    return ",".join(host if re.search(r":\d+$", host) else f"{host}:{port}" for host in hosts)


def _namespace(parts: SplitResult) -> str:
    path = parts.path.strip("/")
    if path:
        namespace_of(path)
    return path or "public/default"


def namespace_of(text: str) -> Namespace:
    names = text.split("/")
    if len(names) != 2 or not all(_PLAIN_NAME.fullmatch(name) for name in names):
        raise ConfigError(
            "the path of the Pulsar URL is not a tenant and a namespace; write pulsar://host:6650/tenant/namespace"
        )
    return Namespace(*names)


def _converted(option: str, value: str) -> object:
    if option == "headers":
        build = load_object(value, "a header builder")
        if not callable(build):
            raise ConfigError(f"headers={value} in the Pulsar URL is not a function from an event to its headers")
        return build
    if option in _NUMBERS:
        if not value.isdecimal():
            raise ConfigError(f"{option}={value!r} in the Pulsar URL is not a number; write for instance 4")
        return int(value)
    if option == "tls_hostname":
        if value.lower() not in _YES:
            raise ConfigError(f"tls_hostname={value!r} in the Pulsar URL is neither true nor false")
        return _YES[value.lower()]
    return value


def login_of(servers: str | Sequence[str], options: LoginOptions) -> Login:
    """The login from the arguments of a publisher or source."""
    hosts = servers if isinstance(servers, str) else ",".join(servers)
    if not hosts:
        raise ConfigError("servers='' names no Pulsar broker; write for instance servers='localhost:6650'")
    login = Login(hosts, **options)
    login.check()
    return login
