"""Which addresses a customer may name: the relay must not become a way into the private network."""

import errno
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, TypeAlias

from yarl import URL

from pillarbox.errors import ConfigError

Network: TypeAlias = IPv4Network | IPv6Network

# Of IANA's registries of special addresses, those that do not lead to a public host, and one that a cloud uses for its
# own services. Not `is_global`, which differs between versions of Python.
_NOT_PUBLIC: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16",
            "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
            "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        ),
    )
)  # fmt: skip
# Everything else is private, or has an IPv4 address inside: mapped, translated or tunnelled.
_UNICAST: Final = IPv6Network("2000::/3")
_NOT_UNICAST: Final = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))


class Forbidden(OSError):
    """No connection may be made to this address."""

    def __init__(self) -> None:
        # The same text for all addresses of a host: the client then passes this error on, and not a text made of many.
        super().__init__(errno.EACCES, "it leads to a private or reserved address")


def is_public(address: str) -> bool:
    """Whether the IP address is that of a host on the public internet."""
    found = ip_address(address)
    if isinstance(found, IPv4Address):
        return not any(found in network for network in _NOT_PUBLIC)
    return found in _UNICAST and not any(found in network for network in _NOT_UNICAST)


class Guard:
    """The rules for the URLs of customers. networks: private ones that they may name too."""

    def __init__(self, ports: Collection[int], networks: Sequence[str]) -> None:
        if not ports or not all(0 < port < 65_536 for port in ports):
            raise ConfigError(f"ports={list(ports)!r}: give the ports that an endpoint may use, such as [443, 8443]")
        try:
            self._networks: Sequence[Network] = [ip_network(each) for each in networks]
        except ValueError as error:
            raise ConfigError(f"networks= has one that cannot be read: {error}; write it as 10.8.0.0/16") from error
        self._ports = frozenset(ports)

    def problem(self, url: URL) -> str | None:
        """Why no request may be sent to this URL; None: the address decides, when it is known."""
        if url.scheme != "https":
            return "it has no https"
        if url.port not in self._ports:
            return f"its port {url.port} is not one of ports={sorted(self._ports)}"
        return None

    def allows(self, address: str) -> bool:
        if is_public(address):
            return True
        found: IPv4Address | IPv6Address = ip_address(address)
        return any(found in network for network in self._networks)

    def socket(self, address: Any) -> socket.socket:
        """The socket for the address that will be connected to. Whatever a name resolves to later has no effect.

        Raises Forbidden if no request may go there."""
        family, kind, protocol, _, place = address
        if not self.allows(place[0]):
            raise Forbidden
        return socket.socket(family, kind, protocol)
