"""A step as one C call is the C kernels called one after the other: the same bits of logits - of all tokens or some,
asked for with the step or after it - and cache, for every kind of model, whatever the threads, as batches grow and
shrink."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kernels.cpu.decoder_parts
from core.model_files.settings.values import Values
from core.models.llama import Llama
from core.models.step import ONCE, ModelInputs, StepResult
from core.sampling.sampler import sample_greedily
from ipc.errors import ModelFileError
from ipc.tables.arrays import Ints
from kernels.cpu.decoder import DecoderResult
from kernels.cpu.library import load_cpu_library
from kernels.cpu.norm import CpuNorm
from kernels.cpu.rope import MAX_HEAD_DIM
from kernels.cpu.sampling import _TYPES
from kernels.elements import BFLOAT16, FLOAT32, Numbers
from tests.core.models.test_llama import Requests, prompts
from tests.core.runner.invariance import DTYPES, KINDS, random_model, tiny_model
from tests.core.runner.invariance_kinds import EVERY_KIND, is_one_call


class Watched:
    """A model that keeps logits and hidden states of all tokens of its steps; one_by_one: operation after operation."""

    def __init__(self, model: Llama, one_by_one: bool) -> None:
        self._model, self._one_by_one = model, one_by_one
        self.all_results: list[Numbers] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: ModelInputs) -> StepResult:
        rows = np.arange(len(inputs.token_ids))[::-1]
        states = None if inputs.requests is None else inputs.requests.states.copy()
        hidden = self._model.hidden_states(inputs) if self._one_by_one else None
        for wanted in (rows[: len(rows) // 50], rows[5::99], rows[::3], inputs.logits_rows):
            result: StepResult
            if hidden is not None:
                result = self._model.result(hidden, wanted)
                assert result.largest is None
            else:
                if inputs.requests is not None and states is not None:
                    inputs.requests.states[:] = states  # the same tokens again
                result = self._model.forward(inputs._replace(logits_rows=wanted))
                assert result.largest is not None
                assert result.largest.tolist() == result.logits.argmax(-1).tolist()
            logits = result.logits
            before = logits.copy()
            assert self._model.sampler.largest(logits).tolist() == logits.argmax(-1).tolist()
            self.all_results += [before, *(result.logits_of(part) for part in np.split(rows, range(45, len(rows), 45)))]
            self.all_results += [
                result.hidden_of(part) for part in (rows[:0], *np.split(rows, range(50, len(rows), 50)))
            ]
            assert np.array_equal(logits, before)  # they are the caller's
        return result


#: Requests -> tokens of each step: mixed chunks, decoding alone, more rows than before, fewer again.
STEPS = [{0: 1}, {0: 100, 1: 37}, {0: 1, 1: 1}, {2: 600, 1: 1}, {2: 1}, {0: 9, 1: 9, 2: 1}]
#: The same with fewer rows, yet more than a tile of keys has: for kinds that differ in other things than their number.
FEWER = [*STEPS[:3], {2: 160, 1: 1}, *STEPS[4:]]


def run(model: Llama, one_by_one: bool, steps: list[dict[int, int]] = STEPS) -> list[Numbers]:
    watched = Watched(model, one_by_one)
    requests = Requests(watched, prompts(111, 49, 603))
    logits = [part.numpy() for step in steps for part in requests.step(step).values()]
    states = [] if requests.states is None else [requests.states]
    return [*watched.all_results, *logits, *requests.cache.layers, *states]


def same_bits(left: Numbers, right: Numbers) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


@pytest.mark.parametrize(("dtype", "kind"), [case for case in EVERY_KIND if is_one_call(case)])
def test_one_call_gives_the_bits_of_many(dtype: str, kind: str) -> None:
    model, library = tiny_model(DTYPES[dtype], kind=kind), load_cpu_library()
    steps = STEPS if kind == "plain" else FEWER
    expected = run(model, True, steps)
    try:
        for num_threads in (1, 2):
            library.start_threads(num_threads)
            got = run(model, False, steps)
            different = [i for i, pair in enumerate(zip(got, expected, strict=True)) if not same_bits(*pair)]
            assert different == [], f"{num_threads} threads"
    finally:
        library.stop_threads()


class Tapped:
    """A model whose taps are compared in each step with the output of so many layers, operation after operation."""

    places = (2, 3, 1, 2)

    def __init__(self, model: Llama) -> None:
        self._model, self.num_compared = model, 0
        model.tap(self.places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: ModelInputs) -> StepResult:
        rows, expected = np.arange(len(inputs.token_ids))[::-1], []
        for place in self.places:
            first = copy.copy(self._model)
            first.layers = self._model.layers[:place]
            expected.append(first.hidden_states(inputs))
        result = self._model.forward(inputs)
        assert isinstance(result, DecoderResult)
        for part in (inputs.logits_rows, rows[:1], rows[::3], rows):
            states = result.states_of(part)
            assert same_bits(states, np.stack([one[part] for one in expected], 1))
            self.num_compared += len(part)
        result.logits_of(rows[:1])
        assert same_bits(
            result.states_of(inputs.logits_rows), np.stack([one[inputs.logits_rows] for one in expected], 1)
        )
        return result


@pytest.mark.parametrize("kind", ["plain", "local and global", "shared keys and values"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_taps_have_the_bits_of_the_residual_stream(dtype: str, kind: str) -> None:
    model, library = random_model(KINDS[kind], DTYPES[dtype]), load_cpu_library()
    watched = Tapped(model)
    plain = Requests(tiny_model(DTYPES[dtype], kind=kind), prompts(111, 49, 603))
    expected = [part.numpy() for step in STEPS for part in plain.step(step).values()]
    try:
        for num_threads in (1, 2):
            library.start_threads(num_threads)
            requests = Requests(watched, prompts(111, 49, 603))
            got = [part.numpy() for step in STEPS for part in requests.step(step).values()]
    finally:
        library.stop_threads()
    assert all(map(same_bits, got, expected))
    assert watched.num_compared > 2000


@pytest.mark.parametrize(("reported", "streams"), [("1K", True), ("1048576K", False), ("some", False), (None, False)])
def test_weights_that_no_cache_keeps_are_compact_and_read_past_the_caches_and_give_the_same_bits(
    reported: str | None, streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of unknown size count as larger than a tiny model."""
    if reported is not None:
        (tmp_path / "index3").mkdir()
        (tmp_path / "index3" / "size").write_text(f"{reported}\n")
    monkeypatch.setattr(kernels.cpu.decoder_parts, "_CACHES", tmp_path)
    model = random_model(KINDS["plain"], BFLOAT16)
    assert model.decoder is not None
    assert model.decoder._decoder.head.packing == (streams and model.variant != "portable")
    matrices = [model.decoder._decoder.head, model.decoder._layers[0].qkv, model.decoder._layers[-1].down]
    assert [bool(matrix.streams) for matrix in matrices] == [streams] * 3
    expected = run(tiny_model(BFLOAT16), one_by_one=True)  # whose weights are kept
    for one_by_one in (False, True):
        assert all(map(same_bits, run(model, one_by_one), expected))


