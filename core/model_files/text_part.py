"""The text's model of checkpoints whose images do not run here: its settings and its tensors."""

from collections.abc import Mapping

from core.model_files.stored_tensor import StoredTensor
from core.model_files.values import Values

#: Name in config.json's architectures -> that of the text's model.
TEXT_PARTS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_TEXT, _IMAGES = "model.language_model.", "model.visual."


def text_part(values: Values) -> Values | None:
    """Return the settings of the text's model; None for a config.json that names no such checkpoint.

    Errors: ModelFileError if they are missing.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in TEXT_PARTS:
        return None
    text = values.group("text_config")
    if text is None:
        values.fail("text_config", "is missing; expected the settings of the text's model")
    own = {"architectures": [TEXT_PARTS[str(names[0])]]}
    for name in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if text.get(name) is None and values.get(name) is not None:
            own[name] = values.get(name)
    text.values = {**text.values, **own}
    return text


def without_images(found: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """Return the tensors of the text's model under its names, without those of images."""
    if architecture not in TEXT_PARTS.values():
        return dict(found)
    kept = {name: stored for name, stored in found.items() if not name.startswith(_IMAGES)}
    return {name.replace(_TEXT, "model.", 1) if name.startswith(_TEXT) else name: kept[name] for name in kept}
