"""The encoders' architectures as data: their names, and the names of their weights in files."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from core.models.config import ClassifierHead

#: What follows a checkpoint's layers: nothing, a classifier of prompts, or a masked language model's head, which is
#: ignored.
EncoderForm = Literal["base", "classifier", "masked"]


class EncoderArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. Settings have their names in config.json."""

    stem: str  # common part of the names in config.json's architectures
    model_type: str
    prefix: str  # prefix of weight names in checkpoints that have something after their layers
    weights: Mapping[str, str]  # our stem of a weight's name -> the file's; {} = the layer's index
    #: The same for matrices in transformers' code, whose names adapters have; {} = those of the file.
    modules: Mapping[str, str] = msgspec.field(default_factory=dict)
    head_weights: Mapping[str, str]  # the same for the layers after a classifier's pooling
    head: ClassifierHead
    is_modern: bool = False  # ModernBERT: rotary embedding, pre-norms, gates, sliding layers, no biases
    is_rotary: bool = False  # rotary embedding; otherwise like BERT
    is_gated: bool = False  # MLPs with gates, one matrix of Q, K and V, and no biases in products; otherwise like BERT
    pads_positions: bool = False  # positions start after the padding token's number
    #: Defaults from transformers' config class for settings that config.json may lack.
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    #: Settings for which only one value is supported; related models with other values are refused.
    only: Mapping[str, Any] = msgspec.field(default_factory=dict)
    # other names of settings -> the names that we read
    settings: Mapping[str, str] = msgspec.field(default_factory=dict)
    gguf: str | None = None  # general.architecture in GGUF files; None: not supported
    gguf_weights: Mapping[str, str] = msgspec.field(default_factory=dict)  # like `weights`


_BERT_GGUF_WEIGHTS = {
    "embeddings.words": "token_embd",
    "embeddings.positions": "position_embd",
    "embeddings.kinds": "token_types",
    "embeddings.norm": "token_embd_norm",
    "layers.{}.q": "blk.{}.attn_q",
    "layers.{}.k": "blk.{}.attn_k",
    "layers.{}.v": "blk.{}.attn_v",
    "layers.{}.o": "blk.{}.attn_output",
    "layers.{}.attention_out_norm": "blk.{}.attn_output_norm",
    "layers.{}.up": "blk.{}.ffn_up",
    "layers.{}.down": "blk.{}.ffn_down",
    "layers.{}.mlp_norm": "blk.{}.layer_output_norm",
}
_BERT_WEIGHTS = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.kinds": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{}.q": "encoder.layer.{}.attention.self.query",
    "layers.{}.k": "encoder.layer.{}.attention.self.key",
    "layers.{}.v": "encoder.layer.{}.attention.self.value",
    "layers.{}.o": "encoder.layer.{}.attention.output.dense",
    "layers.{}.attention_out_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers.{}.up": "encoder.layer.{}.intermediate.dense",
    "layers.{}.down": "encoder.layer.{}.output.dense",
    "layers.{}.mlp_norm": "encoder.layer.{}.output.LayerNorm",
}
_NOMIC_WEIGHTS = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.kinds": "embeddings.token_type_embeddings",
    "embeddings.norm": "emb_ln",
    "layers.{}.qkv": "encoder.layers.{}.attn.Wqkv",
    "layers.{}.o": "encoder.layers.{}.attn.out_proj",
    "layers.{}.attention_out_norm": "encoder.layers.{}.norm1",
    "layers.{}.gate": "encoder.layers.{}.mlp.fc12",
    "layers.{}.up": "encoder.layers.{}.mlp.fc11",
    "layers.{}.down": "encoder.layers.{}.mlp.fc2",
    "layers.{}.mlp_norm": "encoder.layers.{}.norm2",
}
_MODERN_BERT_WEIGHTS = {
    "embeddings.words": "embeddings.tok_embeddings",
    "embeddings.norm": "embeddings.norm",
    "layers.{}.attention_norm": "layers.{}.attn_norm",
    "layers.{}.qkv": "layers.{}.attn.Wqkv",
    "layers.{}.o": "layers.{}.attn.Wo",
    "layers.{}.mlp_norm": "layers.{}.mlp_norm",
    "layers.{}.up": "layers.{}.mlp.Wi",
    "layers.{}.down": "layers.{}.mlp.Wo",
    "final_norm": "final_norm",
}
_NOMIC_GGUF_WEIGHTS = {
    "embeddings.words": "token_embd",
    "embeddings.kinds": "token_types",
    "embeddings.norm": "token_embd_norm",
    "layers.{}.qkv": "blk.{}.attn_qkv",
    "layers.{}.o": "blk.{}.attn_output",
    "layers.{}.attention_out_norm": "blk.{}.attn_output_norm",
    "layers.{}.gate": "blk.{}.ffn_gate",
    "layers.{}.up": "blk.{}.ffn_up",
    "layers.{}.down": "blk.{}.ffn_down",
    "layers.{}.mlp_norm": "blk.{}.layer_output_norm",
}
_JINA_WEIGHTS = {
    **{name: theirs for name, theirs in _NOMIC_WEIGHTS.items() if name != "layers.{}.gate"},
    "layers.{}.qkv": "encoder.layers.{}.mixer.Wqkv",
    "layers.{}.o": "encoder.layers.{}.mixer.out_proj",
    "layers.{}.up": "encoder.layers.{}.mlp.fc1",
}
_MODULES = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.kinds": "embeddings.token_type_embeddings",
    **{f"layers.{{}}.{name}": f"layers.{{}}.self_attn.{name}_proj" for name in "qkvo"},
}
_NOMIC_MODULES = _MODULES | {f"layers.{{}}.{name}": f"layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")}
_JINA_MODULES = _MODULES | {"layers.{}.up": "layers.{}.mlp.fc1", "layers.{}.down": "layers.{}.mlp.fc2"}
_ROBERTA_HEAD = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
_BERT_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_NOMIC_DEFAULTS = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "rope_theta": 1000.0,
}
#: Settings in the published files, which come with their own code, and the only supported values.
_NOMIC_ONLY = {
    **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved"), False),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
    "rotary_emb_fraction": 1.0,
    "num_experts": 0,
}
_NOMIC_SETTINGS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
_ROBERTA_DEFAULTS = {**_BERT_DEFAULTS, "pad_token_id": 1}

