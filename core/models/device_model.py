"""device_model: a model of our own on a GPU. Imported only for device=cuda, because it needs torch and triton."""

from collections.abc import Iterable, Sequence

import torch

from core import log
from core.models.config import ModelConfig
from core.models.encoder import Encoder
from core.models.llama import Llama
from core.models.operations.stored_matrix import Weight
from core.models.operations.triton_operations import TritonOperations
from core.models.operations.weight_form import WeightForm
from core.models.parts.gathered import GatheredParts
from core.models.parts.rank import Rank
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.options.config import KVCacheDtype
from ipc.options.model_options import Numerics
from kernels.cpu.group import SeparateMemory, SharedMemory
from kernels.elements import Dtype
from kernels.memory.kv_cache import Scales
from kernels.torch.tensors import DTYPES
from kernels.triton.device import has_fp8
from kernels.triton.kv_cache import Fp8KVCache, Int8KVCache, TritonKVCache
from kernels.triton.self_test import fp8_products_are_ordered, products_are_ordered

_CACHES: dict[KVCacheDtype, type[TritonKVCache]] = {"auto": TritonKVCache, "int8": Int8KVCache, "fp8": Fp8KVCache}

_SMALLER = {
    WeightForm.DENSE: " (quantization='int8' halves them, 'stored' keeps those of a quantized file as they are)"
}


def device_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    dtype: Dtype,
    device: torch.device,
    form: WeightForm = WeightForm.DENSE,
    numerics: Numerics = "L2",
    rank: Rank | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    kv_scales: Sequence[Scales] = (),
) -> Llama:
    """Build the model on the device, with its matrices in this form, and its KV cache in this.

    A device whose products fail the self-test of numerics level L2 gets L0, which is said. rank: its place in a group
    of devices that computes the model together; None = there is no group. kv_scales: those of each layer's KV cache,
    if it has 8-bit floats; () = there are none.

    Errors: ModelFileError naming missing tensors; OutOfMemoryError; ConfigError for a rank or FP8 products at L0, or on
    a device without them.
    """
    if form is WeightForm.FP8 and not has_fp8(device):
        raise ConfigError(
            f"quantization='fp8' needs compute capability 8.9 or newer, and {torch.cuda.get_device_name(device)} is "
            "older: use 'int8' or 'stored', whose weights are as small"
        )
    is_exact = numerics == "L2" and products_are_ordered(device, DTYPES[dtype])
    if form is WeightForm.FP8 and not (is_exact and fp8_products_are_ordered(device)):
        raise ConfigError("quantization='fp8' needs numerics level L2, which this device lacks: leave it out")
    if numerics == "L2" and not is_exact:
        log.say("engine-core: numerics level L0: this device's products depend on the shape of their tiles")
    if rank is not None and not is_exact:
        raise ConfigError("tensor_parallel_size > 1 needs numerics level L2, which this device lacks: leave it out")
    try:
        own, caches = config if rank is None else rank.shard.config(config), _CACHES[kv_cache_dtype]
        operations = TritonOperations(
            own, dtype, device, form, is_exact=is_exact, cache_type=caches, kv_scales=kv_scales
        )
        if config.encoder is not None:
            return Encoder(config, weights, dtype, operations=operations, numerics=numerics)
        model = Llama(config, weights, dtype, numerics, operations=operations, rank=rank)
        return model if rank is None else _gathered(model, config, rank)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the model's weights do not fit the GPU{_SMALLER.get(form, '')}: {error}") from error


def _gathered(model: Llama, config: ModelConfig, rank: Rank) -> Llama:
    """Return the rank's part of a model, with the results of all ranks. config: of the whole model."""
    assert not isinstance(rank.memory, SharedMemory | SeparateMemory), type(rank.memory)
    model.gather(GatheredParts(config, rank.shard, rank.memory))
    return model
