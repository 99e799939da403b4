"""Architecture: a model's properties that neither config.json nor a GGUF file states, as data."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from core.models.config import Activation, Residual
from kernels.recurrence import RecurrenceKind

#: llama.cpp's numbers for how router outputs become weights: softmax over all, sigmoid, softmax over the chosen ones.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3


class ExpertRow(msgspec.Struct, frozen=True, kw_only=True):
    """The routed MLPs of one architecture."""

    size_key: str = "moe_intermediate_size"  # the setting for the size of an expert
    normalises: bool | None = None  # the weights of a token's experts sum to 1; None: only if norm_topk_prob is true
    gguf_normalises: bool = True  # the same for GGUF files, which have no key for it
    gguf: str | None = None  # general.architecture that another row also has; this row applies if the file has experts
    #: llama.cpp's numbers for how router outputs become weights; the first one is the default.
    gguf_gating: tuple[int, ...] = (SOFTMAX,)
    has_biases: bool = False
    shared_size_key: str | None = None  # the setting for the size of the shared expert
    shared_count_key: str | None = None  # or the setting for its size as a number of experts
    has_shared_gate: bool = False
    scales_inputs: bool = False
    is_sigmoid: bool = False  # experts' scores are sigmoids
    has_correction: bool = False  # experts are chosen by scores plus stored corrections
    added_to_sum: float = 0.0  # added to the sum that the weights are divided by
    scales: bool = False  # the setting routed_scaling_factor exists
    groups: Literal["none", "group_limited_greedy", "always"] = "none"  # by n_group: with this topk_method, or always
    best_of_group: int = 1
    enabled_key: str | None = None  # the setting without which there are no experts
    beside_dense: bool = False  # they run alongside a dense MLP, and their weights have scales
    #: Safetensors have the matrices of all experts as [experts, in, out], or in MXFP4 as blocks and scales
    #: (core/model_files/tensors/stacked_experts.py); rows of gate and up alternate.
    is_turned: bool = False


class MtpRow(msgspec.Struct, frozen=True, kw_only=True):
    """The layer for multi-token prediction of one architecture; only speculation reads it.

    It reads the norms of a token's embedding and of the model's hidden state before the token, joined by a product.
    """

    #: How names in safetensors begin -> how ours do (core/models/draft_head.py), and "" for tensors that are the
    #: model's own. The first that fits applies. {layers} stands for the number of the model's layers.
    names: Mapping[str, str]
    prefix: str = ""  # of the names of all such layers; "" with further_layers
    setting: str = "num_nextn_predict_layers"  # their number in config.json
    default: int = 0  # without the setting
    token_first: bool = True  # the token's norm comes first in what is joined
    zeroes_first: bool = True  # the embedding at position 0 is zeros, as in training
    #: It reads the hidden state after the model's final norm, and its own after its final norm.
    reads_normed: bool = True
    is_dense: bool = False  # the layer has a dense MLP, whatever the model's layers have


#: A layer after the model's last one (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embeddings and head are the model's.
NEXTN_LAYER = MtpRow(
    names={
        "model.layers.{layers}.eh_proj.": "model.layers.0.input_proj.",
        "model.layers.{layers}.enorm.": "model.layers.0.token_layernorm.",
        "model.layers.{layers}.hnorm.": "model.layers.0.hidden_layernorm.",
        "model.layers.{layers}.shared_head.norm.": "model.norm.",
        "model.layers.{layers}.shared_head.head.": "",
        "model.layers.{layers}.embed_tokens.": "",
        "model.layers.{layers}.": "model.layers.0.",
    },
)
#: Of Qwen3.5. Qwen3-Next's config.json does not state the number of these layers.
FC_LAYER = MtpRow(
    prefix="mtp.",
    names={
        "mtp.fc.": "model.layers.0.input_proj.",
        "mtp.pre_fc_norm_embedding.": "model.layers.0.token_layernorm.",
        "mtp.pre_fc_norm_hidden.": "model.layers.0.hidden_layernorm.",
        "mtp.norm.": "model.norm.",
        "mtp.layers.0.": "model.layers.0.",
    },
    setting="mtp_num_hidden_layers",
    default=1,
    zeroes_first=False,
)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. Settings have their names in config.json."""

    name: str  # in config.json's architectures
    model_type: str  # config.json's model_type
    base_name: str  # in config.json's architectures, for a checkpoint without a head
    gguf: str | None  # general.architecture; None: llama.cpp uses another architecture's name
    # further names of general.architecture, as of models with images that use this row for their text
    gguf_others: tuple[str, ...] = ()
    #: Defaults from transformers' config class for settings that config.json may lack.
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    #: Settings for which only one value is supported; related models with other values are refused.
    only: Mapping[str, Any] = msgspec.field(default_factory=dict)
    size_key: str = "intermediate_size"  # the setting for the size of the MLP
    size_factor: int | None = None  # that size as a multiple of hidden_size, if a file does not state it
    activation_key: str | None = "hidden_act"  # None: `activation` always applies, whatever the files name
    activation: Activation = "silu"  # if a file does not name one
    #: Which products of attention have biases. "qkv": Q, K and V. "as configured": Q, K, V and the output, if the
    #: setting attention_bias is true.
    attention_bias: Literal["none", "qkv", "as configured"] = "none"
    attention_bias_key: str = "attention_bias"
    mlp_bias_key: str | None = None  # the setting that gives dense MLPs biases; None: they have none
    head_bias: bool = False
    is_gated: bool = True  # MLPs have gates
    residual: Residual = "in turn"
    residual_key: str | None = None  # the setting without which residuals are in turn; None: there is none
    #: The layers with a sliding window, if there is a window: those that layer_types names. Without layer_types: the
    #: layers from max_window_layers on, all but the last of every sliding_window_pattern layers, with
    #: use_sliding_window none, or all.
    #: With by_first_of_pattern: all but the first of every sliding_window_pattern layers.
    #: By chunks: none, and contexts have at most attention_chunk_size tokens, which see each other.
    sliding: Literal[
        "none",
        "all",
        "by_first_of_pattern",
        "from max_window_layers",
        "by sliding_window_pattern",
        "by layer_types",
        "by layer_types, else all",
        "by chunks",
    ] = "none"
    qk_norm: bool = False
    qk_norm_key: str | None = None  # the setting for qk_norm; in a GGUF file its tensors show it
    qk_norm_of_rows: bool = False
    qk_norm_by_head: bool = False
    qk_norm_after: bool = False
    qk_norm_plain: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    centred_norms: bool = False  # norms are layer normalisations
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to norms as Hugging Face stores them; llama.cpp stores the sum
    position_table: bool = False
    scale_embeddings: bool = False
    query_pre_attn_scalar: bool = False  # the setting exists
    #: Number of layers of the one model for which llama.cpp uses another value than the head dimension in
    #: query_pre_attn_scalar. llama.cpp also recognises it by this number.
    gguf_scalar_layers: int | None = None
    rope_theta: float = 10_000.0  # if a file does not state it
    sliding_rope_theta: float | None = None  # of sliding layers, if a file does not state it; None: they use rope_theta
    own_sliding_rope: bool = False  # the sliding layers' embedding is never scaled; rope_parameters has two groups
    #: The layers without rotary embedding: those with 0 in no_rope_layers, or every no_rope_layer_interval-th one; or
    #: the layers without a window, if others have one; or all, unless position_embedding_type is rope.
    #: Or those with 0 in layer_rope_theta, which has the theta of each layer.
    unrotated: Literal[
        "none",
        "all",
        "without rope_theta",
        "no_rope_layers",
        "full beside sliding",
        "by position_embedding_type",
        "by layer_rope_theta",
    ] = "none"
    partial_rotary: bool = False  # the setting partial_rotary_factor exists; GGUF: rope.dimension_count may be less
    query_growth: bool = False  # the setting llama_4_scaling_beta exists; GGUF: attention.temperature_scale
    longrope: bool = False  # the scaling exists
    proportional_rope: bool = False  # so does this one, of layers without a window
    ntk_alpha: bool = (
        False  # the setting alpha of a "dynamic" scaling exists: a fixed factor of theta (GGUF: of freq_base)
    )
    # in every file, the rows of q and k have the two numbers of each rotated pair next to each other
    interleaves_heads: bool = False
    gguf_yarn_truncates: bool = True  # whether YaRN's transition starts and ends at whole dimensions; no key says so
    #: GGUF files with so many experts have no head norms without weights, as others of the architecture do; no key says
    #: so.
    gguf_unnormed_experts: int | None = None
    gguf_interleaves_heads: bool = False  # llama.cpp's converter reorders the rows of q and k in that way
    #: Whether tokens see the whole prompt. "as configured": by use_bidirectional_attention, and then half of the window
    #: is on each side. "always": the window is the number of tokens on each side.
    sees_all: Literal["never", "as configured", "always"] = "never"
    attention_sinks: bool = False
    soft_caps: bool = False  # the settings attn_logit_softcapping and final_logit_softcapping exist
    multipliers: Literal["none", "granite", "minicpm", "cohere", "falcon"] = (
        "none"  # which family's setting names are used
    )
    experts: ExpertRow | None = None  # for architectures with routed MLPs
    recurrent: RecurrenceKind | None = None  # what layers without attention have instead
    delta_inputs: tuple[str, ...] = ("qkv_proj", "z_proj", "b_proj", "a_proj")  # see RecurrentParts.inputs
    gguf_delta_inputs: tuple[str, ...] = ("qkv_proj", "z_proj", "b_proj", "a_proj")
    gguf_heads_take_turns: bool = False  # llama.cpp's converter reorders the heads of values: see RecurrenceSizes
    recurrent_norm_eps: float | None = None  # of the norm of a recurrent layer's results; None: that of the model
    split_convolution: bool = False  # see RecurrentParts.has_split_convolution
    #: What a layer of the file has, if it is not one of ours: a mixer or an MLP ("halves"), or two mixers that read the
    #: same, attention and a recurrent state, and an MLP. See core/model_files/settings/file_layers.py.
    file_layers: Literal["whole", "halves", "two mixers"] = "whole"
    head_gates: bool = False  # the matrix g_proj makes a gate for each head of attention's output
    output_gate: bool = False  # the rows of q have each head's queries, then its gates of attention's output
    settings: Mapping[str, str] = msgspec.field(default_factory=dict)  # the name of a setting -> what others call it
    #: Gemma 4's layers: heads of layers without a window may have sizes of their own, and K as V; V is normalised; the
    #: last layers may share K and V; each layer may have inputs of its own, and multiplies hidden states at its end.
    full_heads: bool = False
    #: The setting num_global_key_value_heads applies whether or not V is K.
    own_full_kv_heads: bool = False
    input_table: bool = True  # such inputs are partly rows of a table; otherwise they follow from embeddings alone
    #: The setting for the width of a matrix between the final norm and the pooling; None: there is none.
    embedding_key: str | None = None
    #: Gemma 3n's: hidden states in several streams, a learned residual, and MLPs some of whose gates do not count.
    has_streams: bool = False
    scores_scalar: float | None = None  # scores are scaled by its square root's inverse, whatever a file says
    own_cap: Literal["none", "logits_cap"] = "none"  # of the soft caps without `soft_caps`: the one that exists
    adjusts_size: bool = False  # the MLP's real size follows from intermediate_size, as block_auto_adjust_ff_dim says
    turned_products: bool = False  # safetensors have the layers' matrices as [in, out]
    fused_qkv: bool = False
    qkv_by_kv_heads: bool = False  # with fused_qkv, safetensors have each KV head's queries, K and V together
    fused_gate_up: bool = False
    mtp: MtpRow | None = None  # None: files have no layer for multi-token prediction, or it is not read
    further_layers: bool = False  # files may have such layers after the last layer
    latent: bool = False  # attention is latent: the settings kv_lora_rank and others exist
    layers_name: str = "model.layers"  # prefix of tensor names in safetensors, before a layer's number
    #: Our name of a layer's tensor, without weight or bias -> the name in safetensors, and in GGUF files. A * in both
    #: stands for the expert's number; a name that ends with * is one tensor for all experts.
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    gguf_names: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def may_predict(self) -> bool:
        """Return whether a GGUF file may have layers for multi-token prediction after the last layer."""
        return self.further_layers or self.mtp is not None
