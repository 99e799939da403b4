"""EncoderRun: an encoder's run for one image in parts, between which the engine's steps go on.

A large image takes minutes on a CPU. A run is cut into pieces, each of which is a layer's work for a block of patches.
The bits do not depend on the blocks, because the rows of an operation depend on their own inputs only (numerics level
L2).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from core.models.layers.layer import Layer
from core.models.layers.mixers import Mixer
from core.models.layers.mlp import DenseMlp
from core.models.operations.cpu_operations import CpuAttend, CpuOperations, CpuStep
from core.models.operations.operations import Norm, Product
from core.models.operations.unchanged import unchanged
from ipc.tables.arrays import Floats, Ints, UInt8s
from ipc.tables.rounding import ceil_div
from kernels.cpu.attention_plan import AttentionPlan, AttentionPlanner
from kernels.cpu.rope import RotaryTable
from kernels.elements import Numbers

#: Multiplications of a part of a run: 1.3 s of one core of Zen 3, with AVX2.
PART_WORK = 1 << 35
BLOCK_TOKENS = 16  # tokens per KV block; each run of patches that see each other has its own blocks
BLOCK_PATCHES = 128  # of a block of patches, for each thread
_BEGIN = 0.25  # work of a layer up to K and V, in proportion to all of it

#: Yields how much of an encoder's run is done, from 0 to 1, after each piece. Returns the rows.
Pieces = Generator[float, None, Floats]


class EncoderRun:
    """One image's run. Its rows are there after the last part."""

    def __init__(self, pieces: Pieces, num_parts: int) -> None:
        self._pieces, self._num_parts, self._done = pieces, num_parts, 0.0
        self._rows: Floats | None = None

    def advance(self, part: int) -> Floats | None:
        """Compute up to the end of this part, counted from 1. Return the rows [n, width] float32 after the last part.

        Parts that were left out are computed too.
        """
        if part == self._num_parts:
            return self.finish()
        self._compute(part / self._num_parts)
        return None

    def finish(self) -> Floats:
        """Compute what is left. Return the rows [n, width] float32."""
        self._compute(2.0)
        assert self._rows is not None, "the pieces of an encoder's run have no end"
        return self._rows

    def _compute(self, share: float) -> None:
        """Compute pieces until this share of all is done; all of them for a share above 1."""
        try:
            while self._rows is None and self._done < share:
                self._done = next(self._pieces)
        except StopIteration as end:
            self._rows = end.value


