"""ModelConfig: the properties of a model that the forward pass, weight names and KV cache need. Pure data.

Each difference between architectures is a field here. It is set once, when the model's files are read
(core/model_files/settings/config_json.py, core/model_files/gguf/config_gguf.py), so that no later code compares
architecture names.
"""

import math
from typing import Literal, NamedTuple

import msgspec

from core.models.grid_parts import GridParts
from core.models.layers.rope_scaling import RopeScaling
from core.models.vision_parts import VisionParts
from kernels.recurrence import RecurrenceKind, RecurrenceSizes
from kernels.value_form import ValueForm

#: clamped_silu: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (1 + up), with up between -7 and 7 (gpt-oss).
#: gelu, relu2 (the square of relu) and xielu, which has numbers of each layer (kernels/cpu/c/layers/gate.h), are for
#: MLPs without a gate.
Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_silu", "gelu", "relu2", "xielu"]
#: Our names of xIELU's numbers in an MLP.
XIELU_NAMES = ("alpha_p", "alpha_n", "beta", "eps")
EncoderActivation = Literal["gelu", "gelu_pytorch_tanh", "silu"]
#: The MLP's input: the sum with attention's output ("in turn"), or attention's input, with its own norm or the same
#: one.
Residual = Literal["in turn", "parallel", "parallel with one norm"]
#: How a safetensors folder stores matrices: as they are, or as codes and scales in several tensors
#: (core/model_files/tensors/packed_layout.py).
Packing = Literal["none", "gptq", "gptq_v2", "awq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes", "torchao"]
#: What is between the pooled state and the labels of a classifying encoder: a linear layer and tanh, or a linear layer,
#: gelu and a norm.
ClassifierHead = Literal["none", "tanh", "gelu and norm"]


class EncoderParts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of an encoder, whose tokens see the whole prompt. Its norms are layer normalisations."""

    num_positions: int = 0  # rows of the position table; 0 = rotary embedding
    first_position: int = 0  # row for a prompt's first token
    num_kinds: int = 0  # kinds of tokens, each with a row that is added to its tokens' embeddings; 0 = none
    norms_follow: bool = True  # post-norms, after each addition (BERT); otherwise pre-norms (ModernBERT)
    has_biases: bool = True  # norms and products have biases
    products_have_biases: bool = True
    is_gated: bool = False  # the MLP has a gate
    has_fused_gate: bool = True  # the file has gate and up as one matrix
    has_fused_qkv: bool = False  # the file has Q, K and V as one matrix
    activation: EncoderActivation = "gelu"
    head: ClassifierHead = "none"
    head_has_biases: bool = True
    head_pooling: Literal["cls", "mean"] = "cls"


class ExpertParts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of routed MLPs. A router chooses a few experts for each token."""

    num_experts: int
    num_chosen: int  # experts per token
    intermediate_size: int  # of one expert
    normalises: bool  # the weights of a token's chosen experts sum to 1
    dense_layers: tuple[int, ...] = ()  # indices of layers without a router
    has_biases: bool = False  # the router and the experts' products have biases
    shared_size: int = 0  # size of the shared expert that all tokens use; 0 = there is none
    has_shared_gate: bool = False  # its weight is the sigmoid of a router output; otherwise 1
    #: How experts are chosen; see kernels/routing.py.
    is_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    best_of_group: int = 1
    scaling: float = 1.0
    has_correction: bool = False
    added_to_sum: float = 0.0
    has_scales: bool = False  # of the experts' weights
    scales_inputs: bool = False  # weights are of what the experts read, and not of their results
    #: They run alongside a dense MLP: norms of both results, which are added, and of what experts and router read.
    beside_dense: bool = False


class RowFactors(NamedTuple):
    """Factors of the results of one product of each layer, by which its matrix is multiplied when it is read."""

    part: str  # our name of the matrix within a layer, as self_attn.k_proj
    runs: tuple[tuple[int, float], ...]  # so many rows, and their factor


class HeadSizes(NamedTuple):
    """The heads of K and V of a layer, and the numbers of a head."""

    num_key_value_heads: int
    head_dim: int


