"""EncoderInputs: which images a step encodes, within a budget, and whose embeddings the encoder cache keeps."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from core.batch.request import NO_ROW, Request
from core.batch.table import RequestStart
from core.scheduling.decisions import Examined, Verdict
from core.scheduling.draft import Draft
from core.scheduling.limits import Limit
from core.scheduling.parts import SchedulerParts
from ipc.tables.rounding import ceil_div
from ipc.wire.feature_messages import FeatureUse


class ImageInParts(NamedTuple):
    """A large image that is encoded in parts, one in each step."""

    digest: bytes
    num_rows: int
    num_parts: int
    num_done: int
    request: Request  # the one that it was begun for

    @property
    def step_rows(self) -> int:
        """Return how many rows one part counts as."""
        return ceil_div(self.num_rows, self.num_parts)


class _Needs:
    """The encoder inputs that a step needs so far, by digest."""

    def __init__(self, run: ImageInParts | None) -> None:
        """run: what is encoded in parts, if it goes on."""
        is_last = run is not None and run.num_done + 1 == run.num_parts
        self.inputs: set[bytes] = set()
        self.num_tokens = run.num_rows if run is not None and is_last else 0  # of all of them
        self.num_new = 0 if run is None else run.step_rows  # tokens of those that are not in the cache
        self.run = run  # also one that begins with this step
        #: Images that are encoded in parts and are not there yet, before which a chunk of this step ends.
        self.in_parts: list[tuple[Request, FeatureUse]] = []


class EncoderInputs:
    """A Limit that ends a chunk before an image whose encoder input does not fit the step.

    A step needs the embeddings of all images that its tokens belong to, at most `cache_size` tokens. Those that are not
    in the cache are encoded in this step, at most `budget` tokens. Running rows come first, in the order in which they
    are served, then those that start. The first one always gets its image, because both bounds are at least one image
    (core/process/resolve.py), so no request waits forever.

    A large image is encoded in parts (FeatureUse.num_parts): one image at a time, one part in each step, next to the
    others' tokens. Its share of the image's tokens counts in the budget. Chunks end before it until its embeddings are
    there. If its request ends before that and no other needs it, a plan drops what was made of it, at once.

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
        self._run: ImageInParts | None = None  # what is encoded in parts now
        self._unused: list[bytes] = []  # digests of images encoded in parts that no step has used yet
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
        self._unused.clear()
        self.num_cached_tokens = 0
        if self._run is not None:
            self._dropped.append(self._run.digest)
            self._run = None

    def rename(self, digest_of: Callable[[bytes], bytes]) -> None:
        """Rename the digests."""
        self._cached = OrderedDict((digest_of(digest), count) for digest, count in self._cached.items())
        self._dropped = [digest_of(digest) for digest in self._dropped]
        self._unused = [digest_of(digest) for digest in self._unused]
        if self._run is not None:
            self._run = self._run._replace(digest=digest_of(self._run.digest))

    def check_integrity(self) -> None:
        """Check the invariants between two steps. Errors: AssertionError with the numbers."""
        total = sum(self._cached.values())
        assert self._needs is None, "the needs of a step are left"
        assert total == self.num_cached_tokens <= max(0, self.cache_size), (total, self.num_cached_tokens)
        assert self._run is None or 0 < self._run.num_done < self._run.num_parts, self._run
        assert self._cached.keys() >= set(self._unused), self._unused

    # --- a step ---

    def lacks(self, start: RequestStart, draft: Draft) -> Examined | None:
        """Cut the start's tokens. Return NO_ENCODER_BUDGET if none are left."""
        features, begin, wanted = start.request.features, start.num_computed_tokens, start.num_tokens
        if not features:
            return None
        end, _ = self._within(start.request, begin, begin + wanted)
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
        self._reserve(self._within(start.request, begin, begin + start.num_tokens)[1])

    def give_back(self, request: Request) -> None:
        """Do nothing: embeddings belong to no request."""

    def begin_step(self, draft: Draft) -> None:
        """Cut the tokens of running rows, and reserve their images before others start. The rows keep their blocks."""
        counts = draft.counts
        for index, request, begin in self._running(draft):
            given = int(counts[index])
            end, inputs = self._within(request, begin, begin + given)
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
                elif use.digest in self._unused:
                    self._unused.remove(use.digest)
                else:
                    self._stats.num_encoder_hits += use.position >= begin
                needed[use.digest] = use.num_rows
            if encoded:
                new.append((request, encoded))
                self._stats.num_encoder_inputs += len(encoded)
        is_abandoned = self._abandon()
        needed |= self._go_on(draft)
        self._needs = None
        self._cache(needed)
        draft.encoded = [(request.row, places) for request, places in new if request.row != NO_ROW]
        draft.encoded_at_start = [(request, places) for request, places in new if request.row == NO_ROW]
        if self._dropped and (is_abandoned or draft.starts or draft.counts.any() or draft.image_parts):
            draft.dropped, self._dropped = self._dropped, []

    def _abandon(self) -> bool:
        """If the request of what is encoded in parts has ended, give it to another, or drop it. Return whether it is.

        Another image may then begin with this step.
        """
        needs = self._step_needs()
        if (run := needs.run) is None or not run.request.is_finished:
            return False
        if others := [request for request, use in needs.in_parts if use.digest == run.digest]:
            needs.run = run._replace(request=others[0])
            return False
        self._dropped.append(run.digest)
        needs.run, needs.num_new = None, needs.num_new - run.step_rows
        if needs.in_parts:
            needs.run = self._begun(*needs.in_parts[0], needs.num_new)
        return True

    def _begun(self, request: Request, use: FeatureUse, num_new: int) -> ImageInParts | None:
        """Return an image that is encoded in parts from this step on; None: its first part does not fit the budget."""
        run = ImageInParts(use.digest, use.num_rows, use.num_parts, 0, request)
        return run if num_new + run.step_rows <= self.budget else None

    def _go_on(self, draft: Draft) -> dict[bytes, int]:
        """Plan one part of an image that is encoded in parts. Return its tokens by digest if it is the last part."""
        run = self._step_needs().run
        if run is not None and (draft.budget or draft.starts or draft.counts.any()):  # otherwise nothing may run now
            run = run._replace(num_done=run.num_done + 1)
            draft.image_parts = [(run.digest, run.num_done)]
        if run is None or run.num_done < run.num_parts:
            self._run = run if run is not None and run.num_done else None
            return {}
        self._run = None
        self._unused.append(run.digest)
        self._stats.num_encoder_inputs += 1
        return {run.digest: run.num_rows}

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
                if oldest in self._unused:
                    self._unused.remove(oldest)
            self._cached[digest] = count
            self.num_cached_tokens += count

    def _within(self, request: Request, begin: int, end: int) -> tuple[int, dict[bytes, int]]:
        """Return how far, up to `end`, a chunk from `begin` on finds room for its images, and those not reserved yet.

        The images are tokens by digest. The chunk ends before the first image without room, or that is encoded in parts
        and is not there yet; or it does not begin.
        """
        needs, inputs = self._step_needs(), dict[bytes, int]()
        num_tokens, num_new = needs.num_tokens, needs.num_new
        for use in request.features:
            if use.position >= end:
                break
            is_reserved = use.digest in needs.inputs or use.digest in inputs
            if is_reserved or not use.is_encoded or use.position + use.num_rows <= begin:
                continue
            if use.num_parts > 1 and use.digest not in self._cached:
                needs.in_parts.append((request, use))
                if needs.run is None and (run := self._begun(request, use, num_new)) is not None:
                    needs.run = run
                    needs.num_new += run.step_rows
                return max(begin, use.position), inputs
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
            self._needs = _Needs(self._run)
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
