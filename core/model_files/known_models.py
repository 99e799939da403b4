"""known_models: the models that run on this engine's own code, from the rows of their architectures.

Only the names of published models are written here; what runs of them follows from the rows.
"""

from collections.abc import Iterator, Sequence

import msgspec

from core.model_files.model_config import ASSISTANTS
from core.model_files.settings.text_part import TEXT_PARTS
from core.models.architectures.architecture import Architecture
from core.models.architectures.by_name import ARCHITECTURES, FORMS
from core.models.architectures.encoder_architectures import ENCODERS
from core.models.architectures.grid_architectures import GRID_ARCHITECTURES
from core.models.architectures.vision_architectures import VISION_ROWS
from ipc.files.projector import PROJECTOR_KINDS

#: Name in config.json's architectures, or an encoder's stem -> published models.
PUBLISHED: dict[str, str] = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2, SmolLM, SmolLM2, TinyLlama, Falcon 3, Yi",
    "MistralForCausalLM": "Mistral 7B, Mistral Nemo",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5, DeepSeek R1 distillations",
    "MiMoForCausalLM": "MiMo-7B",
    "Qwen3ForCausalLM": "Qwen3 0.6B to 32B, Qwen3-Embedding, Qwen3-Reranker",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B, EmbeddingGemma",
    "Gemma4ForCausalLM": "Gemma 4 E2B, E4B, 26B-A4B, 31B (text)",
    "Gemma4UnifiedForCausalLM": "Gemma 4 12B (text)",
    "Gemma3nForCausalLM": "Gemma 3n E2B, E4B (text)",
    "EmbeddingGemma2TextModel": "EmbeddingGemma 2, text files",
    "Gemma2ForCausalLM": "Gemma 2 2B, 9B, 27B",
    "GemmaForCausalLM": "Gemma 2B, 7B",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "SmolLM3ForCausalLM": "SmolLM3 3B",
    "GraniteForCausalLM": "Granite 3.x (dense)",
    "GraniteSWAForCausalLM": "Granite Swash 2B",
    "MiniCPMForCausalLM": "MiniCPM 1, 2, 4 (dense)",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoHybridForCausalLM": "OLMo-Hybrid 7B",
    "Exaone4ForCausalLM": "EXAONE 4",
    "MinistralForCausalLM": "Ministral 8B",
    "Ministral3ForCausalLM": "Ministral 3 3B, 8B, 14B (text)",
    "SeedOssForCausalLM": "Seed-OSS 36B",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "GlmForCausalLM": "GLM-4-9B",
    "Glm4ForCausalLM": "GLM-4-0414, GLM-Z1",
    "ArceeForCausalLM": "AFM-4.5B",
    "ApertusForCausalLM": "Apertus 8B, 70B",
    "InternLM2ForCausalLM": "InternLM2, 2.5",
    "InternLM3ForCausalLM": "InternLM3 8B",
    "ExaoneForCausalLM": "EXAONE 3, 3.5",
    "StableLmForCausalLM": "StableLM 2 1.6B, 12B, StableLM 3B, Zephyr 3B",
    "Starcoder2ForCausalLM": "StarCoder2 3B, 7B, 15B",
    "CohereForCausalLM": "Command-R, Command-R+, Aya",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "NemotronForCausalLM": "Minitron 4B, 8B, Nemotron-4",
    "NemotronHForCausalLM": "Nemotron 3 Nano 30B-A3B, Nemotron-H 4B, 8B, 47B, 56B",
    "FalconH1ForCausalLM": "Falcon-H1 0.5B to 34B",
    "PhiForCausalLM": "Phi-1, 1.5, 2",
    "GPT2LMHeadModel": "GPT-2 124M to 1.5B, DistilGPT-2",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX-20B",
    "GptOssForCausalLM": "gpt-oss-20b, -120b",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    "Llama4ForCausalLM": "Llama 4 Scout, Maverick (text)",
    "MellumForCausalLM": "Mellum 2 12B-A2.5B",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "OlmoeForCausalLM": "OLMoE 1B-7B",
    "FlexOlmoForCausalLM": "FlexOlmo 7x7B",
    "GraniteMoeForCausalLM": "Granite 3.x 1B-A400M, 3B-A800M",
    "GraniteMoeSharedForCausalLM": "Granite mixtures with a shared expert",
    "GraniteMoeSWAForCausalLM": "Granite Swash 3B-A600M",
    "GraniteMoeHybridForCausalLM": "Granite 4.0",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "Glm4MoeForCausalLM": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    "Dots1ForCausalLM": "dots.llm1",
    "MiniMaxM2ForCausalLM": "MiniMax-M2, M2.1",
    "SolarOpenForCausalLM": "Solar-Open-100B",
    "ExaoneMoeForCausalLM": "K-EXAONE-236B-A23B",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B, 1.8B, 4B, 7B, Hunyuan-MT",
    "HunYuanMoEV1ForCausalLM": "Hunyuan-A13B",
    "DeepseekV2ForCausalLM": "DeepSeek V2, V2-Lite, Coder-V2",
    "DeepseekV3ForCausalLM": "DeepSeek V3, R1, V3.1",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "MiniCPM3ForCausalLM": "MiniCPM3-4B",
    "Lfm2ForCausalLM": "LFM2, LFM2.5 350M to 2.6B",
    "Lfm3ForCausalLM": "LFM3-1.7B (text)",
    "Lfm2MoeForCausalLM": "LFM2-8B-A1B",
    "Qwen3_5ForCausalLM": "Qwen3.5, 3.6-27B, 3.8-27B (text)",
    "Qwen3_5MoeForCausalLM": "Qwen3.5-35B-A3B and larger, Qwen3.6-35B-A3B (text)",
    "Qwen3NextForCausalLM": "Qwen3-Next-80B-A3B",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5 0.8B to 27B, 3.6-27B, 3.8-27B",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-35B-A3B and larger, Qwen3.6-35B-A3B",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL 2B to 32B, Qwen3-VL-Embedding 2B, 8B",
    "Qwen3VLModel": "Qwen3-VL-Embedding as sentence-transformers saves it",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL 30B-A3B, 235B-A22B",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2, Ministral 3",
    "LlavaForConditionalGeneration": "Pixtral-12B",
    "Lfm2VlForConditionalGeneration": "LFM2-VL, LFM2.5-VL 450M to 3B",
    "InternVLForConditionalGeneration": "InternVL 3, 3.5 with Qwen's text models",
    "Gemma4ForConditionalGeneration": "Gemma 4 E2B, E4B, 26B-A4B, 31B",
    "Gemma4UnifiedForConditionalGeneration": "Gemma 4 12B",
    "Gemma3nForConditionalGeneration": "Gemma 3n E2B, E4B",
    "EmbeddingGemma2Model": "EmbeddingGemma 2",
    "Llama4ForConditionalGeneration": "Llama 4 Scout, Maverick",
    "Idefics3ForConditionalGeneration": "SmolVLM-256M, -500M, -2.2B",
    "SmolVLMForConditionalGeneration": "SmolVLM2",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B",
    "Bert": "bge, e5, gte, all-MiniLM, mxbai-embed; rerankers",
    "Roberta": "RoBERTa embeddings and rerankers",
    "XLMRoberta": "bge-m3 (dense), multilingual-e5, bge-reranker",
    "Camembert": "CamemBERT embeddings and rerankers",
    "NomicBert": "nomic-embed-text 1, 1.5",
    "JinaEmbeddingsV3": "jina-embeddings-v3 (-hf), with its tasks' adapters",
    "ModernBert": "gte-modernbert, modernbert-embed; rerankers",
}


