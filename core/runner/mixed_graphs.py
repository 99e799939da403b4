"""MixedGraphs: CUDA graphs for steps in which some rows compute several tokens: prompts, next to rows that decode."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from core.runner.device_features import FeatureBuffers, SentFeatures
from core.runner.graph_pool import GraphPool
from ipc.tables.rounding import round_up
from kernels.triton.attention_work import TritonWork, tile_tokens

#: Tokens of the largest graph. Larger steps are launched kernel by kernel, because that takes less time than running.
MAX_TOKENS = 4096
#: Sizes below a multiple of the rows of a product's largest tile, of which each tile computes all.
_SMALL, _STEP = (64, 128), 256
#: Rows that decode, prompts, and splits of the longest context of a row that decodes, for which graphs have room. What
#: has no work takes little time, but there may be as many programs of it as of work.
_MAX_DECODES, _MAX_PROMPTS, _SPLITS = 256, 64, (1, 4, 16, 64)

#: What a graph captures: computes the work's hidden states [T, width] and writes them. Tokens with row -1 and position
#: -1, index -1 of a token that decodes or begins a tile, and tiles of -1 tokens are padding, which changes nothing.
Mixed = Callable[[TritonWork, torch.Tensor], None]


class MixedSize(NamedTuple):
    """What a graph is captured for."""

    num_tokens: int
    num_splits: int


class MixedWork(NamedTuple):
    """For what a graph has room: tokens, those that decode, query tiles, and splits of a decoding row's context."""

    num_tokens: int
    num_decodes: int
    num_tiles: int
    num_splits: int


def most_work(num_tokens: int, num_rows: int, group_size: int, most_splits: int) -> MixedWork:
    """Return what the largest graph has room for; see MixedGraphs. group_size: query heads per KV head."""
    most = token_sizes(num_tokens)[-1]
    return MixedWork(*_room(most, num_rows, tile_tokens(group_size)), min(most_splits, _SPLITS[-1]))


def _room(num_tokens: int, num_rows: int, tile: int) -> tuple[int, int, int]:
    """Return how many tokens, tokens that decode and query tiles a graph of this size has room for."""
    prompts = min(_MAX_PROMPTS, num_tokens // 2)
    return num_tokens, min(num_rows, _MAX_DECODES, num_tokens), num_tokens // tile + prompts


class MixedGraphs:
    """One graph for each number of tokens and of attention splits, both rounded up. Lists of work are padded.

    capture_all() captures them before the first request, and none is captured afterwards. The logits are not part of a
    graph. Graphs share their inputs and their result, and the memory in between with all others of the pool.
    """

    def __init__(
        self,
        run: Mixed,
        tables: torch.Tensor,
        pool: GraphPool,
        *,
        num_tokens: int,
        num_rows: int,
        group_size: int,
        width: int,
        most_splits: int,
        features: FeatureBuffers | None = None,
    ) -> None:
        """Allocate the shared buffers.

        tables: the block tables of all rows. num_tokens: the most tokens of a step. num_rows: the most rows of a step.
        group_size: query heads per KV head. width: length of a hidden state. most_splits: those of the longest context.
        features: what graphs read of features; None: steps with features have no graphs.
        """
        self._features = features
        self._run, self._tables, self._pool = run, tables, pool
        self._num_rows, self._tile_tokens = num_rows, tile_tokens(group_size)
        sizes = token_sizes(num_tokens)
        splits = {min(most_splits, count) for count in _SPLITS}
        #: The largest first. A step uses the smallest one that it fits.
        self._sizes = sorted((MixedSize(count, most) for count in sizes for most in splits), reverse=True)
        longest = round_up(max(max(self._room(count)) for count in sizes), 4)  # lists begin at multiples of 16 bytes
        self._inputs = torch.full((5, longest), -1, dtype=torch.int32, device=tables.device)
        self._hidden = torch.empty((sizes[-1], width), dtype=torch.float32, device=tables.device)
        if features is not None:
            features.allocate(sizes[-1])
        self.captured: dict[MixedSize, torch.cuda.CUDAGraph] = {}

    def capture_all(self) -> None:
        """Capture all graphs, the largest first, whose memory the others then share."""
        for size in self._sizes:
            work = self._work(size)
            self._inputs.fill_(-1)
            self.captured[size] = self._pool.capture(partial(self._run, work, self._hidden[: size.num_tokens]))

    def size_of(self, work: TritonWork, sent: SentFeatures | None = None) -> MixedSize | None:
        """Return the size of the graph for this step; None: it is launched kernel by kernel. sent: its features."""
        if work.shared is not None or work.common is not None or (sent is not None and self._features is None):
            return None
        lists = len(work.rows), len(work.decode_tokens), len(work.tile_tokens)
        fitting = (
            size
            for size in reversed(self._sizes)
            if work.num_splits <= size.num_splits
            and all(count <= room for count, room in zip(lists, self._room(size.num_tokens), strict=True))
        )
        return next(fitting, None)

    def __call__(self, work: TritonWork, size: MixedSize, sent: SentFeatures | None = None) -> torch.Tensor:
        """Return the hidden states [T, width] of a step. The next call overwrites them. size: from size_of()."""
        count = len(work.rows)
        self._inputs.fill_(-1)
        lists = work.rows, work.positions, work.decode_tokens, work.tile_tokens, work.tile_counts
        for target, given in zip(self._inputs, lists, strict=True):
            target[: len(given)] = given
        if self._features is not None:
            self._features.fill(work, sent)
        self.captured[size].replay()
        return self._hidden[:count]

    def _room(self, num_tokens: int) -> tuple[int, int, int]:
        return _room(num_tokens, self._num_rows, self._tile_tokens)

    def _work(self, size: MixedSize) -> TritonWork:
        tokens, decodes, tiles = self._room(size.num_tokens)
        lengths = tokens, tokens, decodes, tiles, tiles
        rows, positions, alone, firsts, counts = (
            column[:length] for column, length in zip(self._inputs, lengths, strict=True)
        )
        work = TritonWork(rows, positions, self._tables, alone, firsts, counts, size.num_splits)
        return work if self._features is None else work._replace(lasts=self._features.lasts(tokens))


def token_sizes(num_tokens: int) -> list[int]:
    """Return the numbers of tokens of graphs, ascending, for steps of up to num_tokens tokens."""
    sizes = [*_SMALL, *range(_STEP, MAX_TOKENS + 1, _STEP)]
    largest = next(size for size in sizes if size >= min(num_tokens, MAX_TOKENS))
    return sizes[: sizes.index(largest) + 1]
