"""The platform tag of a wheel with compiled libraries: the systems that can install it. Standard library only.

A library names the glibc versions of its symbols. `manylinux_2_34_x86_64` (PEP 600) means that any system with glibc
2.34 or newer runs it, whatever the distribution.
"""

import re
import struct
import sysconfig
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_DYNAMIC, _VERNEED = 6, 0x6FFFFFFE  # section types
_NEEDED = 1  # tag of an entry of the dynamic section
#: Libraries that a manylinux library may need.
_GLIBC = re.compile(r"(lib(c|m|pthread|dl|rt)|ld-linux[\w-]*)\.so\.\d+")


class Needs(NamedTuple):
    """Dependencies of a shared library."""

    libraries: frozenset[str]  # file names
    versions: frozenset[str]  # of their symbols: "GLIBC_2.34"


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int  # the section with this one's strings


def platform_tag(libraries: Iterable[bytes], machine: str | None = None) -> str:
    """Return the platform tag of a wheel with these shared libraries (their contents).

    It is manylinux_*, or the platform's name where a library needs more than glibc or is no 64-bit little-endian ELF
    file. machine: of Linux, if it is not this one's.
    """
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    platform = f"linux_{machine}" if machine else here
    try:
        minor = max((glibc_minor(read_needs(library)) for library in libraries), default=None)
    except (struct.error, ValueError, IndexError):
        minor = None
    if minor is None or not platform.startswith("linux_"):
        return platform
    return f"manylinux_2_{minor}_{platform.removeprefix('linux_')}"


def glibc_minor(needs: Needs) -> int:
    """Return the x of the oldest glibc 2.x that has all of `needs`. Errors: ValueError where no glibc has them."""
    if strangers := [name for name in needs.libraries if not _GLIBC.fullmatch(name)]:
        raise ValueError(f"needs {strangers}")
    minors = [re.fullmatch(r"GLIBC_2\.(\d+)(\.\d+)*", version) for version in needs.versions]
    if not minors or None in minors:
        raise ValueError(f"needs {sorted(needs.versions)}")
    return max(int(match[1]) for match in minors if match is not None)


def read_needs(library: bytes) -> Needs:
    """Read an ELF shared library's needs. Errors: ValueError, struct.error, IndexError for another content."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count = struct.unpack_from("<HH", library, 0x3A)
    sections = [
        _Section(kind, offset, length, link)
        for kind, offset, length, link in (
            struct.unpack_from("<4xI16xQQI", library, table + index * size) for index in range(count)
        )
    ]
    libraries, versions = set(), set()
    for section in sections:
        if section.kind == _DYNAMIC:
            libraries |= {_string(library, sections[section.link], at) for at in _needed(library, section)}
        elif section.kind == _VERNEED:
            versions |= {_string(library, sections[section.link], at) for at in _needed_versions(library, section)}
    return Needs(frozenset(libraries), frozenset(versions))


def _needed(library: bytes, section: _Section) -> Iterator[int]:
    """Yield the offsets of the needed libraries' names (Elf64_Dyn)."""
    for tag, value in struct.iter_unpack("<qQ", library[section.offset : section.offset + section.size]):
        if tag == _NEEDED:
            yield value


def _needed_versions(library: bytes, section: _Section) -> Iterator[int]:
    """Yield the offsets of the versions' names: a chain of Elf64_Verneed, each with a chain of Elf64_Vernaux."""
    at = section.offset
    while True:
        count, first, following = struct.unpack_from("<2xH4xII", library, at)
        part = at + first
        for _ in range(count):
            name, step = struct.unpack_from("<8xII", library, part)
            yield name
            part += step
        if not following:
            return
        at += following


def _string(library: bytes, strings: _Section, at: int) -> str:
    begin = strings.offset + at
    return library[begin : library.index(b"\0", begin)].decode()
