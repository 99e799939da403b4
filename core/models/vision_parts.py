"""VisionParts: the properties of the part of a model that makes rows of embeddings from pixels. Pure data."""

import re
from typing import Literal

import msgspec

VisionActivation = Literal["gelu", "gelu_pytorch_tanh"]


class VisionParts(msgspec.Struct, frozen=True, kw_only=True):
    """A vision encoder of SigLIP's kind with Idefics3's connector, under transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int  # height and width of an image, pixels
    patch_size: int  # of a patch
    layer_norm_eps: float
    hidden_act: VisionActivation
    scale_factor: int  # so many patches in each direction become one row
    image_mean: tuple[float, float, float]  # of each colour, after rescale_factor
    image_std: tuple[float, float, float]
    rescale_factor: float

    @property
    def patches_per_side(self) -> int:
        """Patches in a row and in a column of an image."""
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """Rows that an image becomes."""
        return (self.patches_per_side // self.scale_factor) ** 2

    @property
    def shuffled_size(self) -> int:
        """Numbers of a row before the connector's product."""
        return self.hidden_size * self.scale_factor**2


def vision_shapes(parts: VisionParts, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use. hidden_size: of the text's model."""
    width, inner, patch = parts.hidden_size, parts.intermediate_size, parts.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "patches.weight": (width, 3, patch, patch),
        "patches.bias": (width,),
        "positions.weight": (parts.patches_per_side**2, width),
    }
    for layer in range(parts.num_hidden_layers):
        stem = f"layers.{layer}."
        for name in ("attention_norm", "mlp_norm"):
            shapes |= {f"{stem}{name}.weight": (width,), f"{stem}{name}.bias": (width,)}
        products = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
        products |= {"up": (inner, width), "down": (width, inner)}
        for name, shape in products.items():
            shapes |= {f"{stem}{name}.weight": shape, f"{stem}{name}.bias": shape[:1]}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return shapes | {"connector.weight": (hidden_size, parts.shuffled_size)}


#: Names in files of the weights of each side.
IS_VISION = re.compile(r"model\.(vision_model|connector)\..*")
IS_TEXT = re.compile(r"model\.text_model\..*|lm_head\.weight")
_NAMES = {
    "patches": "model.vision_model.embeddings.patch_embedding",
    "positions": "model.vision_model.embeddings.position_embedding",
    "norm": "model.vision_model.post_layernorm",
    "connector": "model.connector.modality_projection.proj",
}
_LAYER_NAMES = {
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def vision_file_name(name: str) -> str:
    """Return the name in files of one of the names of vision_shapes()."""
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.vision_model.encoder.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def text_name(name: str) -> str:
    """Return our name of a weight of the text's model by its name in files."""
    return name.replace("model.text_model.", "model.", 1)
