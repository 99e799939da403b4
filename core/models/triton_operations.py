"""TritonOperations: a model's operations on a device: Triton kernels, and torch's products.

This module imports triton, so it is imported for device=cuda only.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton

from core.models.config import Activation, ModelConfig
from core.models.rotary import Rotary, of_each_kind, rotary_embeddings
from core.models.stored_matrix import StoredMatrix
from ipc.arrays import AnyInts
from kernels.memory.kv_cache import KVCache, bytes_per_block
from kernels.torch.linear import Operation
from kernels.torch.rope import rotary_tables
from kernels.triton.attention_work import SPLIT, TritonWork, triton_work
from kernels.triton.decode_attention import decode_attention
from kernels.triton.embedding import embedding
from kernels.triton.gated_activation import gelu_tanh_mul, silu_mul
from kernels.triton.kv_cache import TritonKVCache
from kernels.triton.linear import DeviceLinear
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.rms_norm import TritonNorm
from kernels.triton.rope import TritonRope

GATES: dict[Activation, Operation] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


class TritonStep(NamedTuple):
    """The inputs that attention needs in one step of T tokens."""

    slots: torch.Tensor  # [T] int64, -1 = do not store
    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # cosines and sines of all tokens, for each kind of layer
    work: tuple[TritonWork, ...]  # one for each kind of layer
    cache: KVCache


class TritonOperations:
    """Operations on a device, at numerics level L0; the methods are described at Operations.

    The bits of decode attention do not depend on the batch, but those of the products do.
    """

    is_exact = False
    sampler = None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self.device = config, dtype, device
        rotaries = rotary_embeddings(config)
        self._rotary = of_each_kind(lambda rotary: Rotary(rotary.frequencies.to(device), rotary.factor), rotaries)
        self.group_size = config.num_attention_heads // config.num_key_value_heads

    @property
    def variant(self) -> str:
        """Name of the kernels and constants that fix the results' bits; part of the fingerprint."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreter"
        return f"triton-{triton.__version__} split={SPLIT} device={name}"

    def wake(self) -> None:
        """Do nothing: the device needs no wake-up."""

    def embedding(self, table: torch.Tensor, scale: float, head: Operation | None) -> Operation:
        """Return the operation from ids [T] int64 to the table's rows times scale [T, d] float32."""
        return partial(embedding, table=table, scale=scale)

    def linear(
        self,
        weight: StoredMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> DeviceLinear:
        """Return the product with this weight [out, in] and bias [out] float32."""
        return DeviceLinear(weight.dense(self._dtype), bias, out_dtype)

    def norm(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> TritonNorm:
        """Return the norm with this weight [d] float32; results are of dtype."""
        return TritonNorm(weight, eps, dtype)

    def gate_up(self, weight: StoredMatrix, function: Activation) -> tuple[DeviceLinear, Operation]:
        """Return the product of gate and up, and the operation that makes f(gate) * up of its result."""
        return self.linear(weight), GATES[function]

    def attention(
        self, kind: int, head_norms: torch.Tensor | None, eps: float, scale: float
    ) -> Callable[[torch.Tensor, TritonStep, int], torch.Tensor]:
        """Return the attention of one layer; see Operations."""
        rope = TritonRope(self._config.num_attention_heads, head_norms, eps)

        def attend(qkv: torch.Tensor, step: TritonStep, index: int) -> torch.Tensor:
            cos, sin = step.tables[kind]
            q = rope(qkv, cos, sin, step.cache, index, step.slots)
            out = torch.empty_like(q)
            prefill_attention(q, step.cache, index, step.work[kind], scale, out)
            decode_attention(q, step.cache, index, step.work[kind], scale, out)
            return out.flatten(1)

        return attend

    def step(
        self, positions: torch.Tensor, slots: torch.Tensor, work: tuple[TritonWork, ...], cache: KVCache
    ) -> TritonStep:
        """Return the step's inputs of attention, with the rotary tables of its positions."""
        tables = of_each_kind(lambda rotary: rotary_tables(positions, *rotary), self._rotary)
        return TritonStep(slots, tables, work, cache)

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
    ) -> TritonWork:
        """Return the attention work of a step for one window."""
        return triton_work(num_tokens, context_lens, block_tables, self.group_size, self.device, window)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block, all layers together."""
        config = self._config
        return bytes_per_block(
            block_size, config.num_key_value_heads, config.head_dim, config.num_hidden_layers, self._dtype
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> TritonKVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        return self._cache(num_blocks, block_size, self.device)

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> TritonKVCache:
        """Allocate a cache in pinned host memory for blocks of preempted requests. Errors: MemoryError."""
        return self._cache(num_blocks, block_size, torch.device("cpu"), pinned=self.device.type == "cuda")

    def _cache(self, num_blocks: int, block_size: int, device: torch.device, *, pinned: bool = False) -> TritonKVCache:
        config = self._config
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = config.num_hidden_layers, num_blocks, block_size, heads, head_dim
        return TritonKVCache(*shape, self._dtype, device, pinned)
