"""The hosts that images may be fetched from: which URLs name one, and which addresses may be connected to."""

import ipaddress

import pytest

from frontend.http.media.domains import AllowedDomains, is_public
from ipc.errors import ConfigError, InvalidRequestError

GIVEN = AllowedDomains(["Example.org", "*.images.example", "10.1.0.0/16", "[::1]", "files.corp."])


@pytest.mark.parametrize("host", ["example.org", "a.images.example", "a.b.images.example", "10.1.2.3", "::1"])
def test_hosts_that_are_named(host: str) -> None:
    GIVEN.check_host(host, 8080)


@pytest.mark.parametrize(
    "host",
    [
        "www.example.org",
        "images.example",
        "badimages.example",
        "example.org.evil",
        "10.2.0.1",
        "::2",
        "8.8.8.8",
        "corp",
    ],
)
def test_hosts_that_are_not_named(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="--allowed-media-domains does not name it"):
        GIVEN.check_host(host, 443)


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "exämple.org", "a b", "-a.org", "a..org", "", "a" * 300])
def test_what_is_no_host_name(host: str) -> None:
    with pytest.raises(InvalidRequestError):
        AllowedDomains(["*"]).check_host(host, 25)


def test_every_host_has_the_usual_ports() -> None:
    every = AllowedDomains(["*", "files.corp"])
    every.check_host("anything.example", 443)
    every.check_host("files.corp", 9000)
    with pytest.raises(InvalidRequestError, match="port 25"):
        every.check_host("anything.example", 25)


PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *(
        "255.255.255.255",
        "240.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "::",
        "::1",
        "fe80::1",
        "fc00::1",
        "fec0::1",
        "ff02::1",
    ),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1"),
    *("2002:7f00:1::", "2001:0:1::1", "2001:db8::1"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


def test_which_addresses_are_public() -> None:
    assert [text for text in PRIVATE if is_public(ipaddress.ip_address(text))] == []
    assert [text for text in PUBLIC if not is_public(ipaddress.ip_address(text))] == []


def test_private_addresses_are_allowed_if_they_are_given() -> None:
    allowed = [text for text in (*PRIVATE, "10.1.0.9", "::ffff:10.1.0.9") if GIVEN.allows(ipaddress.ip_address(text))]
    assert allowed == ["::1", "10.1.0.9", "::ffff:10.1.0.9"]


@pytest.mark.parametrize(
    "text", ["https://example.org", "example.org:8080", "10.0.0.1/8", "exämple.org", "a/b", "", "*x"]
)
def test_what_cannot_be_given(text: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains takes host names"):
        AllowedDomains([text])
