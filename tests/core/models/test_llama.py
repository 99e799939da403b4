"""The Llama model: as exact as transformers in float32; a logit's bits are a function of the request's own tokens."""

import os

import numpy as np
import pytest
import torch

from core.model_files.model_config import ModelConfig
from core.model_files.tensors.weight_shapes import expected_shapes
from core.models.llama import Llama
from core.models.step import ModelInputs
from ipc.errors import ModelFileError
from ipc.tables.rounding import ceil_div
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32, rounded
from kernels.recurrence import StateRows
from kernels.torch.tensors import to_tensor
from tests.core.models.float_errors import check_errors
from tests.numbers import fill_with_nan

BLOCK_SIZE = 16
DTYPES = [FLOAT32, BFLOAT16]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of several test processes at once wait for each other at every barrier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_config(**changes):
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 320,
        "hidden_size": 72,
        "intermediate_size": 136,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_ids": (2,),
        "dtype": "float32",
    }
    return ModelConfig(**{**values, **changes})


def random_weights(config, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, shape in expected_shapes(config).items():
        numbers = torch.randn(shape, generator=generator)
        numbers = 1 + 0.1 * numbers if len(shape) == 1 else numbers * shape[-1] ** -0.5
        yield name, rounded(numbers.numpy(), dtype)


class Requests:
    """Runs prompts over one cache; unwritten slots are NaN."""

    def __init__(self, model, prompts, seed=0):
        self.model, self.prompts, self.done = model, prompts, [0] * len(prompts)
        num_blocks = [ceil_div(len(prompt), BLOCK_SIZE) for prompt in prompts]
        self.cache = model.allocate_cache(sum(num_blocks) + 1, BLOCK_SIZE)
        fill_with_nan(self.cache)
        blocks = iter((np.random.default_rng(seed).permutation(sum(num_blocks)) + 1).tolist())
        self.states = model.allocate_states(len(prompts)) if hasattr(model, "allocate_states") else None
        if self.states is not None:
            self.states[:] = 0
        self.tables = np.zeros((len(prompts), max(num_blocks)), np.int32)
        for index, count in enumerate(num_blocks):
            self.tables[index, :count] = [next(blocks) for _ in range(count)]

    def step(self, counts):
        """counts: {request: tokens}; {request: logits of these tokens}."""
        which, num_tokens = np.array(list(counts)), np.array(list(counts.values()))
        starts = np.array([self.done[index] for index in which])
        ids = [self.prompts[i][s : s + n] for i, s, n in zip(which, starts, num_tokens, strict=True)]
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, num_tokens, strict=True)])
        blocks = self.tables[np.repeat(which, num_tokens), positions // BLOCK_SIZE].astype(np.int64)
        metadata = self.model.attention_metadata(num_tokens, starts + num_tokens, self.tables[which], self.cache)
        inputs = ModelInputs(
            token_ids=np.concatenate(ids),
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            attention=metadata,
            cache=self.cache,
            logits_rows=np.arange(len(positions)),
            requests=None if self.states is None else StateRows(self.states, which, np.cumsum([0, *num_tokens])),
        )
        self.result = self.model.forward(inputs)  # of the last step
        for index, count in counts.items():
            self.done[index] += count
        return dict(zip(counts, torch.from_numpy(self.result.logits.copy()).split(num_tokens.tolist()), strict=True))


def prompts(*lengths, vocab_size=320):
    return [np.random.default_rng(index).integers(0, vocab_size, length) for index, length in enumerate(lengths)]


def transformers_logits(config, weights, ids, dtype):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            attn_implementation="eager",
        )
    ).to(dtype)
    model.load_state_dict(
        {name: to_tensor(numbers).to(dtype) for name, numbers in weights.items()},
        strict=not model.config.tie_word_embeddings,
    )
    model.tie_weights()
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(ids)[None]).logits[0]


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "c"])
def test_error_is_at_most_twice_that_of_transformers(tied, kernels):
    config = tiny_config(tie_word_embeddings=tied)
    weights = dict(random_weights(config, FLOAT32))
    (ids,) = prompts(200)
    exact = transformers_logits(config, weights, ids, torch.float64)
    theirs = transformers_logits(config, weights, ids, torch.float32)
    library = load_cpu_library() if kernels == "c" else None
    requests = Requests(Llama(config, weights.items(), FLOAT32, library=library), [ids])
    ours = torch.cat([requests.step({0: count})[0] for count in (150, 1, 1, 48)])
    assert ours.dtype == torch.float32
    check_errors((ours - exact).abs(), (theirs - exact).abs())


