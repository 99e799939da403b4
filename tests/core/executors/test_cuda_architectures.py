"""The parts of all architectures on a GPU: logits near those of the C kernels, step by step.

In CI the kernels run under Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from core.executors.cuda import CudaExecutor
from core.models.config import (
    ExpertParts,
    HeadSizes,
    LatentParts,
    ModelConfig,
    PerLayerParts,
    RecurrentParts,
    StreamParts,
)
from core.models.layers.rope_scaling import LongropeScaling, YarnScaling
from core.models.llama import Llama
from core.models.operations.triton_operations import TritonOperations
from core.models.step import ModelInputs, StepResult
from core.process.resolve import resolve
from ipc.options.config import EngineConfig
from kernels.cpu.library import load_cpu_library
from kernels.cpu.quantized_kv_cache import QuantizedKVCache
from kernels.elements import BFLOAT16, FLOAT32, Dtype, to_floats
from kernels.memory.kv_cache import Scales
from kernels.recurrence import RecurrenceKind
from kernels.triton.kv_cache import Fp8KVCache, Int8KVCache
from tests.core.models.checkpoints import build
from tests.core.models.test_llama import Requests, prompts, random_weights, tiny_config
from tests.triton_device import ANYWHERE, DEVICE, GPU_ONLY

pytestmark = ANYWHERE

VOCAB = 64
_SLIDING = {"sliding_window": 20, "sliding_layers": (0,)}


_LATENT = LatentParts(query_dim=None, latent_dim=64, plain_dim=20, rotated_dim=8, value_dim=32)
_ONE_VECTOR: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 72, "query_pre_attn_scalar": 28.0}


def _recurrent(kind: RecurrenceKind) -> RecurrentParts:
    """The first layer of a tiny model has a recurrent state."""
    if kind == "short convolution":
        return RecurrentParts(kind=kind, layers=(0,), taps=3, channels=48)
    heads: dict[str, Any] = {"taps": 4, "num_heads": 4, "num_groups": 2, "key_dim": 8, "value_dim": 20}
    return RecurrentParts(kind=kind, layers=(0,), channels=2 * 2 * 8 + 4 * 20, has_bias=True, **heads)


#: Gemma 4's layers: two sizes of heads, V that is normalised, a scale at the end.
_OWN_LAYERS: dict[str, Any] = {**_SLIDING, "full_heads": HeadSizes(1, 20), "value_norm": True, "layer_scales": True}
_OWN_LAYERS |= {"qk_norm": True, "post_norms": True, "query_pre_attn_scalar": 1.0, "hidden_act": "gelu_pytorch_tanh"}


#: The fields of a model that has the parts of an architecture, of which a tiny Llama is the rest.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "qkv_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
    "gemma3": {
        **_SLIDING,
        "hidden_act": "gelu_pytorch_tanh",
        "post_norms": True,
        "norm_offset": 1.0,
        "scale_embeddings": True,
        "sliding_rope_theta": 1e3,
        "num_key_value_heads": 1,
    },
    "gemma2": {**_SLIDING, "post_norms": True, "scores_cap": 0.5, "logits_cap": 2.0, "query_pre_attn_scalar": 2.0},
    "gpt-oss": {**_SLIDING, "attention_sinks": True, "qkv_bias": True, "output_bias": True},
    "olmo2": {"qk_norm": True, "qk_norm_of_rows": True, "pre_norms": False, "post_norms": True},
    "hunyuan": {"qk_norm": True, "qk_norm_after": True},
    "ministral3": {"query_growth": 0.5, "rope_scaling": YarnScaling(4.0, 9, 1.2, 32.0, 1.0, True)},
    "minicpm": {
        "rope_scaling": LongropeScaling((1.0,) * 6, (1.5,) * 6, 64, 1.1),
        "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "logits_multiplier": 0.5,
    },
    "starcoder2": {
        "centred_norms": True,
        "norm_bias": True,
        "is_gated": False,
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_bias": True,
    },
    "neox": {
        "centred_norms": True,
        "norm_bias": True,
        "residual": "parallel",
        "is_gated": False,
        "hidden_act": "gelu",
        "rotary_dim": 6,
    },
    "cohere": {
        "centred_norms": True,
        "residual": "parallel with one norm",
        "qk_norm": True,
        "qk_norm_by_head": True,
        "unrotated_layers": (1,),
    },
    "opt": {
        "position_table": True,
        "centred_norms": True,
        "norm_bias": True,
        "is_gated": False,
        "hidden_act": "gelu",
        "unrotated_layers": (0, 1),
    },
    "apertus": {"is_gated": False, "hidden_act": "xielu", "qk_norm": True},
    "gated heads": {"head_gates": True, "num_key_value_heads": 2},
    "nemotron": {"is_gated": False, "hidden_act": "relu2", "centred_norms": True, "norm_bias": True},
    "qwen3-next": {"output_gate": True, "qk_norm": True},
    "mixtral": {"experts": ExpertParts(num_experts=5, num_chosen=2, intermediate_size=40, normalises=True)},
    "qwen2-moe": {
        "experts": ExpertParts(
            num_experts=7, num_chosen=3, intermediate_size=36, normalises=False, shared_size=52, has_shared_gate=True
        )
    },
    "glm4-moe": {
        "experts": ExpertParts(
            num_experts=8,
            num_chosen=3,
            intermediate_size=24,
            normalises=True,
            dense_layers=(0,),
            shared_size=48,
            is_sigmoid=True,
            num_groups=4,
            num_chosen_groups=2,
            best_of_group=2,
            scaling=1.7,
            has_correction=True,
        )
    },
    "lfm2": {"recurrent": _recurrent("short convolution"), "qk_norm": True},
    "qwen3.5": {"recurrent": _recurrent("gated delta"), "output_gate": True, "qk_norm": True},
    "nemotron-h": {"recurrent": _recurrent("state space"), "is_gated": False, "hidden_act": "relu2"},
    "deepseek-v2-lite": {"latent": _LATENT, **_ONE_VECTOR},
    "deepseek-v2": {
        "latent": msgspec.structs.replace(_LATENT, query_dim=36),
        "num_attention_heads": 20,  # more than a program of attention has
        "rope_scaling": YarnScaling(4.0, 64.0, 1.0),
        **_ONE_VECTOR,
    },
    "gemma4-e2b": {
        **_OWN_LAYERS,
        "num_hidden_layers": 4,
        "sliding_layers": (0, 2),
        "num_shared_layers": 2,
        "wide_mlps": True,
        "per_layer": PerLayerParts(width=10, vocab_size=70),
    },
    "gemma3n": {
        **_OWN_LAYERS,
        "num_hidden_layers": 3,
        "sliding_layers": (0, 2),
        "full_heads": None,
        "layer_scales": False,
        "num_shared_layers": 1,
        "logits_cap": 2.0,
        "per_layer": PerLayerParts(width=10, vocab_size=50),
        "streams": StreamParts(count=3, active=1, scales_active=True, rank=10),
        "sparse_gates": (1.2, None, 0.1),
    },
    "gemma4-26b-a4b": {
        **_OWN_LAYERS,
        "full_keys_are_values": True,
        "experts": ExpertParts(
            num_experts=5, num_chosen=2, intermediate_size=40, normalises=True, has_scales=True, beside_dense=True
        ),
    },
    "llama4": {
        "qk_norm": True,
        "qk_norm_after": True,
        "qk_norm_plain": True,
        "unrotated_layers": (1,),
        "experts": ExpertParts(
            num_experts=5, num_chosen=2, intermediate_size=40, normalises=False, is_sigmoid=True, scales_inputs=True
        ),
    },
    "gpt-oss experts": {
        "hidden_act": "clamped_silu",
        "experts": ExpertParts(num_experts=4, num_chosen=2, intermediate_size=40, normalises=True, has_biases=True),
    },
}

#: Shape, field and the value of a model without the part: its logits are others, else the comparison would not see it.
PARTS: list[tuple[str, str, Any]] = [
    ("gemma2", "scores_cap", None),
    ("gpt-oss", "attention_sinks", False),
    ("olmo2", "qk_norm", False),
    ("olmo2", "pre_norms", True),
    ("hunyuan", "qk_norm_after", False),
    ("ministral3", "query_growth", None),
    ("minicpm", "residual_multiplier", 1.0),
    ("neox", "residual", "in turn"),
    ("cohere", "centred_norms", False),
    ("cohere", "residual", "in turn"),
    ("nemotron", "hidden_act", "gelu"),
    ("opt", "position_table", False),
    ("gated heads", "head_gates", False),
    ("qwen3-next", "output_gate", False),
    ("gemma4-e2b", "value_norm", False),
    ("gemma4-e2b", "layer_scales", False),
    ("gemma4-e2b", "per_layer", None),
    ("gemma3n", "sparse_gates", ()),
    ("gemma3n", "streams", StreamParts(count=3, active=0, scales_active=True, rank=10)),
    ("gemma3n", "streams", StreamParts(count=3, active=1, scales_active=False, rank=10)),
    ("gemma4-26b-a4b", "full_keys_are_values", False),
]


def shape_config(kind: str) -> ModelConfig:
    config = tiny_config(**{"vocab_size": VOCAB, "num_hidden_layers": 2, **SHAPES[kind]})
    assert isinstance(config, ModelConfig)
    return config


def built(config: ModelConfig, weights: dict[str, Any], dtype: Dtype, operations: Any = None) -> Llama:
    library = load_cpu_library() if operations is None else None
    return Llama(config, weights.items(), dtype, library=library, operations=operations)


class OnDevice:
    """A model whose inputs come from the host."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.attention_metadata, self.allocate_cache = model.attention_metadata, model.allocate_cache

    def allocate_states(self, num_rows: int) -> torch.Tensor | None:
        size = self._model.config.state_size
        return torch.empty(num_rows, size, device=DEVICE) if size else None

    def forward(self, inputs: ModelInputs) -> StepResult:
        names = ("token_ids", "positions", "slots", "logits_rows")
        moved = {name: torch.from_numpy(getattr(inputs, name)).to(DEVICE) for name in names}
        return self._model.forward(inputs._replace(**moved))