class EncoderInParts(ABC):
    """An encoder whose runs are pieces; an ImageEncoder (core/features/store.py)."""

    @abstractmethod
    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return what ImageEncoder.grid_of() does. Errors: InvalidRequestError."""

    @abstractmethod
    def work(self, num_rows: int) -> int:
        """Return about how many multiplications an image with so many rows takes."""

    @abstractmethod
    def pieces(self, pixels: UInt8s) -> Pieces:
        """Compute an image [height, width, 3] piece by piece."""

    def num_parts(self, num_rows: int) -> int:
        """Return the number of parts of a run for an image with so many rows."""
        return ceil_div(self.work(num_rows), PART_WORK)

    def begin(self, pixels: UInt8s) -> EncoderRun:
        """Return a run for an image [height, width, 3]."""
        return EncoderRun(self.pieces(pixels), self.num_parts(self.grid_of(pixels.shape)[0]))

    def encode(self, pixels: UInt8s) -> Floats:
        """Return the rows [n, width] float32 of an image [height, width, 3]."""
        return EncoderRun(self.pieces(pixels), 1).finish()


class Runs(NamedTuple):
    """Runs of patches that see each other: a whole image, or its windows. Each has its own blocks."""

    lengths: Ints  # [n]
    slots: Ints  # [patches]
    blocks: Ints  # [n, most blocks] int32

    @property
    def num_blocks(self) -> int:
        """Return how many blocks a cache must have."""
        return int(self.blocks.max()) + 1


def runs_of(lengths: Ints) -> Runs:
    """Return runs of these lengths, one after the other, each in blocks of its own; block 0 stays free."""
    counts = -(-lengths // BLOCK_TOKENS)
    firsts = counts.cumsum() - counts + 1
    blocks = firsts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return Runs(lengths, np.repeat(firsts * BLOCK_TOKENS, lengths) + within, blocks.astype(np.int32))


def plain_layer(kind: int, norms: tuple[Norm, Norm], mixer: Mixer, up: Product, down: Product) -> Layer:
    """Return a layer with norms before attention and MLP only. up: has the activation."""
    return Layer(
        kind=kind,
        input_norm=norms[0],
        mixer=mixer,
        attention_out=unchanged,
        mlp_norm=norms[1],
        mlp=DenseMlp(up, unchanged, down),
        mlp_out=unchanged,
    )


class LayersInBlocks:
    """The layers of an encoder, computed for one block of patches after the other.

    A layer's attention needs K and V of all patches. So a piece is what follows K and V in a layer, and K and V of the
    next layer, for one block; the layers' K and V are in two caches in turn.
    """

    def __init__(self, layers: Sequence[Layer], operations: CpuOperations, num_heads: int, num_kv_heads: int) -> None:
        """layers: each kind of them has its own runs of patches."""
        self._layers, self._operations = layers, operations
        num_kinds = 1 + max(layer.kind for layer in layers)
        library = operations.library
        self._planners = [AttentionPlanner(library, num_heads, num_kv_heads, is_causal=False) for _ in range(num_kinds)]

    def work(self, products: int, width: int, runs: Sequence[Runs]) -> int:
        """Return the multiplications of a run.

        products: of a patch in the products of a layer. width: numbers of its heads. runs: of each kind of layer.
        """
        pairs = [int((run.lengths * run.lengths).sum()) for run in runs]
        count = int(runs[0].lengths.sum())
        return sum(products * count + 2 * width * pairs[layer.kind] for layer in self._layers)

    def run(
        self,
        hidden: Floats,
        runs: Sequence[Runs],
        table: RotaryTable | None,
        after: Callable[[int, slice], None] | None = None,
    ) -> Iterator[float]:
        """Replace the hidden states [patches, width] by those after the layers. Yield what is done, from 0 to 1.

        runs: of each kind of layer. table: row i has the rotation of patch i; None = heads are not rotated. after: is
        called with the number of layers behind these patches, when their hidden states are complete.
        """
        size = BLOCK_PATCHES * self._operations.library.num_threads
        blocks = [slice(first, min(first + size, len(hidden))) for first in range(0, len(hidden), size)]
        most = max(run.num_blocks for run in runs)
        caches = [self._operations.allocate_cache(most, BLOCK_TOKENS) for _ in range(2)]
        queries, places = list[Numbers](), np.arange(len(hidden))

        def step(layer: int, block: slice) -> CpuStep:
            own = runs[self._layers[layer].kind]
            return CpuStep(places[block], own.slots[block], (table,) * len(runs), (), caches[layer % 2])

        def begin(layer: int, x: Numbers, block: slice) -> Numbers:
            mixer = self._layers[layer].mixer
            assert isinstance(mixer.mix, CpuAttend), mixer
            return mixer.mix.store(mixer.qkv(x), step(layer, block), 0)

        done, everything = 0.0, len(blocks) * (len(self._layers) + _BEGIN)
        for block in blocks:
            queries.append(begin(0, self._layers[0].input_norm(hidden[block]), block))
            done += _BEGIN
            yield done / everything
        for index, layer in enumerate(self._layers):
            for number, block in enumerate(blocks):
                x = self._attend(layer, queries[number], runs, step(index, block), block)
                x = layer.attention_out(layer.mixer.o(x))
                assert layer.mlp is not None, layer
                rows = hidden[block]
                x = layer.mlp_out(layer.mlp(layer.mlp_norm.after(rows, x)))
                if index + 1 < len(self._layers):
                    x = self._layers[index + 1].input_norm.after(rows, x)
                    queries[number] = begin(index + 1, x, block)
                else:
                    self._operations.add(rows, x)
                if after is not None:
                    after(index + 1, block)
                done += 1
                yield done / everything

    def _attend(self, layer: Layer, q: Numbers, runs: Sequence[Runs], step: CpuStep, block: slice) -> Numbers:
        """Return attention's output for a block of patches, whose runs' K and V are complete."""
        mix = layer.mixer.mix
        assert isinstance(mix, CpuAttend), mix
        plan = _plan_of(self._planners[layer.kind], runs[layer.kind], block)
        cache, place = step.cache.part(0)
        return mix.attention(q, cache, place, plan, mix.scale, mix.cap, mix.sinks)


def _plan_of(planner: AttentionPlanner, run: Runs, block: slice) -> AttentionPlan:
    """Return the plan of a block's patches, each of which sees its whole run."""
    ends = run.lengths.cumsum()
    counts = np.minimum(ends, block.stop) - np.maximum(ends - run.lengths, block.start)
    kept = counts > 0
    return planner(counts[kept], run.lengths[kept], run.blocks[kept], BLOCK_TOKENS)
