"""What shared libraries need, read from their bytes, and the tag that follows."""

import importlib.metadata
import re
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from build_wheel.platform_tag import Needs, glibc_minor, platform_tag, read_needs

pytestmark = pytest.mark.checkout

PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


def elf(needs: Sequence[tuple[str, Sequence[str]]]) -> bytes:
    """A 64-bit ELF file with nothing but what it needs: libraries, and versions of their symbols."""
    strings = bytearray(b"\0")

    def at(text: str) -> int:
        strings.extend(text.encode() + b"\0")
        return len(strings) - len(text) - 1

    dynamic, versions = b"", b""
    for index, (library, names) in enumerate(needs):
        name, parts = at(library), b""
        dynamic += struct.pack("<qQ", 1, name)
        for number, version in enumerate(names):
            parts += struct.pack("<IHHII", 0, 0, 0, at(version), 16 if number + 1 < len(names) else 0)
        if names:
            following = 16 + len(parts) if any(later for _, later in needs[index + 1 :]) else 0
            versions += struct.pack("<HHIII", 1, len(names), name, 16, following) + parts
    dynamic += struct.pack("<qQ", 0, 0)
    body, table = b"", b""
    for kind, content in ((0, b""), (3, bytes(strings)), (6, dynamic), (0x6FFFFFFE, versions)):
        if content or kind != 0x6FFFFFFE:
            table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, 64 + len(body), len(content), 1, 0, 1, 0)
            body += content
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHH", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0)
    return header + struct.pack("<HHH", 64, len(table) // 64, 1) + body + table


LIBC = ("libc.so.6", ["GLIBC_2.2.5", "GLIBC_2.14"])
LIBM = ("libm.so.6", ["GLIBC_2.29"])


def test_needs_are_read() -> None:
    assert read_needs(elf([LIBC, LIBM])) == Needs(
        frozenset({"libc.so.6", "libm.so.6"}), frozenset({"GLIBC_2.2.5", "GLIBC_2.14", "GLIBC_2.29"})
    )
    assert read_needs(elf([])) == Needs(frozenset(), frozenset())


@pytest.mark.skipif(not PLATFORM.startswith("linux_"), reason="manylinux")
def test_the_newest_version_of_all_libraries_counts() -> None:
    machine = PLATFORM.removeprefix("linux_")
    assert platform_tag([elf([LIBC])]) == f"manylinux_2_14_{machine}"
    assert platform_tag([elf([LIBC]), elf([LIBM, LIBC])]) == f"manylinux_2_29_{machine}"


@pytest.mark.parametrize(
    "needs",
    [
        [LIBC, ("libgomp.so.1", [])],
        [("libc.musl-x86_64.so.1", [])],
        [("libc.so.6", ["GLIBC_2.14", "GLIBC_PRIVATE"])],
        [("libc.so.6", ["GLIBC_2.14", "GLIBC_ABI_DT_RELR"])],
        [("libc.so.6", [])],
    ],
)
def test_a_library_that_needs_more_than_glibc_is_for_this_platform(needs: list[tuple[str, list[str]]]) -> None:
    with pytest.raises(ValueError, match="needs"):
        glibc_minor(read_needs(elf(needs)))
    assert platform_tag([elf([LIBC]), elf(needs)]) == PLATFORM


def test_what_is_no_such_file_is_for_this_platform() -> None:
    whole = elf([LIBC, LIBM])
    contents = [b"", b"MZ", b"\x7fELF\x01\x01" + whole[6:], *(whole[:end] for end in range(1, len(whole) - 64, 7))]
    for content in contents:
        assert platform_tag([content]) == PLATFORM
    assert platform_tag([]) == PLATFORM


def installed_libraries() -> Iterator[tuple[Path, int]]:
    """Shared libraries that others have built, and the x of the glibc 2.x that their wheels' tags name."""
    for distribution in importlib.metadata.distributions():
        tags = re.findall(r"(?m)^Tag: .*-manylinux_2_(\d+)_", distribution.read_text("WHEEL") or "")
        for file in (distribution.files or ()) if tags else ():
            path = Path(str(file.locate()))
            if path.name.endswith(".so") and path.is_file() and path.stat().st_size < 20 << 20:
                yield path, max(map(int, tags))


def test_tags_of_other_wheels_hold() -> None:
    """Their libraries need no newer glibc than their tags say; what more they need they bring."""
    found = list(installed_libraries())
    for path, minor in found:
        versions = frozenset(one for one in read_needs(path.read_bytes()).versions if re.match(r"GLIBC_[\d.]+$", one))
        assert not versions or glibc_minor(Needs(frozenset(), versions)) <= minor, path
    assert found, "numpy's, for one"
