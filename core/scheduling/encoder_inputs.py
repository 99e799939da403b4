"""EncoderInputs: which images a step encodes, within a budget, and whose embeddings the encoder cache keeps."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from core.batch.request import NO_ROW, Request
from core.batch.table import RequestStart
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft
from core.scheduling.limits import Limit
from core.scheduling.parts import SchedulerParts
from ipc.wire.feature_messages import FeatureUse


class _Needs:
    """The encoder inputs that a step needs so far, by digest."""

    def __init__(self) -> None:
        self.inputs: set[bytes] = set()
        self.num_tokens = self.num_new = 0  # tokens of all of them, and of those that are not in the cache


class EncoderInputs:
    """A Limit that ends a chunk before an image whose encoder input does not fit the step.

    A step needs the embeddings of all images that its tokens belong to, at most `cache_size` tokens. Those that are not
    in the cache are encoded in this step, at most `budget` tokens. Running rows come first, in the order in which they
    are served, then those that start. The first one always gets its image, because both bounds are at least one image
    (core/process/resolve.py), so no request waits forever.

    The executor has the embeddings. This is the record of them: a plan says which images it encodes and which
    embeddings it drops first, the least recently used ones. They belong to no request: a preempted one finds its
    images as long as they are there, and later requests with the same image do too.
    """

    def __init__(
        self, parts: SchedulerParts, add_limit: Callable[[Limit], None], cuts: list[Callable[[Draft], None]]
    ) -> None:
        """The limit is added with the first request that has an image.

        add_limit: admission's; cuts: the scheduler's.
        """
        config = parts.config
        self.budget, self.cache_size = config.max_num_encoder_input_tokens, config.encoder_cache_size
        self.num_cached_tokens = 0
        self._batch, self._stats, self._add_limit, self._cuts = parts.batch, parts.stats, add_limit, cuts
        self._is_chunked = config.enable_chunked_prefill
        self._are_used = False  # by any request so far
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # tokens by digest, least recently used first
        self._dropped: list[bytes] = []  # digests for the next plan that runs
        self._needs: _Needs | None = None  # of the step being planned

    def enter(self, request: Request) -> bool:
        """Handle a new request with features. Return whether it is the first one with an image."""
        if self._are_used or not any(use.is_encoded for use in request.features):
            return False
        self._are_used = True
        self._add_limit(self)
        self._cuts.append(self.cut)
        return True

    def missing_at(self, request: Request, position: int) -> int:
        """Return the tokens of the image at this position of a request; 0 if there is none, or it is in the cache."""
        for use in request.features:
            if use.is_encoded and use.position <= position < use.position + use.num_rows:
                return 0 if use.digest in self._cached else use.num_rows
        return 0

    def forget(self) -> None:
        """Drop all embeddings: the executor was lost, or frees its memory."""
        self._dropped += self._cached
        self._cached.clear()
        self.num_cached_tokens = 0

    def rename(self, digest_of: Callable[[bytes], bytes]) -> None:
        """Rename the digests."""
        self._cached = OrderedDict((digest_of(digest), count) for digest, count in self._cached.items())
        self._dropped = [digest_of(digest) for digest in self._dropped]

    def check_integrity(self) -> None:
        """Check the invariants between two steps. Errors: AssertionError with the numbers."""
        total = sum(self._cached.values())
        assert self._needs is None, "the needs of a step are left"
        assert total == self.num_cached_tokens <= max(0, self.cache_size), (total, self.num_cached_tokens)

    # --- a step ---

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Cut the start's tokens. Return NO_ENCODER_BUDGET if none are left."""
        features, begin, wanted = start.request.features, start.num_computed_tokens, start.num_tokens
        if not features:
            return None
        end, _ = self._within(features, begin, begin + wanted)
        start.num_tokens = end - begin
        if start.num_tokens == wanted or (start.num_tokens and self._is_chunked):
            return None
        needs = self._step_needs()
        available = min(self.budget - needs.num_new, self.cache_size - needs.num_tokens)
        needed = next(use.num_rows for use in features if use.is_encoded and use.position + use.num_rows > end)
        return Examined(start.request, Verdict.NO_ENCODER_BUDGET, needed, available)

    def take(self, start: RequestStart, draft: Draft) -> None:
        """Reserve the images of a request that starts in this step."""
        begin = start.num_computed_tokens
        self._reserve(self._within(start.request.features, begin, begin + start.num_tokens)[1])

    def give_back(self, request: Request) -> None:
        """Do nothing: embeddings belong to no request."""

    def begin_step(self, draft: Draft) -> None:
        """Cut the tokens of running rows, and reserve their images before others start. The rows keep their blocks."""
        counts = draft.counts
        for index, request, begin in self._running(draft):
            given = int(counts[index])
            end, inputs = self._within(request.features, begin, begin + given)
            self._reserve(inputs)
            counts[index] = left = end - begin
            draft.budget += given - left
            draft.num_skipped += not left

    def cut(self, draft: Draft) -> None:
        """Say in the plan what the executor encodes and drops, now that the tokens of all rows are known."""
        self.begin_step(draft)  # again: rows may have lost tokens, and without chunked prefill they are filled last
        needed: dict[bytes, int] = {}  # tokens by digest
        new: list[tuple[Request, list[int]]] = []
        for request, begin, end in self._chunks(draft):
            encoded = []
            for index, use in enumerate(request.features):
                if not use.is_encoded or use.position >= end or use.position + use.num_rows <= begin:
                    continue
                if use.digest not in self._cached and use.digest not in needed:
                    encoded.append(index)
                else:
                    self._stats.num_encoder_hits += use.position >= begin
                needed[use.digest] = use.num_rows
            if encoded:
                new.append((request, encoded))
                self._stats.num_encoder_inputs += len(encoded)
        self._needs = None
        self._cache(needed)
        draft.encoded = [(request.row, places) for request, places in new if request.row != NO_ROW]
        draft.encoded_at_start = [(request, places) for request, places in new if request.row == NO_ROW]
        if self._dropped and (draft.starts or draft.counts.any()):
            draft.dropped, self._dropped = self._dropped, []

    def _cache(self, needed: dict[bytes, int]) -> None:
        """Keep these inputs, and drop the least recently used others if there is no room."""
        for digest in needed:
            if digest in self._cached:
                self._cached.move_to_end(digest)
        for digest, count in needed.items():
            if digest in self._cached:
                continue
            while self.num_cached_tokens + count > self.cache_size:
                oldest, num_tokens = self._cached.popitem(last=False)
                assert oldest not in needed, f"the inputs of a step have more than {self.cache_size} tokens"
                self.num_cached_tokens -= num_tokens
                self._dropped.append(oldest)
            self._cached[digest] = count
            self.num_cached_tokens += count

    def _within(self, features: Sequence[FeatureUse], begin: int, end: int) -> tuple[int, dict[bytes, int]]:
        """Return how far, up to `end`, a chunk from `begin` on finds room for its images, and those not reserved yet.

        The images are tokens by digest. The chunk ends before the first image without room, or does not begin.
        """
        needs, inputs = self._step_needs(), dict[bytes, int]()
        num_tokens, num_new = needs.num_tokens, needs.num_new
        for use in features:
            if use.position >= end:
                break
            is_reserved = use.digest in needs.inputs or use.digest in inputs
            if is_reserved or not use.is_encoded or use.position + use.num_rows <= begin:
                continue
            num_tokens += use.num_rows
            num_new += 0 if use.digest in self._cached else use.num_rows
            if num_tokens > self.cache_size or num_new > self.budget:
                return max(begin, use.position), inputs
            inputs[use.digest] = use.num_rows
        return end, inputs

    def _reserve(self, inputs: dict[bytes, int]) -> None:
        needs = self._step_needs()
        needs.inputs.update(inputs)
        needs.num_tokens += sum(inputs.values())
        needs.num_new += sum(count for digest, count in inputs.items() if digest not in self._cached)

    def _step_needs(self) -> _Needs:
        if self._needs is None:
            self._needs = _Needs()
        return self._needs

    def _running(self, draft: Draft) -> Iterator[tuple[int, Request, int]]:
        """Yield (index in the draft's rows, request, its first token in this step) of running rows with images."""
        table, rows = self._batch.table, draft.rows
        begins = table.num_computed_tokens[rows]
        for index in np.flatnonzero((draft.counts > 0) & (begins < table.num_prompt_tokens[rows])).tolist():
            request = table.request[int(rows[index])]
            assert request is not None, f"row {rows[index]} is free"
            if request.features:
                yield index, request, int(begins[index])

    def _chunks(self, draft: Draft) -> Iterator[tuple[Request, int, int]]:
        """Yield (request, begin, end) of all chunks of prompts with features in this step."""
        for index, request, begin in self._running(draft):
            yield request, begin, begin + int(draft.counts[index])
        for start in draft.starts:
            if start.request.features:
                yield start.request, start.num_computed_tokens, start.num_computed_tokens + start.num_tokens
