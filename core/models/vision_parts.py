"""VisionParts: the properties of the part of a model that computes embeddings from pixels. Pure data."""

from typing import Literal

import msgspec

VisionActivation = Literal["gelu", "gelu_pytorch_tanh"]
#: How scale_factor x scale_factor patches become one row: concatenated (Idefics3), or their normalised mean (Gemma 3),
#: before a product; or concatenated and normalised, before an MLP with biases (InternVL).
VisionJoin = Literal["shuffle", "mean and norm", "norm and MLP"]


class VisionParts(msgspec.Struct, frozen=True, kw_only=True):
    """A vision encoder like SigLIP's and what connects it to the text model, with transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int  # height and width of an image, in pixels
    patch_size: int  # of a patch
    layer_norm_eps: float
    hidden_act: VisionActivation
    scale_factor: int  # this many patches in each direction become one row
    join: VisionJoin
    finds_positions: bool  # see VisionArchitecture
    sees_whole: bool  # see VisionArchitecture
    image_mean: tuple[float, float, float]  # per colour, after rescale_factor
    image_std: tuple[float, float, float]
    rescale_factor: float
    #: A token that is no patch comes before the patches, with a position of its own. No row is made of it.
    first_token: bool = False
    branch_scales: bool = False  # what attention and MLP add is multiplied, number by number
    qkv_bias: bool = True
    rms_norms: bool = False  # before attention and MLP, in place of layer normalisations
    qk_norms: bool = False  # Q's heads are normalised together, and so are K's, by RMS norms
    final_norm: bool = True  # after the last layer

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the layers see of an image."""
        return self.patches_per_side**2 + self.first_token

    @property
    def patches_per_side(self) -> int:
        """Return the number of patches in a row and in a column of an image."""
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """Return the number of rows that an image becomes."""
        return (self.patches_per_side // self.scale_factor) ** 2

    @property
    def layer_products(self) -> int:
        """Return the multiplications of a patch in the products of a layer."""
        return self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    @property
    def joined_size(self) -> int:
        """Return the width of a row before the connector's product, if patches are concatenated."""
        return self.hidden_size * self.scale_factor**2


def vision_shapes(parts: VisionParts, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use. hidden_size: the text model's."""
    width, inner, patch = parts.hidden_size, parts.intermediate_size, parts.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "patches.weight": (width, 3, patch, patch),
        "patches.bias": (width,),
        "positions.weight": (parts.num_tokens, width),
    }
    if parts.first_token:
        shapes["first.weight"] = (1, width)
    for layer in range(parts.num_hidden_layers):
        stem = f"layers.{layer}."
        for name in ("attention_norm", "mlp_norm"):
            shapes |= {f"{stem}{name}.{kind}": (width,) for kind in ("weight", "bias")[: 2 - parts.rms_norms]}
        shapes |= {f"{stem}{name}_norm.weight": (width,) for name in "qk" if parts.qk_norms}
        products = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
        products |= {"up": (inner, width), "down": (width, inner)}
        for name, shape in products.items():
            shapes[f"{stem}{name}.weight"] = shape
            shapes |= {f"{stem}{name}.bias": shape[:1]} if parts.qkv_bias or name not in "qkv" else {}
        if parts.branch_scales:
            shapes |= {f"{stem}{name}_scale.weight": (width,) for name in ("attention", "mlp")}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)} if parts.final_norm else {}
    if parts.join == "norm and MLP":
        shapes |= {f"connector_norm.{kind}": (parts.joined_size,) for kind in ("weight", "bias")}
        shapes |= {"connector.weight": (hidden_size, parts.joined_size), "connector.bias": (hidden_size,)}
        return shapes | {"connector_out.weight": (hidden_size, hidden_size), "connector_out.bias": (hidden_size,)}
    if parts.join == "mean and norm":  # files have this product's matrix as [in, out]
        return shapes | {"connector_norm.weight": (width,), "connector.weight": (width, hidden_size)}
    return shapes | {"connector.weight": (hidden_size, parts.joined_size)}