def logits(model: Any, longest: int = 23) -> torch.Tensor:
    """Return those of some steps: a prompt beside the beginning of another one, single tokens, both.

    longest: tokens of a prompt in the first step, more than the window of the shapes that have one.
    """
    requests = Requests(model, prompts(5, longest + 7, vocab_size=VOCAB))
    steps = [requests.step(counts) for counts in ({0: 2, 1: longest}, {1: 1, 0: 1}, {0: 2, 1: 1})]
    return torch.cat([logits for step in steps for logits in step.values()])


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_are_near_those_of_the_c_kernels(kind: str) -> None:
    config = shape_config(kind)
    weights = dict(random_weights(config, FLOAT32))
    ours = built(config, weights, FLOAT32, TritonOperations(config, FLOAT32, DEVICE))
    longest = 33 if kind == "llama" else 23  # beyond a tile of 32 rows: not a matter of a model's parts
    expected = logits(built(config, weights, FLOAT32), longest)
    torch.testing.assert_close(logits(OnDevice(ours), longest), expected, rtol=1e-4, atol=1e-4)


def test_scales_of_a_cache_are_those_of_its_layers() -> None:
    """Without them the numbers of the second layer, a thousandth of others', are nearly all 0."""
    config = shape_config("llama")
    weights = dict(random_weights(config, FLOAT32))
    for name, weight in weights.items():
        if "layers.1.self_attn.v_proj" in name:
            weights[name] = weight / 1024
        if "layers.1.self_attn.o_proj" in name:
            weights[name] = weight * 1024
    found, variants = [], set[str]()
    for scales in ((), (Scales(1.0, 1.0), Scales(1.0, 2.0**-10))):
        ours = TritonOperations(config, FLOAT32, DEVICE, cache_type=Fp8KVCache, kv_scales=scales)
        found.append(logits(OnDevice(built(config, weights, FLOAT32, ours))))
        variants.add(ours.variant.partition(" kv=")[2])
    assert len(variants) == 2
    assert "fp8" in variants
    errors = [(each - logits(built(config, weights, FLOAT32))).abs().max() for each in found]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("kind", ["gemma2", "deepseek-v2-lite"])