def test_the_largest_logit_that_a_step_finds_is_the_samplers() -> None:
    """The case without a largest logit is included, and a draw from known largest logits equals a full draw."""
    model = random_model(KINDS["plain"], BFLOAT16)
    assert isinstance(model._norm, CpuNorm)
    requests = Requests(model, prompts(5, 3))
    columns = tuple(np.array([value] * 2, to) for value, to in zip((1.0, 5, 0.9, 0.0, 7, 0, 0), _TYPES, strict=True))
    columns[0][1] = 0.0
    sampler, found, drawn = model.sampler, [], []
    assert sampler is not None
    for poison in (1.0, np.nan, np.inf):
        model._norm.weight[0] *= poison
        logits = np.concatenate(list(requests.step({0: 1, 1: 1}).values()))
        largest = requests.result.largest
        assert largest is not None
        found.append((largest.tolist(), sample_greedily(logits).tolist()))
        drawn.append([sampler(logits, columns, known).tolist() for known in (largest, None)])
    assert all(one == other for one, other in [*found, *drawn])
    assert [min(one) < 0 for one, _ in found] == [False, True, True]


def test_tokens_without_logits_are_stored_and_have_them_later() -> None:
    model = tiny_model(FLOAT32)
    ids, positions, slots = np.arange(5), np.arange(5), np.arange(16, 21)
    caches = [model.allocate_cache(2, 16) for _ in range(2)]
    for cache in caches:
        cache.layers[-1].fill(0)
    lengths = np.array([5])
    metadata = model.attention_metadata(lengths, lengths, np.array([[1]]), caches[0])
    inputs = ModelInputs(ids, positions, slots, metadata, caches[0], np.arange(0))
    result = model.forward(inputs)
    assert result.logits.shape == (0, model.vocab_size)
    expected = model.result(model.hidden_states(inputs._replace(cache=caches[1])), np.arange(5))
    assert np.array_equal(result.logits_of(np.arange(5)), expected.logits)
    assert np.array_equal(result.hidden_of(np.arange(5)), expected.hidden_of(np.arange(5)))
    assert np.array_equal(caches[0].layers[-1], caches[1].layers[-1])
    assert caches[0].layers[-1].any()


