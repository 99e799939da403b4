"""ModelConfig: all that the forward pass, the weights' names and the KV cache must know of a model. Data, no behaviour.

What one architecture has and another has not is a field here, decided once when the model's files are read
(core/model_files/config_json.py, core/model_files/config_gguf.py), so that nothing later asks for an architecture's
name.
"""

from typing import Literal

import msgspec

from core.models.rope_scaling import RopeScaling

Activation = Literal["silu", "gelu_pytorch_tanh"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of one model; names are transformers'."""

    architecture: str  # a name of core.models.architectures
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    dtype: str  # torch's name of the weights' type in the file; quantized blocks hold float32

    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # tokens that a row of a sliding layer sees, itself included
    sliding_layers: tuple[int, ...] = ()  # which layers slide; the others see everything before them
    sliding_rope_theta: float | None = None  # of the sliding layers, which are never scaled; None: as all layers
    query_pre_attn_scalar: float | None = None  # scores are scaled by its square root's inverse; None: head_dim
    hidden_act: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    qk_norm: bool = False  # each head of Q and K is normalised before it is rotated
    post_norms: bool = False  # the results of attention and of the MLP are normalised before they are added
    norm_offset: float = 0.0  # what is added to each norm's stored weight
    scale_embeddings: bool = False  # by the square root of hidden_size
