"""The text model of checkpoints whose images are not supported: its settings and its tensors."""

from collections.abc import Mapping

from core.model_files.settings.values import Values
from core.model_files.tensors.stored_tensor import StoredTensor
from core.models.architectures.by_name import ARCHITECTURES

#: Name in config.json's architectures -> those that the text model may have.
TEXT_PARTS: dict[str, tuple[str, ...]] = {
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM",),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM",),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM",),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM",),
    "Qwen3VLModel": ("Qwen3Model",),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM",),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM",),
    "Mistral3ForConditionalGeneration": ("Ministral3ForCausalLM", "MistralForCausalLM"),
    "LlavaForConditionalGeneration": ("MistralForCausalLM",),
    "InternVLForConditionalGeneration": ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM",),
    "Gemma3nForConditionalGeneration": ("Gemma3nForCausalLM",),
    "Gemma4UnifiedForConditionalGeneration": ("Gemma4UnifiedForCausalLM",),
    "EmbeddingGemma2Model": ("EmbeddingGemma2TextModel",),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM",),
    "Lfm2VlForConditionalGeneration": ("Lfm2ForCausalLM",),
}
#: The first configs of these have the text settings among the others, not in text_config.
_FLAT = ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration")
#: Settings of the whole model that its text model uses, unless text_config has its own.
SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
#: Defaults of text settings that differ from those of the text model by itself.
_DEFAULTS = {"Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True}}
#: Name prefixes in safetensors -> those in the text model.
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_TEXT |= {"language_model.": "model."}
_IMAGES = tuple(
    f"{stem}{part}."
    for stem in ("", "model.")
    for part in (
        *("visual", "vision_tower", "vision_embedder", "multi_modal_projector", "embed_vision"),
        *("audio_tower", "embed_audio", "vision_model"),
    )
)


def text_part(values: Values) -> Values | None:
    """Return the settings of the text model, or None for a config.json that names no such checkpoint.

    Errors: ModelFileError if they are missing; UnsupportedModelError for an unsupported text model.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in TEXT_PARTS:
        return None
    text = values.group("text_config")
    if text is None and str(names[0]) in _FLAT:
        text = values
    if text is None:
        values.fail("text_config", "is missing; expected the settings of the text model")
    own = {name: values.get(name) for name in SHARED if text.get(name) is None and values.get(name) is not None}
    if values.get("tie_word_embeddings") is not None:  # the head belongs to the whole model
        own["tie_word_embeddings"] = values.get("tie_word_embeddings")
    text.values = {
        **_DEFAULTS.get(str(names[0]), {}),
        **text.values,
        **own,
        "architectures": [_text_model(text, TEXT_PARTS[str(names[0])])],
    }
    _with_one_position(text)
    return text


def _text_model(text: Values, names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return names[0]
    by_type = {ARCHITECTURES[name].model_type: name for name in names}
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in by_type:
        text.refuse("model_type", f"{' and '.join(map(repr, by_type))} are")
    return by_type[kind]


def _with_one_position(text: Values) -> None:
    """Use the rotation for text alone: a text token has one position, whereas an image token has three."""
    for group in ("rope_scaling", "rope_parameters"):
        rope = text.get(group)
        if isinstance(rope, dict):
            text.values[group] = {name: "default" if value == "mrope" else value for name, value in rope.items()}


def without_images(found: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """Return the tensors of the text model under its names, without those for images."""
    if not any(architecture in names for names in TEXT_PARTS.values()):
        return dict(found)
    kept: dict[str, StoredTensor] = {}
    for name, stored in found.items():
        if not name.startswith(_IMAGES):
            stem = next((each for each in _TEXT if name.startswith(each)), "")
            kept[_TEXT.get(stem, "") + name.removeprefix(stem)] = stored
    return kept
