"""Scratch buffers are reused, grow, and keep dtypes apart."""

from kernels.elements import BFLOAT16, FLOAT32
from kernels.memory.scratch import Scratch


def test_buffers_are_reused_and_grow():
    scratch = Scratch()
    first = scratch.get("a", (2, 8), FLOAT32)
    assert scratch.get("a", (4, 3), FLOAT32).ctypes.data == first.ctypes.data
    larger = scratch.get("a", (5, 5), FLOAT32)
    assert larger.shape == (5, 5)
    assert scratch.get("a", (1,), FLOAT32).ctypes.data == larger.ctypes.data


def test_names_and_dtypes_do_not_share_memory():
    scratch = Scratch()
    buffers = [scratch.get(name, (9,), dtype) for name in ("a", "b") for dtype in (FLOAT32, BFLOAT16)]
    assert len({buffer.ctypes.data for buffer in buffers}) == 4
    assert [buffer.dtype for buffer in buffers] == [FLOAT32, BFLOAT16] * 2
