"""The device for Triton's kernels: a CUDA device, or for tests the CPU with Triton's interpreter (TRITON_INTERPRET=1).

Numbers that change from step to step are excluded from specialization (do_not_specialize). Otherwise Triton would
compile one kernel for 1, one for multiples of 16, and one for the rest, each while requests wait.

This package is imported only for device=cuda. The interpreter's dot products of bfloat16 are silently wrong, so in the
interpreter every operand of one is converted to float32 first. On a device no operand is converted.
"""

import torch
import triton
import triton.language as tl

#: Whether the interpreter runs the kernels: fixed when triton was imported.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# No fused multiply-add: two roundings remain two, as in the C kernels and the references (Triton's default from 3.10).
triton.knobs.language.default_fp_fusion = False


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


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least number."""
    return 1 << max(0, number - 1).bit_length()


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Compute a [M, K] @ b [K, N] -> [M, N] float32.

    float32 operands are not truncated to TF32. UPCAST: INTERPRETED.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