def logits_in_every_way(config, dtype):
    """Logits of request 0, computed in ways that must not matter."""
    lengths, library = (170, 40, 90), load_cpu_library()
    for num_threads in (1, 2):
        library.start_threads(num_threads)
        model = Llama(config, random_weights(config, dtype), dtype, library=library)
        yield Requests(model, prompts(*lengths)).step({0: 170})[0]
        for seed, chunks in enumerate(([64, 64, 42], [1, 2, 130, 20, *[1] * 17], [129, 1, 1, 39])[: 4 - num_threads]):
            requests = Requests(model, prompts(*lengths), seed)
            outputs = []
            for number, chunk in enumerate(chunks):
                counts = {1: 9, 0: chunk, 2: 30} if number < 3 else {0: chunk}
                outputs.append(requests.step(counts)[0])
            yield torch.cat(outputs)
    library.stop_threads()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 12), (14, 2, 16), (8, 8, 16)], ids=str)
def test_logits_depend_on_own_tokens_only(heads, dtype):
    config = tiny_config(num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=heads[2])
    first, *others = logits_in_every_way(config, dtype)
    assert first.isfinite().all()
    for other in others:
        assert torch.equal(first, other)


def test_recomputation_and_prefix_hits_give_the_same_bits():
    """Preempted: the same tokens again in other blocks. Prefix hit: another request's blocks of equal tokens."""
    model = Llama(tiny_config(), random_weights(tiny_config(), BFLOAT16), BFLOAT16, library=load_cpu_library())
    (ids,) = prompts(100)
    requests = Requests(model, [ids, ids, ids])
    whole = requests.step({0: 100})[0]
    assert torch.equal(requests.step({1: 100})[1], whole)
    requests.tables[2, :4] = requests.tables[0, :4]
    requests.done[2] = 64
    assert torch.equal(requests.step({2: 36})[2], whole[64:])


@pytest.mark.parametrize("kernels", ["torch", "c"])
def test_only_the_asked_rows_are_computed_and_skipped_slots_not_stored(kernels):
    config = tiny_config()
    library = load_cpu_library() if kernels == "c" else None
    model = Llama(config, random_weights(config, FLOAT32), FLOAT32, library=library)
    requests = Requests(model, prompts(20))
    ids, positions = requests.prompts[0], np.arange(20)
    slots = np.repeat(requests.tables[0].astype(np.int64) * BLOCK_SIZE, BLOCK_SIZE)[:20]
    slots += positions % BLOCK_SIZE
    slots[19] = -1
    metadata = model.attention_metadata(np.array([20]), np.array([20]), requests.tables, requests.cache)
    inputs = ModelInputs(ids, positions, slots, metadata, requests.cache, np.array([17, 3]))
    logits = torch.from_numpy(model.forward(inputs).logits)
    assert logits.shape == (2, 320)
    assert torch.allclose(logits, Requests(model, prompts(20)).step({0: 20})[0][[17, 3]], atol=1e-5)
    keys = torch.as_tensor(requests.cache.keys(2))  # of either kind of cache
    written = keys.isfinite().all(-1).all(-1)  # [num_blocks, block_size]
    assert int(written[1:].sum()) == 19
    assert (requests.cache.layers[2][0] == 0).all()


def test_missing_weights_are_named():
    config = tiny_config()
    weights = dict(random_weights(config, FLOAT32))
    del weights["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"lacks these tensors: model\.layers\.2\.mlp\.up_proj\.weight$"):
        Llama(config, weights.items(), FLOAT32)


def test_variant_and_numerics():
    """Level L2 is the C kernels' promise; torch's operations are L0, whatever is asked for."""
    config, library = tiny_config(), load_cpu_library()

    def made(seed=0, **options):
        return Llama(config, random_weights(config, FLOAT32, seed), FLOAT32, **options)

    exact, again = made(library=library), made(1, library=library)
    asked, without = made(library=library, numerics="L0"), made(library=None)
    assert (exact.numerics, asked.numerics, without.numerics) == ("L2", "L0", "L0")
    assert exact.variant == again.variant != asked.variant == without.variant
    assert without.bytes_per_block(BLOCK_SIZE) == 3 * 2 * BLOCK_SIZE * 2 * 12 * 4
