"""Where Triton's kernels run: a CUDA device, or the CPU under Triton's interpreter (TRITON_INTERPRET=1), for tests.

A number that differs from step to step is not compiled for (do_not_specialize): Triton would make a kernel for 1, one
for multiples of 16, and one for the rest, each while requests wait.

This package is imported only for device=cuda. The interpreter's dot products of bfloat16 are silently wrong, so under
it every operand of one is made float32 first; on a device nothing is.
"""

import torch
import triton
import triton.language as tl

#: Kernels are run by the interpreter: fixed when triton was imported.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# Two roundings stay two, as in the C kernels and the references. (Triton's own default from 3.10 on.)
triton.knobs.language.default_fp_fusion = False


class NoDeviceError(Exception):
    """There is no CUDA device; the message says what was found."""


def find_device() -> torch.device:
    """The device that kernels run on. Errors: NoDeviceError."""
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


def power_of_2(number: int) -> int:
    """The least power of two that is at least number."""
    return 1 << max(0, number - 1).bit_length()


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a [M, K] @ b [K, N] -> [M, N] float32; float32 operands are not cut to TF32. UPCAST: INTERPRETED."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
