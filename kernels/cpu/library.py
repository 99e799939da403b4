"""CpuLibrary: the loaded C kernels. They are built on first use unless a wheel contains them."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels.block_grids import GRIDS, rows_of
from kernels.cpu import latent_structs, mixer_structs, structs
from kernels.cpu.build import CpuLibraryError, has_amx
from kernels.cpu.c_struct import CStruct
from kernels.cpu.library_file import find_library
from kernels.elements import BFLOAT16, FLOAT16, FLOAT32
from kernels.memory.weight_memory import WeightMemory

#: Numbers of the element types; enum in elements.h.
ELEMENT_NUMBERS = {FLOAT32: 0, BFLOAT16: 1, FLOAT16: 2}

#: Versions of the C kernels' arithmetic, part of the model's fingerprint: of most variants, and of those that have had
#: changes of their own since. Raise a variant's with every change to a bit of any of its results.
#: tests/core/runner/test_cpu_variants.py compares results with those recorded for these versions.
_ARITHMETIC = 1
_OWN_ARITHMETIC = {"amx": 2}


def arithmetic_of(variant: str) -> int:
    """Return the version of a variant's arithmetic."""
    return _OWN_ARITHMETIC.get(variant, _ARITHMETIC)


class CpuLibrary:
    """The kernels of one variant, and their threads.

    Kernels must be called from one thread at a time, except for those that pack weights; see alone(). They hold no
    Python references: the caller keeps all arguments alive until the call returns.
    """

    def __init__(self, variant: str, path: Path) -> None:
        """Load the library. Errors: OSError; CpuLibraryError if its structs differ from kernels/cpu/structs.py."""
        self.variant, self.file_name = variant, path.name  # the name contains a hash of the sources
        self.num_threads = 1
        self._has_grids = False
        self._functions = ctypes.CDLL(str(path))
        check_structs(self._functions)
        self._start = self.function("pool_start", ctypes.c_int)
        self._wake = self.function("pool_wake")
        self.memory = WeightMemory()
        #: Whether AMX's products are computed by other instructions, slowly, with the same bits.
        self.emulates_amx = variant == "amx" and not has_amx()
        if variant == "amx":
            self.function("amx_use", ctypes.c_int)(not self.emulates_amx)

    def function(self, name: str, *argument_types: Any, result: Any = None) -> Callable[..., Any]:
        """Return the exported function of this name. Python's GIL is released while it runs."""
        function = self._functions[name]
        function.argtypes, function.restype = argument_types, result
        return function

    def use_grids(self) -> None:
        """Give the kernels the grids of IQ types (kernels/block_grids.py), before a block of such a type is read."""
        if self._has_grids:
            return
        grids = b"".join(rows_of(name).tobytes() for name in GRIDS)
        size = ctypes.c_int32.in_dll(self._functions, "block_grids_bytes").value
        assert len(grids) == size, (len(grids), size)
        ctypes.memmove((ctypes.c_uint8 * size).in_dll(self._functions, "block_grids"), grids, size)
        self._has_grids = True

    def start_threads(self, num_threads: int) -> None:
        """Run kernels on num_threads threads, including the calling thread. Idle threads use no CPU."""
        self._start(num_threads)
        self.num_threads = num_threads

    def stop_threads(self) -> None:
        """Stop all threads but the calling one."""
        self.start_threads(1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let the calling thread run its kernels alone in this context, while another thread uses the pool.

        It is for packing weights: the kernels that compute steps share buffers.
        """
        leave = self.function("pool_leave", ctypes.c_int)
        leave(1)
        try:
            yield
        finally:
            leave(0)

    @contextlib.contextmanager
    def lent_core(self) -> Iterator[None]:
        """Leave one core to the calling thread in this context: steps that begin in it have one thread less.

        Without it the pool's threads and the calling one share the cores, and each barrier of a step waits for a
        thread that has lost its core.
        """
        lend = self.function("pool_lend", ctypes.c_int)
        lend(1)
        try:
            yield
        finally:
            lend(0)

    @contextlib.contextmanager
    def beside_steps(self) -> Iterator[None]:
        """Let the calling thread pack weights in this context while another thread runs steps."""
        with self.alone(), self.lent_core():
            yield

    def wake_threads(self) -> None:
        """Wake sleeping threads because a kernel follows within tens of microseconds: waking up takes as long.

        Lent cores leave the threads, or return to them, in this call.
        """
        self._wake()


def load_cpu_library(variant: str | None = None) -> CpuLibrary:
    """Load the library of this variant; None = the best one for this CPU. Errors: CpuLibraryError."""
    found = find_library(variant)
    try:
        return CpuLibrary(found.variant, found.path)
    except OSError as error:
        if not found.is_prebuilt:
            raise CpuLibraryError(f"cannot load {found.path}: {error}") from error
    found = find_library(variant, use_prebuilt=False)  # the wheel's file was built for another C library
    try:
        return CpuLibrary(found.variant, found.path)
    except OSError as error:
        raise CpuLibraryError(f"cannot load {found.path}: {error}") from error


# check_structs: compares the classes of kernels/cpu/structs.py with the C library's structs when it is loaded.


#: All structs: those in the modules imported here.
STRUCTS: tuple[type[CStruct], ...] = tuple(CStruct.__subclasses__())
_MODULES = {structs.__name__, latent_structs.__name__, mixer_structs.__name__}
assert {struct.__module__ for struct in STRUCTS} == _MODULES, STRUCTS


class _ExportedField(ctypes.Structure):
    """One exported field: struct StructField in struct_fields.c."""

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

    Errors: CpuLibraryError that names the struct and the field.
    """
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
    """Return the fields' places by name; "" is the whole struct."""
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