ENCODERS = (
    EncoderArchitecture(
        stem="Bert",
        model_type="bert",
        prefix="bert.",
        weights=_BERT_WEIGHTS,
        head_weights={"head.dense": "pooler.dense", "head.out": "classifier"},
        head="tanh",
        defaults=_BERT_DEFAULTS,
        gguf="bert",
        gguf_weights=_BERT_GGUF_WEIGHTS,
    ),
    *(
        EncoderArchitecture(
            stem=stem,
            model_type=model_type,
            prefix="roberta.",
            weights=_BERT_WEIGHTS,
            head_weights=_ROBERTA_HEAD,
            head="tanh",
            pads_positions=True,
            defaults=_ROBERTA_DEFAULTS,
        )
        for stem, model_type in (("Roberta", "roberta"), ("XLMRoberta", "xlm-roberta"), ("Camembert", "camembert"))
    ),
    EncoderArchitecture(
        stem="NomicBert",
        model_type="nomic_bert",
        prefix="nomic_bert.",
        weights=_NOMIC_WEIGHTS,
        modules=_NOMIC_MODULES,
        head_weights={},
        head="none",
        is_rotary=True,
        is_gated=True,
        defaults=_NOMIC_DEFAULTS,
        only=_NOMIC_ONLY,
        settings=_NOMIC_SETTINGS,
        gguf="nomic-bert",
        gguf_weights=_NOMIC_GGUF_WEIGHTS,
    ),
    EncoderArchitecture(
        stem="JinaEmbeddingsV3",
        model_type="jina_embeddings_v3",
        prefix="roberta.",
        weights=_JINA_WEIGHTS,
        modules=_JINA_MODULES,
        head_weights=_ROBERTA_HEAD,
        head="tanh",
        is_rotary=True,
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "rope_theta": 20_000.0,
        },
        gguf="jina-bert-v3",
        gguf_weights={name: theirs for name, theirs in _NOMIC_GGUF_WEIGHTS.items() if name != "layers.{}.gate"},
    ),
    EncoderArchitecture(
        stem="ModernBert",
        model_type="modernbert",
        prefix="model.",
        weights=_MODERN_BERT_WEIGHTS,
        head_weights={"head.dense": "head.dense", "head.norm": "head.norm", "head.out": "classifier"},
        head="gelu and norm",
        is_modern=True,
        defaults={
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
        },
    ),
)

_SUFFIXES: dict[str, EncoderForm] = {
    "Model": "base",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classifier",
}
#: By each supported name in config.json's architectures.
ENCODER_FORMS: dict[str, tuple[EncoderArchitecture, EncoderForm]] = {
    f"{row.stem}{suffix}": (row, form) for row in ENCODERS for suffix, form in _SUFFIXES.items()
}
#: By general.architecture of GGUF files.
GGUF_ENCODERS: dict[str, EncoderArchitecture] = {row.gguf: row for row in ENCODERS if row.gguf is not None}
#: By model_type, for a config without architectures.
ENCODER_TYPES: dict[str, EncoderArchitecture] = {row.model_type: row for row in ENCODERS}