def test_a_cache_in_8_bits_is_that_of_the_c_kernels(kind: str) -> None:
    """Equal rows have equal codes; a row that differs in its last bit may have others."""
    config = shape_config(kind)
    weights = dict(random_weights(config, FLOAT32))
    ours = TritonOperations(config, FLOAT32, DEVICE, cache_type=Int8KVCache)
    theirs = Llama(config, weights.items(), FLOAT32, library=load_cpu_library(), cache_type=QuantizedKVCache)
    found = logits(OnDevice(built(config, weights, FLOAT32, ours)))
    torch.testing.assert_close(found, logits(theirs), rtol=0, atol=2e-3)
    assert (found - logits(built(config, weights, FLOAT32))).abs().max() > 4e-3


@pytest.mark.parametrize(("kind", "field", "value"), PARTS)
def test_each_part_makes_other_logits(kind: str, field: str, value: Any) -> None:
    config = shape_config(kind)
    without = msgspec.structs.replace(config, **{field: value})
    weights = dict(random_weights(without, FLOAT32)) | dict(random_weights(config, FLOAT32))
    assert (logits(built(config, weights, FLOAT32)) - logits(built(without, weights, FLOAT32))).abs().max() > 0.01


def test_the_longest_context_settles_longrope() -> None:
    """The other test's models have the long divisors."""
    config = shape_config("minicpm")
    weights = dict(random_weights(config, FLOAT32))
    ours = built(config, weights, FLOAT32, TritonOperations(config, FLOAT32, DEVICE))
    long, short = (built(config, weights, FLOAT32) for _ in range(2))
    for model in (ours, short):
        model.settle_length(64)
        assert "longrope=short" in model.variant
    expected = logits(short)
    assert (expected - logits(long)).abs().max() > 0.01
    torch.testing.assert_close(logits(OnDevice(ours)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_executor_settles_longrope(tmp_path: Path) -> None:
    """The fingerprint tells contexts with short factors from those with long ones."""
    build("phi4-mini").save_pretrained(tmp_path)
    options: dict[str, Any] = {"device": "cuda", "num_blocks_override": 9, "max_num_seqs": 1, "max_model_len": 4}
    config, fingerprints = EngineConfig(model=str(tmp_path), **options), set()
    for length in (4, 5):
        executor = CudaExecutor(msgspec.structs.replace(config, max_model_len=None))
        blocks = executor.determine_num_available_blocks
        resolved = resolve(config, executor.info, blocks, total_memory_bytes=1 << 30, num_cpus=1)
        executor.initialize_cache(msgspec.structs.replace(resolved, max_model_len=length))
        fingerprints |= {executor.info.fingerprint}
        assert f"longrope={'short' if length == 4 else 'long'}" in executor.runner.model.variant
    assert len(fingerprints) == 2


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=GPU_ONLY) for kind in SHAPES])
def test_logits_in_bfloat16(kind: str) -> None:
    """Their error against float32 is at most three times the C kernels'."""
    config = shape_config(kind)
    weights = dict(random_weights(config, BFLOAT16))
    exact = logits(built(config, {name: to_floats(one) for name, one in weights.items()}, FLOAT32))
    theirs = (logits(built(config, weights, BFLOAT16)) - exact).square().mean().sqrt()
    ours = built(config, weights, BFLOAT16, TritonOperations(config, BFLOAT16, DEVICE))
    assert (logits(OnDevice(ours)) - exact).square().mean().sqrt() < 3 * theirs
