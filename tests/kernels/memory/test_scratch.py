"""Scratch buffers are reused, grow, and keep dtypes apart."""

import torch

from kernels.memory.scratch import Scratch


def test_buffers_are_reused_and_grow():
    scratch = Scratch()
    first = scratch.get("a", (2, 8), torch.float32)
    assert scratch.get("a", (4, 3), torch.float32).data_ptr() == first.data_ptr()
    larger = scratch.get("a", (5, 5), torch.float32)
    assert larger.shape == (5, 5)
    assert scratch.get("a", (1,), torch.float32).data_ptr() == larger.data_ptr()


def test_names_and_dtypes_do_not_share_memory():
    scratch = Scratch()
    buffers = [scratch.get(name, (9,), dtype) for name in ("a", "b") for dtype in (torch.float32, torch.bfloat16)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 4
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.bfloat16] * 2
