"""Values: checked access to a model file's settings. Errors name the file's own key."""

from collections.abc import Mapping
from typing import Any, NoReturn

from ipc.errors import ModelFileError, UnsupportedModelError

#: Lowest and highest accepted values. With the upper limits, any product of two fits in 64 bits.
_RANGES: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (2, 2**12),
    "max_position_embeddings": (1, 2**24),
    "sliding_window": (1, 2**24),
    "sliding_window_pattern": (1, 2**12),
    "max_window_layers": (0, 2**12),
    "no_rope_layer_interval": (1, 2**12),
    "rotary_dim": (2, 2**12),
    "num_experts": (1, 2**12),
    "shared_intermediate_size": (1, 2**22),
    "num_local_experts": (1, 2**12),
    "n_routed_experts": (1, 2**12),
    "moe_num_experts": (1, 2**12),
    "num_experts_per_tok": (1, 2**6),
    "top_k_experts": (1, 2**6),
    "global_head_dim": (2, 2**12),
    "num_global_key_value_heads": (1, 2**12),
    "num_kv_shared_layers": (0, 2**12),
    "hidden_size_per_layer_input": (1, 2**12),
    "embedding_dim": (1, 2**16),
    "vocab_size_per_layer_input": (1, 2**24),
    "backbone_hidden_size": (1, 2**20),
    "embedding_length_out": (1, 2**20),
    "num_centroids": (1, 2**20),
    "centroid_intermediate_top_k": (1, 2**20),
    "altup_num_inputs": (2, 2**4),
    "altup_active_idx": (0, 2**4),
    "laurel_rank": (1, 2**16),
    "moe_k": (1, 2**6),
    "shared_expert_intermediate_size": (1, 2**22),
    "n_shared_experts": (1, 2**8),
    "moe_num_shared_experts": (1, 2**8),
    "n_group": (1, 2**12),
    "topk_group": (1, 2**12),
    "key_length_mla": (2, 2**12),
    "value_length": (1, 2**12),
    "num_nextn_predict_layers": (1, 2**6),
    "q_lora_rank": (1, 2**16),
    "kv_lora_rank": (1, 2**11),
    "qk_nope_head_dim": (2, 2**12),
    "qk_rope_head_dim": (2, 2**11),
    "v_head_dim": (1, 2**12),
    "first_k_dense_replace": (0, 2**12),
    "num_dense_layers": (0, 2**12),
    "moe_layer_start_index": (0, 2**12),
    "moe_layer_end_index": (0, 2**12),
    "moe_layer_interval": (1, 2**12),
    "interleave_moe_layer_step": (1, 2**12),
    "intermediate_size_mlp": (1, 2**22),
    "attention_chunk_size": (1, 2**24),
    "floor_scale": (2, 2**24),
    "moe_intermediate_size": (1, 2**22),
    "conv_L_cache": (1, 2**6),
    "linear_conv_kernel_dim": (1, 2**6),
    "linear_num_value_heads": (1, 2**10),
    "linear_num_key_heads": (1, 2**10),
    "linear_key_head_dim": (2, 2**10),
    "linear_value_head_dim": (1, 2**10),
    "mamba_inner_size": (1, 2**20),
    "mamba_n_heads": (1, 2**10),
    "mamba_n_groups": (1, 2**10),
    "mamba_d_head": (1, 2**10),
    "mamba_d_ssm": (1, 2**20),
    "mamba_d_state": (2, 2**10),
    "mamba_d_conv": (1, 2**6),
    "full_attention_interval": (1, 2**12),
    "block_multiple_of": (1, 2**22),
    "decoder_sparse_step": (1, 2**12),
    "type_vocab_size": (1, 2**8),
    "pad_token_id": (0, 2**24),
    "local_attention": (2, 2**24),
    "global_attn_every_n_layers": (1, 2**12),
    "max_seq_length": (1, 2**24),
    "model_max_length": (1, 2**24),
    "image_size": (1, 2**12),
    "patch_size": (1, 2**10),
    "scale_factor": (1, 2**6),
    "mm_tokens_per_image": (1, 2**16),
    "depth": (1, 2**12),
    "num_heads": (1, 2**12),
    "embed_dim": (1, 2**16),
    "out_hidden_size": (1, 2**20),
    "mlp_ratio": (1, 2**8),
    "spatial_merge_size": (1, 2**6),
    "temporal_patch_size": (1, 2**4),
    "window_size": (1, 2**16),
    "num_position_embeddings": (1, 2**20),
    "max_soft_tokens": (1, 2**12),
    "pooling_kernel_size": (1, 2**6),
    "downsample_factor": (1, 2**6),
    "projector_hidden_size": (1, 2**20),
    "num_patches": (1, 2**20),
    "max_image_tokens": (1, 2**14),
    "tile_size": (1, 2**12),
    "position_embedding_size": (1, 2**20),
}

