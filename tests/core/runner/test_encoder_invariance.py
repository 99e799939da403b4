"""An encoder's hidden states are functions of their prompt alone, bit for bit: alone and among others, with
every variant of the C kernels that this CPU runs, on one thread and on two.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from core.models.config import EncoderParts, HeadSizes, ModelConfig, PerLayerParts
from core.models.encoder import Encoder
from core.models.llama import Llama
from kernels.cpu.build import usable_variants
from kernels.cpu.library import CpuLibrary, load_cpu_library
from tests.core.models.test_encoders import hidden
from tests.core.runner.invariance import DTYPES, random_weights
from tests.in_turn import in_turn

SIZES = {
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_ids": (),
    "dtype": "float32",
    "has_head": False,
}
MODERN = EncoderParts(norms_follow=False, has_biases=False, is_gated=True, has_fused_qkv=True)
CONFIGS = {
    "bert": ModelConfig(architecture="BertModel", encoder=EncoderParts(num_positions=2048, num_kinds=2), **SIZES),
    "modern": ModelConfig(
        architecture="ModernBertModel", encoder=MODERN, sliding_window=33, sliding_layers=(1,), **SIZES
    ),
    "two sizes of heads, and inputs of single layers": ModelConfig(
        architecture="EmbeddingGemma2TextModel",
        sees_all=True,
        sliding_window=34,
        sliding_layers=(0, 2),
        sliding_rope_theta=1000.0,
        full_heads=HeadSizes(1, 40),
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scales=True,
        query_pre_attn_scalar=1.0,
        hidden_act="gelu_pytorch_tanh",
        per_layer=PerLayerParts(width=24, vocab_size=0),
        embedding_size=40,
        **SIZES | {"num_hidden_layers": 4},
    ),
}
RNG = np.random.Generator(np.random.PCG64(4))
#: One is longer than a tile of the context, so that its attention is cut.
PROMPTS = [RNG.integers(0, 500, length).tolist() for length in (40, 1, 600, 17, 64, 3)]


@pytest.fixture(params=usable_variants())
def library(request: pytest.FixtureRequest) -> Iterator[CpuLibrary]:
    library = load_cpu_library(request.param)
    yield library
    library.stop_threads()


@pytest.mark.parametrize(
    ("kind", "library", "dtype"), in_turn(CONFIGS, usable_variants(), DTYPES), indirect=["library"]
)
def test_hidden_states_in_any_company_are_those_alone(kind: str, dtype: str, library: CpuLibrary) -> None:
    weights = random_weights(CONFIGS[kind], DTYPES[dtype])
    build = Llama if CONFIGS[kind].encoder is None else Encoder
    model = build(CONFIGS[kind], weights.items(), DTYPES[dtype], library=library)
    alone = [hidden(model, [ids])[0] for ids in PROMPTS]
    assert all(np.isfinite(one).all() for one in alone)
    library.start_threads(2)
    for order in ((0, 1, 2, 3, 4, 5), (5, 2, 4, 0), (3, 3, 0, 2)):
        for index, found in zip(order, hidden(model, [PROMPTS[index] for index in order]), strict=True):
            assert found.tobytes() == alone[index].tobytes(), (order, index)
