"""The device for Triton's kernels: a CUDA device, or for tests the CPU with Triton's interpreter (TRITON_INTERPRET=1).

Numbers that change from step to step are excluded from specialization (do_not_specialize). Otherwise Triton would
compile one kernel for 1, one for multiples of 16, and one for the rest, each while requests wait.

This package is imported only for device=cuda. The interpreter's dot products of bfloat16 are silently wrong, and those
of float32 depend on the size of a tile. Tests replace them by those of a tensor core (tests/kernels/triton/). Without
that the interpreter runs in float32, at numerics level L0.
"""

from functools import cache

import torch
import triton
import triton.language as tl

#: Whether the interpreter runs the kernels: fixed when triton was imported.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# No fused multiply-add: two roundings remain two, as in the C kernels and the references (Triton's default from 3.10).
triton.knobs.language.default_fp_fusion = False


#: Bytes of shared memory for a program of the largest tiles, plus some for the compiler.
ROOM = 160 << 10


class NoDeviceError(Exception):
    """There is no usable CUDA device; the message states what was found."""


def find_device() -> torch.device:
    """Return the device that the kernels run on. Errors: NoDeviceError."""
    if INTERPRETED:
        return torch.device("cpu")
    if torch.version.cuda is None:
        release = torch.__version__.partition("+")[0]
        raise NoDeviceError(
            f"this torch ({torch.__version__}) is built without CUDA (pip install --force-reinstall torch=={release} "
            "brings a CUDA build, pytorch.org has one for each version of CUDA)"
        )
    if not torch.cuda.is_available():
        raise NoDeviceError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device and driver")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise NoDeviceError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the kernels need 8.0 or newer"
        )
    return torch.device("cuda", torch.cuda.current_device())


def has_room(device: torch.device) -> bool:
    """Return whether a program may have the shared memory that the largest tiles take: on 8.0, 9.0, 10.0."""
    return shared_memory(device) >= ROOM


def has_fp8(device: torch.device) -> bool:
    """Return whether a device has products of 8-bit floats, as compute capability 8.9 and newer do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to a program on a device; 0 for the interpreter's."""
    if device.type != "cuda":
        return 0
    index = device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least number."""
    return 1 << max(0, number - 1).bit_length()


@triton.jit
def dot(a, b, sums):
    """Return sums [M, N] float32 plus a [M, K] @ b [K, N].

    Tensor cores add 16 neighbours of K at a time to each sum (8 on compute capability 8), in ascending order, and a
    float32 product adds one at a time. So if all products of a number go through one chain of sums, its bits depend
    neither on M and N nor on how K is split into tiles. Numerics level L2 rests on this. float32 operands are not
    truncated to TF32.
    """
    return tl.dot(a, b, sums, input_precision="ieee")
