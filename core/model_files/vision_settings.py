"""The vision side of a model's config.json: which models have one, and its sizes."""

from typing import Any, get_args

from core.model_files.values import Values
from core.models.vision_parts import VisionActivation, VisionParts
from ipc.messages import MAX_CLIENT_MESSAGE_BYTES

#: Names in config.json's architectures of models with images; their text's model is a Llama.
VISION_ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
#: The file that says how pixels become numbers.
PROCESSOR_FILE = "preprocessor_config.json"
_MAX_IMAGE_BYTES = MAX_CLIENT_MESSAGE_BYTES - 4096  # a client puts each into a message
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
}


def has_vision(values: Values) -> bool:
    """Return whether a config.json names a model with images."""
    names = values.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]) in VISION_ARCHITECTURES


def text_values(values: Values) -> Values:
    """Return the settings of the text's model. Errors: ModelFileError, UnsupportedModelError."""
    text = values.group("text_config")
    if text is None:
        values.fail("text_config", "is missing; expected the settings of the text's model")
    if text.get("model_type") not in (None, "llama"):
        text.refuse("model_type", "'llama' is")
    own = {"tie_word_embeddings": values.boolean("tie_word_embeddings"), "architectures": ["LlamaForCausalLM"]}
    for name in ("dtype", "torch_dtype"):
        if text.get(name) is None and values.get(name) is not None:
            own[name] = values.get(name)
    if text.boolean("qk_layer_norms"):
        text.refuse("qk_layer_norms", "only false is")
    text.values = {"rms_norm_eps": 1e-5, **text.values, **own}
    return text


def read_vision(values: Values, processor: Values) -> VisionParts:
    """Return the vision encoder that a config.json describes. processor: of PROCESSOR_FILE, empty without one.

    Errors: ModelFileError, UnsupportedModelError.
    """
    group = values.group("vision_config") or Values({}, values.source)
    vision = Values({**_DEFAULTS, **group.values}, values.source, prefix="vision_config.")
    if vision.get("hidden_act") not in get_args(VisionActivation):
        vision.refuse("hidden_act", f"{' and '.join(map(repr, get_args(VisionActivation)))} are")
    if vision.get("num_channels") not in (None, 3):
        vision.refuse("num_channels", "3 is")
    sizes = {name: vision.integer(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = vision.integer("num_attention_heads")
    image, patch, factor = vision.integer("image_size"), vision.integer("patch_size"), values.integer("scale_factor", 2)
    if sizes["hidden_size"] % heads:
        vision.fail("hidden_size", f"must be a multiple of num_attention_heads={heads}, got {sizes['hidden_size']}")
    if image % patch or (image // patch) % factor:
        vision.fail("image_size", f"must be a multiple of patch_size * scale_factor = {patch * factor}, got {image}")
    if 3 * image**2 > _MAX_IMAGE_BYTES:
        vision.fail("image_size", f"images of {image} x {image} pixels do not fit a message")
    return VisionParts(
        **sizes,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        layer_norm_eps=vision.number("layer_norm_eps", 0.0, 1.0, 1e-6),
        hidden_act=vision.get("hidden_act"),
        scale_factor=factor,
        image_mean=_colours(processor, "image_mean"),
        image_std=_colours(processor, "image_std"),
        rescale_factor=processor.number("rescale_factor", 1e-6, 1.0, 1 / 255),
    )


def _colours(processor: Values, name: str) -> tuple[float, float, float]:
    value = processor.get(name)
    if value is None:
        return (0.5, 0.5, 0.5)
    is_three = isinstance(value, list) and len(value) == 3
    if not is_three or any(type(one) not in (int, float) or not 1e-6 < one < 1e6 for one in value):
        processor.fail(name, f"must be three positive numbers, got {value!r:.80}")
    return (float(value[0]), float(value[1]), float(value[2]))
