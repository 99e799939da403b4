"""Images in the scheduler: no step passes the encoder's budget or its cache, each image is there when a step needs it,
and all decisions are the gold model's.
"""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from core.execution.encoding import decode_plan
from core.execution.plan import SchedulerOutput, decided_fields, encode_fields, encode_plan
from core.scheduling.decisions import Verdict
from core.scheduling.explain import explain
from ipc.options.resolved import ResolvedConfig
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.messages import AddRequest
from ipc.wire.scheduling_messages import Explain, Explanation, Reason
from tests.core.driving import ByHand, add_message, small_config
from tests.core.scheduling.gold_entry import Block, Entry
from tests.core.scheduling.gold_machine import ALL, GoldMachine, Options, new_seeds, run, run_share
from tests.core.scheduling.gold_options import GoldWithOptions
from tools.commands.explain import describe_all

ROWS = 4


def with_images(
    message: AddRequest, places: dict[int, int], *, is_whole: bool = False, num_parts: int = 1
) -> AddRequest:
    """The message with these images, by place, in place of its tokens. num_parts: of images with even numbers."""
    ids, uses = np.frombuffer(message.prompt_token_ids, "<i4").copy(), []
    for place, image in sorted(places.items()):
        ids[place : place + ROWS] = -1 - image
        use = FeatureUse(place, ROWS, bytes([image]), is_whole, True)
        uses.append(msgspec.structs.replace(use, num_parts=1 if image % 2 else num_parts))
    return msgspec.structs.replace(message, prompt_token_ids=ids.tobytes(), features=uses)


def asks(number: int, length: int, places: dict[int, int], max_tokens: int = 4, **options: Any) -> AddRequest:
    ids = (np.arange(length) + 3 + 100 * number).tolist()
    return with_images(add_message(number, ids, max_tokens, **options), places)


