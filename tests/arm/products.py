"""Multiplies matrices by llama.cpp under QEMU, and marks before and after each product what instructions.c counts.

usage: python -m tests.arm.products LIBRARY

our_products.c has this project's own products. Prints the cases, one a line, in the order of their pairs of marks; the
first is an empty one.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

COLUMNS, DEPTH = 1024, 2048
ROWS = (1, 8, 32)
TYPES = ("BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")
_BLOCKS = {"Q4_K": (144, slice(0, 4)), "Q6_K": (210, slice(208, 210))}  # bytes, and which are float16 factors
_MARK = 1000000  # MARK of instructions.c

Product = Callable[[], Any]


def marked(name: str, product: Product) -> None:
    """Run a product twice, the second time between two marks: the first one may start threads or load pages."""
    mark = ctypes.CDLL(None).syscall
    product()
    mark(ctypes.c_long(_MARK), ctypes.c_long(0))
    product()
    mark(ctypes.c_long(_MARK), ctypes.c_long(1))
    print(name, flush=True)


def weights_of(name: str) -> np.ndarray[Any, Any]:
    """Return rows of a type's blocks, uint8 [COLUMNS, bytes of a row]."""
    weights = np.random.default_rng(1).standard_normal((COLUMNS, DEPTH), np.float32) * np.float32(0.05)
    kind = gguf.GGMLQuantizationType[name]
    if name not in _BLOCKS:
        return np.ascontiguousarray(gguf.quantize(weights, kind).view(np.uint8).reshape(COLUMNS, -1))
    num_bytes, factors = _BLOCKS[name]
    blocks = np.random.default_rng(2).integers(0, 256, (COLUMNS * DEPTH // 256, num_bytes), np.uint8)
    blocks[:, factors] = np.resize(np.frombuffer(np.float16(0.001).tobytes(), np.uint8), factors.stop - factors.start)
    return blocks.reshape(COLUMNS, -1)


class _Settings(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("is_empty", ctypes.c_bool))


class Ggml:
    """llama.cpp's products, with the weights as its own loader puts them: in groups of rows, if it has such kernels."""

    def __init__(self, path: Path) -> None:
        base = path.with_name("libggml-base.so")  # of packages with a library for each kind of CPU
        if base.exists():
            ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: Any, result: Any = ctypes.c_void_p) -> Any:
        """Call a function of the library."""
        function = self.library[name]
        function.restype = result
        return function(*arguments)

    def context(self, num_bytes: int, *, is_empty: bool) -> ctypes.c_void_p:
        """Return a context, which has its tensors' memory unless it is empty."""
        return ctypes.c_void_p(self.call("ggml_init", _Settings(num_bytes, None, is_empty)))

    def tensor(self, context: ctypes.c_void_p, kind: int, num_rows: int) -> ctypes.c_void_p:
        """Return a tensor [num_rows, DEPTH]."""
        shape = (ctypes.c_int64(DEPTH), ctypes.c_int64(num_rows))
        return ctypes.c_void_p(self.call("ggml_new_tensor_2d", context, ctypes.c_int(kind), *shape))

    def product(self, name: str, num_rows: int) -> Product:
        """Return a product."""
        kind, data = gguf.GGMLQuantizationType[name], weights_of(name)
        context = self.context(1 << 28, is_empty=False)
        x = self.tensor(context, gguf.GGMLQuantizationType.F32, num_rows)
        numbers = np.random.default_rng(3).standard_normal((num_rows, DEPTH), np.float32)
        ctypes.memmove(self.call("ggml_get_data", x), numbers.ctypes.data, numbers.nbytes)
        zero, num_bytes = ctypes.c_size_t(0), ctypes.c_size_t(data.nbytes)
        devices = ctypes.c_void_p(self.call("ggml_backend_cpu_reg"))
        device = ctypes.c_void_p(self.call("ggml_backend_reg_dev_get", devices, zero))
        for place in ("_Z35ggml_backend_cpu_repack_buffer_typev", "ggml_backend_cpu_buffer_type"):
            home = self.context(1 << 20, is_empty=True)
            weight = self.tensor(home, kind, COLUMNS)
            self.call("ggml_backend_alloc_ctx_tensors_from_buft", home, ctypes.c_void_p(self.call(place)))
            y = ctypes.c_void_p(self.call("ggml_mul_mat", context, weight, x))
            if self.call("ggml_backend_dev_supports_op", device, y, result=ctypes.c_bool):
                break
        blocks = ctypes.c_void_p(data.ctypes.data)
        self.call("ggml_backend_tensor_set", weight, blocks, zero, num_bytes, result=None)
        graph = ctypes.c_void_p(self.call("ggml_new_graph", context))
        self.call("ggml_build_forward_expand", graph, y, result=None)
        return lambda: self.call("ggml_graph_compute_with_ctx", context, graph, ctypes.c_int(1), result=ctypes.c_int)


def main(what: str) -> None:
    """Run all products."""
    marked("empty", lambda: None)
    theirs = Ggml(Path(what))
    for name in TYPES:
        for num_rows in ROWS:
            marked(f"{name} {num_rows}", theirs.product(name, num_rows))


if __name__ == "__main__":
    main(sys.argv[1])