class KnownModel(msgspec.Struct, frozen=True):
    """What runs of the models with one name in config.json."""

    models: str
    architecture: str
    files: str
    images: bool
    adapters: str  # which matrices LoRA may change: "all", "not experts" or "no"
    mtp: bool  # files may have layers for multi-token prediction, or there are assistants: they can draft
    level: str


def known_models() -> list[KnownModel]:
    """Return one entry for each name of the registry, decoders first."""
    return [*_decoders(), *_with_images(), *_encoders()]


def _decoders() -> Iterator[KnownModel]:
    for name, row in ARCHITECTURES.items():
        yield _entry(name, row, _files(row))


def _with_images() -> Iterator[KnownModel]:
    seen: dict[str, tuple[str, str | None]] = {}
    seen |= {name: (row.text_architecture, row.gguf) for row in VISION_ROWS for name in row.names}
    seen |= {name: (TEXT_PARTS[name][0], row.gguf) for name, row in GRID_ARCHITECTURES.items()}
    for name, (text, projector) in {**{name: (texts[0], None) for name, texts in TEXT_PARTS.items()}, **seen}.items():
        row, _ = FORMS[text]
        files = _files_with_projector(TEXT_PARTS.get(name, (text,)), projector) if projector else "safetensors"
        yield _entry(name, row, files, images=name in seen)


def _encoders() -> Iterator[KnownModel]:
    for row in ENCODERS:
        files = "safetensors" if row.gguf is None else f"safetensors, GGUF {row.gguf}"
        yield KnownModel(PUBLISHED.get(row.stem, ""), f"{row.stem}Model", files, False, "all", False, "L2")


def _entry(name: str, row: Architecture, files: str, *, images: bool = False) -> KnownModel:
    adapters = "all" if row.experts is None else "not experts"
    if row.latent or row.has_streams:
        adapters = "no"
    return KnownModel(
        models=PUBLISHED.get(name, ""),
        architecture=name,
        files=files,
        images=images,
        adapters=adapters,
        mtp=row.mtp is not None or row.name in ASSISTANTS.values(),
        level="L2",
    )


def _files_with_projector(texts: Sequence[str], projector: str) -> str:
    """Return the files of a model with images. texts: names of architectures. projector: llama.cpp's name."""
    own = {name for text in texts for name in (ARCHITECTURES[text].gguf, *ARCHITECTURES[text].gguf_others)}
    kinds = PROJECTOR_KINDS[projector].texts
    return f"safetensors, GGUF {', '.join([kind for kind in kinds if kind in own] or kinds)}"


def _files(row: Architecture) -> str:
    names = [] if row.gguf is None else [row.gguf]
    names += row.gguf_others
    if row.experts is not None and row.experts.gguf is not None and row.experts.gguf not in names:
        names.append(f"{row.experts.gguf} with experts")
    return f"safetensors, GGUF {', '.join(names)}" if names else "safetensors"
