"""The structs of latent attention (kernels/cpu/c/attention/latent.h) as ctypes classes."""

from kernels.cpu.c_struct import FLOAT, INT32, INT64, POINTER, CStruct, fields
from kernels.cpu.structs import CacheShape


class LatentArguments(CStruct):
    """Weights and constants around latent attention (latent.h)."""

    c_name = "Latent"
    _fields_ = (
        *fields("query keys values query_norm latent_norm", POINTER),
        *fields("num_heads query_dim latent_dim plain_dim rotated_dim value_dim", INT32),
        ("eps", FLOAT),
        ("reserved", INT32),
    )


class LatentStepArguments(CStruct):
    """Arguments of latent_begin() (latent.h)."""

    c_name = "LatentStep"
    _fields_ = (
        *fields("latent qkv queries cos sin query_cos query_sin positions slots q layer", POINTER),
        ("shape", CacheShape),
        ("num_rows", INT64),
        ("quantized", POINTER),
        ("quantized_stride", INT64),
    )


class LatentValuesArguments(CStruct):
    """Arguments of latent_values() (latent.h)."""

    c_name = "LatentValues"
    _fields_ = (*fields("latent attended values", POINTER), ("num_rows", INT64))
