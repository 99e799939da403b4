"""AllowedDomains: the hosts that images may be fetched from, as --allowed-media-domains names them."""

import ipaddress
import re
from collections.abc import Sequence

from ipc.errors import ConfigError, InvalidRequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_EVERY = "*"
_EVERYS_PORTS = (80, 443)
#: A host name in lower case; the last label is not a number, so that it is no address in another form.
_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*(?![0-9]+\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
#: Addresses that stand for IPv4 addresses which a relay chooses: 6to4, Teredo.
_RELAYED = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AllowedDomains:
    """given: host names, "*.NAME" for all names below one, "*" for every host, and addresses or networks.

    Names lead to public addresses only, unless the address is given too. Errors: ConfigError.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._suffixes: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._takes_every = False
        for text in given:
            self._add(text.strip().lower())

    def _add(self, text: str) -> None:
        name = text.removeprefix("*.").removesuffix(".")
        try:
            self._networks.append(ipaddress.ip_network(text.removeprefix("[").removesuffix("]")))
        except ValueError as error:
            if text == _EVERY:
                self._takes_every = True
            elif not _NAME.fullmatch(name):
                raise ConfigError(
                    f"--allowed-media-domains takes host names without a port (example.org, *.example.org, xn--... for "
                    f"other alphabets), addresses and networks (10.0.0.7, 10.0.0.0/8), or '*'; got {text!r:.80}"
                    f"{f' ({error})' if '/' in text and '://' not in text else ''}"
                ) from None
            elif text.startswith("*."):
                self._suffixes.add(f".{name}")
            else:
                self._names.add(name)

    def check_host(self, host: str, port: int) -> None:
        """Check that a URL may name this host: a name or an address in lower case. Errors: InvalidRequestError."""
        if (address := address_of(host)) is not None:
            is_named = self._is_given(address)
        else:
            if not _NAME.fullmatch(host):
                raise InvalidRequestError(f"{host!r:.80} is no host name in ASCII")
            parts = host.split(".")
            is_named = host in self._names or any(
                f".{'.'.join(parts[at:])}" in self._suffixes for at in range(1, len(parts))
            )
        if not is_named and not (self._takes_every and port in _EVERYS_PORTS):
            raise InvalidRequestError(
                f"images are not fetched from {host!r:.80}, port {port}: the server's --allowed-media-domains does not "
                "name it"
            )

    def allows(self, address: Address) -> bool:
        """Return whether a connection to this address may be opened: it is public, or given."""
        return is_public(address) or self._is_given(address)

    def _is_given(self, address: Address) -> bool:
        address = _plain(address)
        return any(address in network for network in self._networks)


def address_of(text: str) -> Address | None:
    """Return the address that this text is; None = it is a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Return whether an address belongs to a host of the public network, whatever form it is in."""
    address = _plain(address)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_UNICAST or any(address in network for network in _RELAYED):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _plain(address: Address) -> Address:
    """Return the IPv4 address in an IPv6 address that only wraps it."""
    return (isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address
