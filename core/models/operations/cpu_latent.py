"""CpuLatentAttend: one layer's latent attention with C kernels, operation by operation."""

from dataclasses import dataclass
from typing import Protocol

from ipc.tables.arrays import Ints
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlan
from kernels.cpu.latent import CpuLatent
from kernels.cpu.rope import RotaryTable
from kernels.elements import Numbers
from kernels.memory.kv_cache import KVCache


class Step(Protocol):
    """The inputs that attention needs in one step, as in CpuStep (core/models/operations/cpu_operations.py)."""

    @property
    def positions(self) -> Ints:
        """Return the positions [T]."""

    @property
    def slots(self) -> Ints:
        """Return the slots [T]; -1 = do not store."""

    @property
    def tables(self) -> tuple[RotaryTable, ...]:
        """Return one table per kind of layer."""

    @property
    def work(self) -> tuple[AttentionPlan, ...]:
        """Return one plan per kind of layer."""

    @property
    def cache(self) -> KVCache:
        """Return the KV cache. It has one side: a row of K per token, from which V is computed."""


@dataclass(frozen=True)
class CpuLatentAttend:
    """Write the cache, attend, and compute the heads' values from the result. kind: see layer_kinds.py."""

    latent: CpuLatent
    attention: CpuAttention
    kind: int
    scale: float

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""
        return self.latent.variant

    def __call__(self, x: Numbers, step: Step, index: int) -> Numbers:
        q = self.store(x, step, index)
        cache, place = step.cache.part(index)
        return self.latent.expand(self.attention(q, cache, place, step.work[self.kind], self.scale))

    def store(self, x: Numbers, step: Step, index: int) -> Numbers:
        """Store what the cache has of the step's tokens. Return the queries."""
        cache, place = step.cache.part(index)
        return self.latent.begin(x, step.tables[self.kind], step.positions, cache, place, step.slots)