#: Mean and deviation of colours in files that name none.
GREY = (0.5, 0.5, 0.5)


class Values:
    """The settings of one file, or of one group in it, by name."""

    def __init__(
        self, values: dict[str, Any], source: str, keys: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        """Wrap the settings in `values`.

        source: name of the file, for errors. keys: the file's key for each name that it spells differently. prefix:
        added to every key in errors.
        """
        self.values = values
        self.source = source
        self._keys = keys or {}
        self._prefix = prefix

    def key(self, name: str) -> str:
        """Return the file's key for a name."""
        return self._keys.get(name, name)

    def get(self, name: str) -> Any:
        """Return the unchecked value, or None if it is missing."""
        return self.values.get(self.key(name))

    def colours(self, name: str, default: tuple[float, float, float] | None = None) -> tuple[float, float, float]:
        """Return positive numbers for red, green and blue. Errors: ModelFileError for others, or without a default."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        is_three = isinstance(value, list) and len(value) == 3
        if not is_three or any(type(one) not in (int, float) or not 1e-6 < one < 1e6 for one in value):
            self.fail(name, f"must be three positive numbers, got {value!r:.80}")
        return (float(value[0]), float(value[1]), float(value[2]))

    def fail(self, name: str, what: str) -> NoReturn:
        """Raise ModelFileError for this key. what: the rest of the error text."""
        raise ModelFileError(f"{self.source}: {self._prefix}{self.key(name)} {what}")

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raise UnsupportedModelError for this key's value. supported: a text that names the supported values."""
        key = f"{self._prefix}{self.key(name)}"
        raise UnsupportedModelError(f"{self.source}: {key}={self.get(name)!r:.100} is not supported; {supported}")

    def group(self, name: str) -> "Values | None":
        """Return the object under a name, or None if there is none. Errors name its settings as name.setting.

        Errors: ModelFileError if it is not an object.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(name, f"must be an object, got {value!r:.80}")
        return Values(value, self.source, prefix=f"{self._prefix}{self.key(name)}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer in the name's range.

        Errors: ModelFileError; also if it is missing and there is no default.
        """
        low, high = _RANGES[name]
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            self.fail(name, f"is missing; expected an integer from {low} to {high}")
        if type(value) is not int or not low <= value <= high:
            self.fail(name, f"must be an integer from {low} to {high}, got {value!r:.80}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number from low to high, both included; NaN is refused. Errors: ModelFileError."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            self.fail(name, f"is missing; expected a number from {low:g} to {high:g}")
        if type(value) not in (int, float) or not low <= value <= high:
            self.fail(name, f"must be a number from {low:g} to {high:g}, got {value!r:.80}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean, or the default if it is missing. Errors: ModelFileError."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            self.fail(name, f"must be true or false, got {value!r:.80}")
        return default if value is None else bool(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids of a setting that may be missing, one id, or a list of ids. Errors: ModelFileError."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                self.fail(name, f"must be token ids below vocab_size={vocab_size}, got {value!r:.80}")
        return tuple(ids)


def encoder_heads(
    values: Values, width: str = "hidden_size", heads: str = "num_attention_heads", *, multiple: int = 1
) -> int:
    """Return the number of an encoder's heads, which share its width. multiple: of a head's numbers.

    Errors: ModelFileError.
    """
    count, size = values.integer(heads), values.integer(width)
    if size % (multiple * count):
        times = "" if multiple == 1 else f"{multiple} * "
        values.fail(width, f"must be a multiple of {times}{values.key(heads)}={multiple * count}, got {size}")
    return count


def model_sizes(values: Values) -> dict[str, Any]:
    """Return the sizes that both file formats state, by ModelConfig's names, checked against each other.

    Errors: ModelFileError naming the key.
    """
    heads = values.integer("num_attention_heads")
    kv_heads = values.integer("num_key_value_heads", heads)
    hidden_size = values.integer("hidden_size")
    if heads % kv_heads:
        values.fail("num_key_value_heads", f"must divide {values.key('num_attention_heads')}={heads}, got {kv_heads}")
    if values.get("head_dim") is None and hidden_size % heads:
        values.fail("hidden_size", f"must be a multiple of {values.key('num_attention_heads')}={heads}: {hidden_size}")
    head_dim = values.integer("head_dim", hidden_size // heads)
    if head_dim % 2:
        values.fail("head_dim", f"must be even, for rotary embedding; got {head_dim}")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": values.integer("intermediate_size"),
        "num_hidden_layers": values.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": values.number("rms_norm_eps", 1e-12, 0.1),
        "max_position_embeddings": values.integer("max_position_embeddings"),
    }