def test_a_result_is_good_until_the_next_step() -> None:
    model = tiny_model(FLOAT32)
    requests = Requests(model, prompts(5))
    requests.step({0: 3})
    old = requests.result
    requests.step({0: 1})
    assert requests.result.hidden_of(np.arange(1)).any()
    for ask in (old.logits_of, old.hidden_of):
        with pytest.raises(AssertionError, match=r"a result of step \d+ is requested after step"):
            ask(np.arange(1))


def test_inputs_of_one_generation_are_the_same_arrays_with_other_numbers() -> None:
    """A model keeps its pointers then: what is written into the arrays counts, and other arrays are not looked at."""
    model = tiny_model(FLOAT32)
    cache = model.allocate_cache(2, 16)
    counts, lengths, tables = np.array([1]), np.array([1]), np.array([[1]], np.int32)
    ids, positions, slots, rows = np.array([7]), np.array([0]), np.array([16]), np.arange(1)

    def step(generation: int, token_ids: Ints, context_lens: Ints) -> Numbers:
        attention = model.attention_metadata(counts, context_lens, tables, cache, generation)
        inputs = ModelInputs(token_ids, positions, slots, attention, cache, rows, generation)
        return model.forward(inputs).logits.copy()

    made = [step(ONCE, ids, lengths)]
    moved = [step(10**9, ids, lengths)]
    for column in (ids, positions, slots, lengths):
        column += 1
    moved.append(step(10**9, np.array([3]), np.array([9])))  # neither of which is looked at
    made.append(step(ONCE, ids.copy(), lengths.copy()))
    assert all(map(same_bits, moved, made))
    assert not same_bits(*made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_heads_that_a_model_file_may_ask_for_have_room(dtype: str) -> None:
    """Heads are rotated in arrays of a fixed size, which bounds what a model file may ask for."""
    with pytest.raises(ModelFileError, match=f"to {MAX_HEAD_DIM}"):
        Values({"head_dim": MAX_HEAD_DIM + 2}, "config.json").integer("head_dim")
    config = msgspec.structs.replace(
        KINDS["head norms"], head_dim=MAX_HEAD_DIM, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1
    )
    model = random_model(config, DTYPES[dtype])

    def outputs(one_by_one: bool) -> list[Numbers]:
        requests = Requests(Watched(model, one_by_one), prompts(5, 3))
        return [part.numpy() for step in ({0: 4, 1: 3}, {0: 1}) for part in requests.step(step).values()]

    got, expected = outputs(False), outputs(True)
    assert all(same_bits(*pair) for pair in zip(got, expected, strict=True))
    assert all(np.isfinite(part).all() for part in got)
