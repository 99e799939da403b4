"""The C kernels' structs are the same in C and in Python, and a library with other ones is refused."""

import ast
import ctypes
import re
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCE_FOLDER, CpuLibraryError, build, find_compiler
from kernels.cpu.c_struct import CStruct
from kernels.cpu.library import STRUCTS, check_structs, load_cpu_library
from kernels.cpu.library_file import find_library
from kernels.cpu.structs import GemmArguments, NormArguments
from tests.placed import PREFIX

KERNELS = SOURCE_FOLDER.parent


@pytest.fixture(scope="module")
def exports() -> ctypes.CDLL:
    return ctypes.CDLL(str(find_library().path))


def mirror(c_name: str, fields: list[tuple[str, type]]) -> type[CStruct]:
    """A class that stands for this C struct, with these fields."""
    return type("Mirror", (CStruct,), {"c_name": c_name, "_fields_": fields})


def test_every_struct_is_that_of_the_library(exports: ctypes.CDLL) -> None:
    check_structs(exports)
    assert len(STRUCTS) == len({struct.c_name for struct in STRUCTS}) == 49


def test_two_swapped_pointers_are_refused(exports: ctypes.CDLL) -> None:
    """Sizes are the same and so is every offset but those of the two."""
    fields = list(NormArguments._fields_)
    fields[2], fields[3] = fields[3], fields[2]
    with pytest.raises(CpuLibraryError, match=r"struct Norm, field out: pointer or struct of 8 bytes at 16 in class"):
        check_structs(exports, [mirror("Norm", fields)])


@pytest.mark.parametrize(
    ("position", "to", "message"),
    [
        (11, None, "field reserved: missing in class Mirror of .*, integer of 4 bytes at 92 in"),
        (8, ("epsilon", ctypes.c_float), "field epsilon: float of 4 bytes at 80 in class .*, missing in"),
        (8, ("eps", ctypes.c_int32), "field eps: integer of 4 bytes at 80 in class .*, float of 4 bytes at 80 in"),
        (4, ("num_rows", ctypes.c_int32), "field num_rows: integer of 4 bytes at 56 in .*, integer of 8 bytes at 56"),
    ],
)
def test_a_field_that_is_missing_renamed_or_of_another_type_is_refused(
    exports: ctypes.CDLL, position: int, to: tuple[str, type] | None, message: str
) -> None:
    fields = list(NormArguments._fields_)
    fields[position : position + 1] = [] if to is None else [to]
    with pytest.raises(CpuLibraryError, match=f"struct Norm, {message}"):
        check_structs(exports, [mirror("Norm", fields)])


def test_a_struct_that_is_not_exported_is_refused(exports: ctypes.CDLL) -> None:
    with pytest.raises(CpuLibraryError, match=r"struct Scale, field factor: .* in class Mirror of .*, missing in"):
        check_structs(exports, [*STRUCTS, mirror("Scale", [("factor", ctypes.c_float)])])


def test_a_library_with_another_struct_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: ctypes.CDLL
) -> None:
    """The header has changed, and nobody thought of Python: two pointers of GemmPack change places."""
    sources = tmp_path / "sources"
    for path in (*SOURCE_FOLDER.rglob("*.h"), SOURCE_FOLDER / "layers" / "struct_fields.c"):
        copy = sources / path.relative_to(SOURCE_FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    gemm = sources / "products" / "gemm.h"
    text = gemm.read_text()
    source, packed = re.findall(r"(?m)^    (?:const )?void \*(?:source|packed);.*\n", text)
    gemm.write_text(text.replace(source + packed, packed + source))
    monkeypatch.setattr(f"{PREFIX}kernels.cpu.build.SOURCE_FOLDER", sources)
    (tmp_path / "changed.so").write_bytes(build("portable", find_compiler(), tmp_path))
    with pytest.raises(CpuLibraryError, match=r"struct GemmPack, field source: .* at 0 in .*, .* at 8 in"):
        check_structs(ctypes.CDLL(str(tmp_path / "changed.so")))


def test_loading_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(library: ctypes.CDLL) -> None:
        raise CpuLibraryError("another struct")

    monkeypatch.setattr(f"{PREFIX}kernels.cpu.library.check_structs", refuse)
    with pytest.raises(CpuLibraryError, match="another struct"):
        load_cpu_library()


def test_a_struct_that_python_lacks_is_refused(exports: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tuple(struct for struct in STRUCTS if struct is not GemmArguments)
    monkeypatch.setattr(f"{PREFIX}kernels.cpu.library.STRUCTS", rest)
    with pytest.raises(CpuLibraryError, match=r"struct Gemm of kernels/cpu/c/layers/struct_fields\.c is missing"):
        check_structs(exports, rest)


def test_no_struct_is_declared_elsewhere() -> None:
    """All structs of kernels/ are CStructs, and are checked; but the one that checks them."""
    nodes = ((path, node) for path in sorted(KERNELS.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text())))
    kinds = ("Structure", "Union")
    assert {path.name for path, node in nodes if isinstance(node, ast.Attribute) and node.attr in kinds} == {
        "c_struct.py",
        "library.py",
    }