class RowOfHeads(NamedTuple):
    """The heads of Q and K in the products of a rank's attention, and the first of those that it attends with."""

    heads: int
    kv_heads: int
    first_head: int
    first_kv_head: int


class PerLayerParts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of inputs that each layer has for each token (kernels/cpu/c/layers/per_layer.h)."""

    width: int
    vocab_size: int  # tokens with rows of the table; 0 = there is none: inputs follow from the embeddings alone
    given_id: int = 0  # the token whose rows of the table the tokens of images have
    #: Of some layers of a model: how many come before them, and how many the table has; 0 = those of the config.
    first_layer: int = 0
    row_layers: int = 0


class StreamParts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of hidden states in several streams, of which layers read one (core/models/layers/streams.py)."""

    count: int
    active: int  # the stream that layers read
    scales_active: bool  # what a layer's own inputs are gated by is scaled
    rank: int  # of the two products that are added to attention's output


class LatentParts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of latent attention (kernels/cpu/c/attention/latent.h), which caches one vector per token.

    ModelConfig describes attention as it is computed: one KV head, and heads of size latent_dim + rotated_dim.
    """

    query_dim: int | None  # of the queries' own latent vector; None = they have none
    latent_dim: int
    plain_dim: int  # numbers of a query head that are multiplied with the latent vector
    rotated_dim: int  # numbers of a query head that are rotated
    value_dim: int  # numbers of a value head
    norm_eps: float = 1e-6  # for the norms of latent vectors; no file states it
    is_split: bool = False  # the file has K's and V's matrices as two tensors, K's transposed


class RecurrentParts(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of layers that have a recurrent state instead of attention; see kernels/recurrence.py."""

    kind: RecurrenceKind
    layers: tuple[int, ...]  # indices of these layers
    taps: int
    channels: int
    num_heads: int = 0
    num_groups: int = 1
    key_dim: int = 0
    value_dim: int = 0
    takes_turns: bool = False
    inputs: tuple[str, ...] = ("in_proj",)  # the file's matrices that together produce the input; see input_widths
    has_bias: bool = False  # the convolution has a bias
    has_product_biases: bool = False
    has_norm: bool = True  # its results are normalised; without, only of a state space
    rates_are_logs: bool = True  # the file has the logarithms of the rates; otherwise their negatives
    steps: tuple[float, float] = (0.0, math.inf)
    most_beta: float = 1.0
    norm_eps: float | None = None  # of the norm of its results; None: that of the model
    #: The file has the convolution's channels of queries, keys and values as tensors of their own.
    has_split_convolution: bool = False

    @property
    def sizes(self) -> RecurrenceSizes:
        """Return the sizes of one of the layers."""
        return RecurrenceSizes(
            kind=self.kind,
            taps=self.taps,
            channels=self.channels,
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            takes_turns=self.takes_turns,
        )

    @property
    def input_widths(self) -> dict[str, int]:
        """Return the output width of each matrix of `inputs`.

        Those of qkvz and ba are in the order of the head groups.
        """
        sizes = self.sizes
        values, heads = sizes.out_width, self.num_heads
        widths = {"in_proj": sum(sizes.parts), "qkv_proj": self.channels, "z_proj": values, "b_proj": heads}
        keys = self.num_groups * self.key_dim
        widths |= {"q_proj": keys, "k_proj": keys, "v_proj": values}
        widths |= {"a_proj": heads, "qkvz_proj": self.channels + values, "ba_proj": 2 * heads}
        return {name: widths[name] for name in self.inputs}

    @property
    def convolution_widths(self) -> dict[str, int]:
        """Return the channels of each tensor of the convolution in the file, by our name."""
        if not self.has_split_convolution:
            return {"convolution": self.channels}
        return {f"{name}_convolution": self.input_widths[f"{name}_proj"] for name in "qkv"}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and constants of one model, with transformers' names."""

    architecture: str  # a name of core.models.architectures.by_name
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # in tokens
    tie_word_embeddings: bool  # also true without a head
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # each of them ends a generation
    dtype: str  # torch's name for the weights' type in the file; quantized blocks count as float32

    has_head: bool = True  # computes logits; without a head the model only pools
    num_labels: int = 0  # for a classifier of prompts, with weight score.weight; 0 = none
    embedding_size: int = 0  # of the matrix that a pooled state is multiplied with; 0 = there is none
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # tokens that a row of a sliding layer sees, itself included
    sliding_layers: tuple[int, ...] = ()  # indices of the sliding layers; the others see all earlier tokens
    sliding_rope_theta: float | None = None  # theta of the sliding layers, which are never scaled; None: rope_theta
    full_heads: HeadSizes | None = None  # of the layers without a window, where those with one have others
    full_keys_are_values: bool = False  # in layers without a window V is K before its norm and rotation
    value_norm: bool = False  # each head of V is normalised, without weights
    #: The last layers, so many, have no K and V: they read those of the last layer of their kind before them.
    num_shared_layers: int = 0
    #: If no layer has K and V, because all read those of another model: the places of these among its caches, of a
    #: layer without a window and of one with (core/models/assistant.py). None: the model has K and V.
    lent_places: tuple[int, int] | None = None
    per_layer: PerLayerParts | None = None  # None: layers have no inputs of their own
    streams: StreamParts | None = None  # None: there is one stream of hidden states
    #: Of each layer: the gates of its MLP that are less than the mean and so many standard deviations count as 0, and
    #: others as the difference; None: all count. () = all count in all layers.
    sparse_gates: tuple[float | None, ...] = ()
    layer_scales: bool = False  # each layer multiplies the hidden states by a number at its end
    wide_mlps: bool = False  # the MLPs of layers without K and V are of twice the size
    unrotated_layers: tuple[int, ...] = ()  # indices of the layers without rotary embedding
    #: Queries at position p are multiplied by 1 + query_growth * ln(1 + p // original length of rope_scaling).
    query_growth: float | None = None
    rotary_dim: int | None = None  # how many leading numbers of a head are rotated, in the file's order; None = all
    query_pre_attn_scalar: float | None = None  # scores are scaled by 1 / sqrt of this; None: head_dim
    hidden_act: Activation = "silu"
    #: xIELU's numbers of each layer, in the order of XIELU_NAMES; (): the files have them as tensors.
    xielu: tuple[tuple[float, ...], ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False  # attention's output projection has a bias
    mlp_bias: bool = False  # the products of dense MLPs have biases
    head_bias: bool = False  # the head has a bias
    is_gated: bool = True  # MLPs have gates
    residual: Residual = "in turn"
    qk_norm: bool = False  # each head of Q and K is normalised
    qk_norm_of_rows: bool = False  # with qk_norm: all of Q's heads are normalised together, and all of K's
    #: Of a rank, with qk_norm_of_rows: the heads of all ranks; None: its products have its own heads.
    row_of_heads: RowOfHeads | None = None
    qk_norm_by_head: bool = False  # with qk_norm: each head has its own weights
    qk_norm_after: bool = False  # with qk_norm: after the rotation; otherwise before it
    qk_norm_plain: bool = False  # with qk_norm: without weights, and in layers with rotary embedding only
    #: The inputs of attention and of the MLP are normalised. If not, those of layers with a recurrent state still are,
    #: and these layers have no post_norms.
    pre_norms: bool = True
    post_norms: bool = False  # the outputs of attention and of the MLP are normalised before they are added
    norm_offset: float = 0.0  # added to each norm's stored weight
    centred_norms: bool = False  # norms, including those of heads, are layer normalisations; otherwise RMS norms
    norm_bias: bool = False  # centred norms of hidden states have a bias
    position_table: bool = False  # a row of a table is added to a token's embedding, by its position
    scale_embeddings: bool = False  # embeddings are multiplied by the square root of hidden_size
    packing: Packing = "none"  # of matrices in a safetensors folder
    embedding_multiplier: float = 1.0  # factor of embeddings, if scale_embeddings is false
    residual_multiplier: float = 1.0  # factor of what attention and the MLP add to the hidden states
    logits_multiplier: float = 1.0
    logits_cap: float | None = None  # logits become cap * tanh(logits / cap)
    scores_cap: float | None = None  # likewise for attention's scores
    attention_sinks: bool = False  # each head has an extra score without a value, which takes a share of the weights
    fused_qkv: bool = False  # the file has Q, K and V as one matrix
    fused_gate_up: bool = False  # the file has the MLP's gate and up as one matrix
    latent: LatentParts | None = None  # None: K and V are cached
    experts: ExpertParts | None = None  # None: no layer has a router
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a product of its input
    head_gates: bool = False  # so is each head, by the sigmoid of one number
    recurrent: RecurrentParts | None = None  # None: all layers have attention
    factors: tuple[RowFactors, ...] = ()  # of products, where the files' matrices are without them
    #: If the file's layers are others: the numbers there of each layer's mixer and MLP; -1: it has no MLP. A layer with
    #: the number of the mixer before it reads what that one reads: see is_second_mixer().
    file_layers: tuple[tuple[int, int], ...] = ()
    encoder: EncoderParts | None = None  # None: the layers are a decoder's
    sees_all: bool = False  # a decoder's layers in which tokens see the whole prompt, like an encoder's
    vision: VisionParts | GridParts | None = None  # None: the model takes no images
    #: Which of an image token's three positions (time, row, column) turns each pair of a head; None: tokens have one.
    rope_axes: tuple[int, ...] | None = None

    @property
    def has_gates(self) -> bool:
        """Return whether MLPs have gates."""
        return self.is_gated if self.encoder is None else self.encoder.is_gated

    @property
    def is_causal(self) -> bool:
        """Return whether tokens see no later ones. If not, a step computes whole prompts, and nothing is cached."""
        return self.encoder is None and not self.sees_all

    @property
    def adds_places(self) -> bool:
        """Return whether a row of a table is added to a token's embedding, by its position."""
        return self.position_table or (self.encoder is not None and self.encoder.num_positions > 0)

    @property
    def wholes_in_windows(self) -> bool:
        """Return whether tokens of an image see later ones of it in layers with a window only, as in Gemma 4."""
        return self.is_causal and isinstance(self.vision, GridParts)

    @property
    def scores_scale(self) -> float:
        """Return the factor of attention's scores."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def num_attention_weights(self, layer: int) -> int:
        """Return the number of weights of the layer's attention, divided by the hidden size."""
        if (latent := self.latent) is None:
            (kv_heads, head_dim), form = self.heads_of(layer), self.value_form(layer)
            gates = self.num_attention_heads if self.output_gate else 0
            kv_heads *= 0 if form == "shared" else 1 if form == "keys" else 2
            return (2 * self.num_attention_heads + kv_heads + gates) * head_dim  # Q and O, K, V
        heads, width = self.num_attention_heads, latent.plain_dim + latent.rotated_dim
        queries = heads * width
        if latent.query_dim is not None:
            queries = latent.query_dim + latent.query_dim * heads * width // self.hidden_size
        own = latent.latent_dim * heads * (latent.plain_dim + latent.value_dim) // self.hidden_size
        return queries + latent.latent_dim + latent.rotated_dim + own + heads * latent.value_dim

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers with a recurrent state."""
        return () if self.recurrent is None else self.recurrent.layers

    @property
    def num_caches(self) -> int:
        """Number of the layers that have K and V.

        If a step computes whole prompts, all layers with heads of one size use those of one.
        """
        if not self.is_causal:
            return len(self.head_sizes)
        return self.num_hidden_layers - len(self.recurrent_layers) - self.num_shared_layers

    @property
    def state_size(self) -> int:
        """Return how many float32 numbers the recurrent states of a request have, in all layers together."""
        return 0 if self.recurrent is None else len(self.recurrent.layers) * self.recurrent.sizes.state_size

    def norms_of(self, layer: int) -> tuple[bool, bool]:
        """Return whether the layer normalises inputs, and whether it normalises outputs."""
        if not self.pre_norms and layer in self.recurrent_layers:
            return True, False
        return self.pre_norms, self.post_norms

    def is_second_mixer(self, layer: int) -> bool:
        """Return whether the layer's mixer reads what that of the layer before reads, which then has no MLP."""
        own = self.file_layers
        return layer > 0 and bool(own) and own[layer][0] == own[layer - 1][0]

    def has_mlp(self, layer: int) -> bool:
        """Return whether the layer has an MLP of any kind."""
        return not self.file_layers or self.file_layers[layer][1] >= 0

    def has_dense_mlp(self, layer: int) -> bool:
        """Return whether the layer has an MLP without a router."""
        if not self.has_mlp(layer):
            return False
        return self.experts is None or self.experts.beside_dense or layer in self.experts.dense_layers

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer has a routed MLP."""
        return self.experts is not None and self.has_mlp(layer) and layer not in self.experts.dense_layers

    def mlp_size(self, layer: int) -> int:
        """Return the size of the layer's dense MLP."""
        return self.intermediate_size * (2 if self.wide_mlps and self.value_form(layer) == "shared" else 1)

    def sparse_gate(self, layer: int) -> float | None:
        """Return from how many standard deviations above the mean a gate of the layer's MLP counts; None: all count."""
        return self.sparse_gates[layer] if self.sparse_gates else None

    def heads_of(self, layer: int) -> HeadSizes:
        """Return the sizes of the layer's heads."""
        if self.full_heads is not None and layer not in self.sliding_layers:
            return self.full_heads
        return HeadSizes(self.num_key_value_heads, self.head_dim)

    @property
    def head_sizes(self) -> tuple[HeadSizes, ...]:
        """Return the different sizes of the layers' heads, by their first layers."""
        return tuple(dict.fromkeys(map(self.heads_of, range(self.num_hidden_layers))))

    def value_form(self, layer: int) -> ValueForm:
        """Return what V of the layer is."""
        if layer >= self.num_hidden_layers - self.num_shared_layers:
            return "shared"
        if self.full_keys_are_values and layer not in self.sliding_layers:
            return "keys"
        return "normalised" if self.value_norm else "own"

    def source_of(self, layer: int) -> int:
        """Return the layer whose K and V this one reads: itself, or the last one of its kind that has any."""
        if self.value_form(layer) != "shared":
            return layer
        is_sliding, first = layer in self.sliding_layers, self.num_hidden_layers - self.num_shared_layers
        return max(one for one in range(first) if (one in self.sliding_layers) == is_sliding)

    def place_of(self, layer: int) -> int:
        """Return the place of the layer's K and V among the caches, or of its state in a request's states."""
        if self.lent_places is not None:
            return self.lent_places[layer in self.sliding_layers]
        if not self.is_causal:
            return self.head_sizes.index(self.heads_of(layer))
        layer = self.source_of(layer)
        if self.recurrent is None:
            return layer
        before = sum(1 for one in self.recurrent.layers if one < layer)
        return before * self.recurrent.sizes.state_size if layer in self.recurrent.layers else layer - before

    @property
    def num_matrix_weights(self) -> int:
        """Number of weights that steps multiply with, head and all experts included."""
        every, routed = range(self.num_hidden_layers), 0
        matrices = 3 if self.is_gated else 2  # of an MLP
        if self.experts is not None:
            routed = self.experts.num_experts * (1 + matrices * self.experts.intermediate_size)
            routed += matrices * self.experts.shared_size
        products = sum(self.num_attention_weights(one) for one in every if one not in self.recurrent_layers)
        if self.recurrent is not None:
            sizes = self.recurrent.sizes
            products += len(self.recurrent.layers) * (sum(sizes.parts) + sizes.out_width)
        if self.streams is not None:
            products += 2 * self.num_hidden_layers * (self.streams.rank + self.streams.count)
            products += 2 * (self.streams.count - 1) * self.hidden_size
        if self.per_layer is not None:  # their projection, gates and products
            products += 3 * self.num_hidden_layers * self.per_layer.width
        products += sum(matrices * self.mlp_size(one) for one in every if self.has_dense_mlp(one))
        products += routed * sum(map(self.has_experts, every))
        return (products + self.vocab_size) * self.hidden_size