class Hand(ByHand):
    """Also has the executor's encoder cache, and checks that each image is there when a step needs it."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config)
        self.config = config
        self.cache: dict[bytes, int] = {}
        self.uses: dict[int, list[FeatureUse]] = {}  # by row
        self.encoded: list[int] = []  # images, in order
        self.parts: dict[bytes, int] = {}  # how many have been computed, of images that are encoded in parts
        self.num_parts = 1  # of each of these
        self.num_dropped = 0

    def schedule(self, now_ns: int = 0) -> SchedulerOutput:
        plan = super().schedule(now_ns)
        self.uses |= dict(plan.features)
        for digest in plan.freed_encoder_inputs:
            self.num_dropped += 1
            if self.parts.pop(digest, None) is None:
                self.cache.pop(digest, None)  # a lost executor has none
        for digest, part in plan.image_parts:
            self.parts[digest] = self.parts.get(digest, 0) + 1
            assert part == self.parts[digest], "parts follow each other"
            if part == self.num_parts:
                del self.parts[digest]
                self.cache[digest] = ROWS
                self.encoded.append(digest[0])
        assert len(self.parts) <= 1
        num_new = 0
        for row, places in plan.scheduled_encoder_inputs:
            for use in (self.uses[row][place] for place in places):
                assert use.digest not in self.cache, "it is encoded again although it is there"
                self.cache[use.digest] = use.num_rows
                self.encoded.append(use.digest[0])
                num_new += use.num_rows
        num_new += len(plan.image_parts) * -(-ROWS // self.num_parts)
        assert num_new <= self.config.max_num_encoder_input_tokens
        assert sum(self.cache.values()) <= self.config.encoder_cache_size
        assert self.cache == dict(self.scheduler.encoder_inputs._cached)
        for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
            end = int(self.scheduler.table.num_computed_tokens[row])
            request = self.scheduler.table.request[row]
            for use in request.features if request is not None else ():
                is_needed = use.position < end and use.position + use.num_rows > end - count
                assert not is_needed or use.digest in self.cache, f"row {row} needs {use.digest!r}"
        return plan


def hand(budget: int = ROWS, cache: int = 100 * ROWS, **options: Any) -> Hand:
    sizes = {"max_num_encoder_input_tokens": budget, "encoder_cache_size": cache}
    return Hand(small_config(**{"budget": 40, "watermark": 0.0, **sizes, **options}))


def test_a_chunk_ends_before_an_image_that_does_not_fit_the_budget() -> None:
    machine = hand()
    machine.add(asks(1, 24, {2: 1, 6: 2, 15: 3}))
    plans = []
    while not (plan := machine.schedule()).is_empty and len(plans) < 3:
        plans.append((plan.num_scheduled_tokens.tolist(), plan.scheduled_encoder_inputs))
        machine.update(plan)
    assert plans == [([6], [(0, [0])]), ([9], [(0, [1])]), ([9], [(0, [2])])]
    machine = hand(budget=2 * ROWS + 3)
    machine.add(asks(1, 24, {2: 1, 6: 2, 15: 3}))
    assert [machine.step(), machine.step(), machine.encoded] == [{1: 15}, {1: 9}, [1, 2, 3]]


def test_two_requests_with_an_image_encode_it_once() -> None:
    machine = hand()
    machine.add(asks(1, 12, {2: 1}))
    machine.add(asks(2, 12, {5: 1, 0: 1}))
    assert machine.step() == {1: 12, 2: 12}
    assert machine.encoded == [1]
    stats = machine.scheduler.make_stats()
    assert (stats.num_encoder_inputs, stats.num_encoder_hits) == (1, 2)


def test_a_prefix_hit_needs_no_image() -> None:
    machine = hand(cache=ROWS)
    first = asks(1, 17, {2: 1}, 1)
    machine.add(first)
    machine.step()
    machine.add(asks(2, 8, {0: 2}, 1))  # drops image 1
    machine.step()
    machine.add(msgspec.structs.replace(first, number=3))
    assert machine.step() == {3: 1}
    assert machine.encoded == [1, 2]


def test_a_text_passes_a_request_that_waits_for_its_image() -> None:
    machine = hand()
    for number in (1, 2, 3):
        machine.add(asks(number, 12, {0: number} if number < 3 else {}))
    assert machine.step() == {1: 12, 3: 12}
    decision = machine.scheduler.decision
    assert decision is not None
    (one,) = decision.examined
    assert (one.request.number, one.verdict, one.needed, one.available) == (2, Verdict.NO_ENCODER_BUDGET, ROWS, 0)
    answer = explain(machine.scheduler, "fcfs", 0, Explain(1, number=2), 0)
    assert isinstance(answer, Explanation)
    assert [one.reason for one in answer.requests] == [Reason.NO_ENCODER_BUDGET]
    assert (answer.max_num_encoder_input_tokens, answer.encoder_cache_size) == (ROWS, 100 * ROWS)
    assert answer.num_encoder_cache_tokens == ROWS
    lines = describe_all(answer)
    assert "images: a step encodes 4 tokens at most; the embeddings of 4 of 400 tokens are kept" in lines
    assert any("its next image has 4 tokens, and the step could encode 0 more" in line for line in lines)
    assert machine.scheduler.make_stats().num_head_no_encoder_budget == 1
    assert machine.step() == {1: 1, 3: 1, 2: 12}


def test_a_running_request_waits_for_its_image_and_says_so() -> None:
    machine = hand()
    for number in (1, 2):
        machine.add(asks(number, 20, {4: 10 * number, 12: 10 * number + 1}))
    assert machine.step() == {1: 12, 2: 4}
    assert machine.step() == {1: 8}
    answer = explain(machine.scheduler, "fcfs", 0, Explain(1, number=2), 0)
    assert isinstance(answer, Explanation)
    (one,) = answer.requests
    assert (one.reason, one.needed) == (Reason.SKIPPED_ENCODER_BUDGET, ROWS)
    assert machine.step() == {1: 1, 2: 8}


@pytest.mark.parametrize(("cache", "encoded"), [(100 * ROWS, [1, 2]), (ROWS, [1, 2, 1, 2])])
def test_preemption_keeps_the_embeddings_while_there_is_room(cache: int, encoded: list[int]) -> None:
    machine = hand(cache=cache, prefix_caching=False)
    machine.add(asks(1, 20, {2: 1, 8: 2}))
    machine.step()
    machine.step()
    machine.scheduler.hold_client(0)
    machine.scheduler.release_client(0, 9)
    machine.step()
    machine.step()
    assert machine.encoded == encoded
    assert machine.num_dropped == len(encoded) - cache // ROWS if cache == ROWS else machine.num_dropped == 0


def test_a_lost_executor_encodes_again() -> None:
    machine = hand()
    machine.add(asks(1, 20, {2: 1, 8: 2}))
    machine.step()
    machine.scheduler.lose_executor()
    machine.scheduler.restore_executor()
    machine.step()
    assert machine.encoded == [1, 1]


def test_without_chunked_prefill_all_images_of_a_prompt_are_encoded_at_once() -> None:
    machine = hand(budget=40, cache=40, enable_chunked_prefill=False, max_model_len=40)
    machine.add(asks(1, 30, {0: 1, 8: 2, 20: 3}))
    machine.add(asks(2, 38, {n * ROWS: n for n in range(4, 13 - 4)}))
    assert [machine.step(), machine.step()] == [{1: 30}, {2: 38}]


def test_plans_of_texts_are_encoded_as_before() -> None:
    machine = hand()
    machine.add(asks(1, 12, {}))
    plan = machine.schedule()
    assert encode_plan(plan) == encode_plan(msgspec.structs.replace(plan, scheduled_encoder_inputs=[]))
    freed = msgspec.structs.replace(plan, freed_encoder_inputs=[b"a"])
    assert encode_plan(plan) != encode_plan(freed)
    assert not machine.scheduler.cuts


def test_executors_learn_of_grids_and_decisions_do_not_depend_on_them() -> None:
    machine = hand()
    machine.add(asks(1, 12, {2: 1}))
    plan = machine.schedule()
    ((row, (use,)),) = plan.features
    in_grid = msgspec.structs.replace(use, num_columns=2)
    of_grid = msgspec.structs.replace(plan, features=[(row, [in_grid])])
    assert decode_plan(encode_plan(of_grid)).features == [(row, [in_grid])]
    assert encode_fields(decided_fields(of_grid)) == encode_fields(decided_fields(plan)) == encode_plan(plan)


# The gold model.


class GoldWithImages(GoldWithOptions):
    """Also: a chunk ends before the first image that the encoder's budget or its cache has no room for. Those that run
    come first."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config)
        self.images = dict[int, dict[int, int]]()  # by request and place
        self.cached = list[int]()  # least recently used first
        self.encoded = list[int]()  # in the last step
        self.reserved = list[int]()
        self.num_cut = 0

    def within(self, q: Entry, begin: int, end: int) -> list[int]:
        """The places of its images that these tokens need."""
        return [place for place in sorted(self.images[q.number]) if begin < end > place > begin - ROWS]

    def fit(self, q: Entry, begin: int, count: int) -> int:
        """The tokens that it gets, and reserve their images."""
        for place in self.within(q, begin, begin + count):
            image = self.images[q.number][place]
            some = {*self.reserved, image}
            num_new = sum(one not in self.cached for one in some)
            budget, size = self.c.max_num_encoder_input_tokens or 0, self.c.encoder_cache_size or 0
            if image not in self.reserved and (len(some) * ROWS > size or num_new * ROWS > budget):
                self.num_cut += 1
                return max(place - begin, 0)
            self.reserved += [image] * (image not in self.reserved)
        return count

    def schedule(self, now: int) -> None:
        self.reserved = []
        super().schedule(now)
        needed = list[int]()
        for r in self.running:
            begin = r.computed - r.n
            needed += [self.images[r.number][place] for place in self.within(r, begin, r.computed) if r.n]
        needed = list(dict.fromkeys(needed))
        self.encoded = [image for image in needed if image not in self.cached]
        kept = [image for image in needed if image in self.cached]
        self.cached = [image for image in self.cached if image not in needed] + kept + self.encoded
        self.cached = self.cached[-((self.c.encoder_cache_size or 0) // ROWS) :]

    def grow(self) -> None:
        super().grow()
        for r in self.running:
            count = self.fit(r, r.computed, r.n)
            self.skipped += 0 == count < r.n
            r.n = count

    def start(self, q: Entry, count: int, hits: list[Block], victims: list[Entry], givers: list[Entry]) -> str:
        reserved = [*self.reserved]
        fitting = self.fit(q, q.computed, count) if count == q.wanted() or not self.is_whole else count
        refusal = "" if fitting else "NO_ENCODER_BUDGET"
        if count < q.wanted() and not fitting:  # the number of prompts in chunks is looked at first
            others = [r for r in self.running if r not in victims + givers]
            num_partial = sum(r.wanted() - r.n > (r not in self.starts) for r in others)
            if num_partial >= (self.c.max_num_partial_prefills or self.c.max_num_seqs):
                refusal = "PARTIAL_PREFILLS"
        if not refusal:
            refusal = super().start(q, fitting, hits, victims, givers)
        if refusal:
            self.reserved = reserved
        return refusal

    def first(self) -> Entry | None:
        """As without images; and others may pass by one that waits for its image."""
        held = self.refused
        self.refused = {q: "NO_BLOCKS" if text == "NO_ENCODER_BUDGET" else text for q, text in held.items()}
        found, self.refused = super().first(), held
        return found


IMAGES: Options = {
    **ALL,
    "num_blocks": [30, 16, 60],
    "max_model_len": [40],
    "budget": [40, 9, 60],
    "max_num_encoder_input_tokens": [ROWS, 2 * ROWS, 3 * ROWS + 1],
    "encoder_cache_size": [ROWS, 2 * ROWS, 4 * ROWS, 40 * ROWS],
    "enable_chunked_prefill": [True],
    "kv_window": [0],
}


class ImagesMachine(GoldMachine):
    gold_class = GoldWithImages
    options = IMAGES
    num_encoded = num_cut = num_dropped = 0

    def hand_of(self, config: Any) -> ByHand:
        return Hand(config)

    def with_more(self, rng: random.Random, message: AddRequest) -> AddRequest:
        length = len(message.prompt_token_ids) // 4
        places, place = dict[int, int](), rng.randrange(4)
        while place + ROWS <= length and len(places) < 4:
            places[place] = rng.randrange(6)
            place += ROWS + rng.choice([0, 1, 5])
        places = places if rng.randrange(3) else {}
        self.gold.images[message.number] = places  # type: ignore[attr-defined]
        return with_images(message, places)

    def add_to_gold(self, entries: list[Entry]) -> bool:
        for entry in entries:
            for place, image in self.gold.images[entry.number].items():  # type: ignore[attr-defined]
                entry.tokens[place : place + ROWS] = [-1 - image] * ROWS
        return super().add_to_gold(entries)

    def step(self) -> None:
        before = len(self.hand.encoded)  # type: ignore[attr-defined]
        super().step()
        assert self.hand.encoded[before:] == self.gold.encoded  # type: ignore[attr-defined]

    def end(self) -> None:
        super().end()
        type(self).num_encoded += len(self.hand.encoded)  # type: ignore[attr-defined]
        type(self).num_dropped += self.hand.num_dropped  # type: ignore[attr-defined]
        type(self).num_cut += self.gold.num_cut  # type: ignore[attr-defined]


def test_decisions_equal_the_gold_models() -> None:
    run_share(ImagesMachine, 40)
    assert min(ImagesMachine.num_encoded, ImagesMachine.num_dropped, ImagesMachine.num_cut) > 30


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_decisions_equal_the_gold_models() -> None:
    """SCHEDULER_EXAMPLES=n runs that many."""
    run(ImagesMachine, new_seeds(1, 10_000))
