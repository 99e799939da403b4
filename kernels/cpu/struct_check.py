"""check_structs: the classes of kernels/cpu/structs.py compared with the C library's structs, when it is loaded."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from kernels.cpu import latent_structs, mixer_structs, structs
from kernels.cpu.build import CpuLibraryError
from kernels.cpu.c_struct import CStruct

#: All structs: those of the modules that are imported here.
STRUCTS: tuple[type[CStruct], ...] = tuple(CStruct.__subclasses__())
_MODULES = {structs.__name__, latent_structs.__name__, mixer_structs.__name__}
assert {struct.__module__ for struct in STRUCTS} == _MODULES, STRUCTS


class _ExportedField(ctypes.Structure):
    """One exported field: struct StructField of struct_fields.c."""

    _fields_ = (
        ("type", ctypes.c_char_p),
        ("field", ctypes.c_char_p),
        ("offset", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


class _Place(NamedTuple):
    offset: int  # bytes
    size: int  # bytes
    kind: int  # a character code: see struct_fields.c

    def __str__(self) -> str:
        return f"{_KINDS.get(self.kind, 'pointer or struct')} of {self.size} bytes at {self.offset}"


_KINDS = {ord("i"): "integer", ord("f"): "float"}
_KIND_OF = {ctypes.c_int32: ord("i"), ctypes.c_int64: ord("i"), ctypes.c_float: ord("f")}
_OTHER = ord("o")


def check_structs(library: ctypes.CDLL, structs: Sequence[type[CStruct]] = STRUCTS) -> None:
    """Compare each field of these structs with the library's: name, offset, size and kind (integer, float or other).

    Errors: CpuLibraryError that names the struct and the field."""
    exported = _exported_structs(library)
    for struct in structs:
        ours, theirs = _places(struct), exported.pop(struct.c_name, {})
        if ours == theirs:
            continue
        for name in sorted({**ours, **theirs}, key=lambda name: name == ""):  # fields first, then the struct as a whole
            if (here := ours.get(name)) != (there := theirs.get(name)):
                what = f"field {name}" if name else "as a whole"
                raise CpuLibraryError(
                    f"struct {struct.c_name}, {what}: {here or 'missing'} in class {struct.__name__} of "
                    f"kernels/cpu/structs.py, {there or 'missing'} in kernels/cpu/c/layers/struct_fields.c"
                )
    if exported and structs is STRUCTS:
        raise CpuLibraryError(
            f"struct {min(exported)} of kernels/cpu/c/layers/struct_fields.c is missing in kernels/cpu/structs.py"
        )


def _places(struct: type[CStruct]) -> dict[str, _Place]:
    """Return the fields' places by name; "" is the struct as a whole."""
    places = {"": _Place(0, ctypes.sizeof(struct), _OTHER)}
    for name, ctype, *_ in struct._fields_:
        field = getattr(struct, name)
        places[name] = _Place(field.offset, field.size, _KIND_OF.get(ctype, _OTHER))
    return places


def _exported_structs(library: ctypes.CDLL) -> dict[str, dict[str, _Place]]:
    """Return the library's fields by C name and field name."""
    number = ctypes.c_int32.in_dll(library, "num_struct_fields").value
    structs: dict[str, dict[str, _Place]] = {}
    for one in (_ExportedField * number).in_dll(library, "struct_fields"):
        places = structs.setdefault(one.type.decode(), {})
        places[one.field.decode()] = _Place(one.offset, one.size, one.kind)
    return structs
