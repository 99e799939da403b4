"""GridParts: the properties of an encoder for images of any size, whose patches form a grid. Pure data."""

from typing import Literal

import msgspec

GridActivation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"]


class GridParts(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of patches, and what joins merge_size x merge_size of them to one row for the text model.

    Heads are rotated by a patch's row and column. Patches are in the order of the rows that they become.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int  # height and width of a patch, in pixels
    frames: int  # each patch is given so many times, as a video that stands still
    merge_size: int
    max_rows: int  # of an image
    norm_eps: float
    is_centred: bool  # norms are layer normalisations; otherwise RMS norms
    hidden_act: GridActivation
    is_gated: bool  # MLPs have gates
    patch_bias: bool
    rope_theta: float
    positions_per_side: int = 0  # of a square table of positions, stretched over the image; 0 = none
    window: int = 0  # side of the windows in which layers attend, in rows; 0 = all layers see the whole image
    full_layers: tuple[int, ...] = ()  # indices of the layers that see the whole image; without a window all do
    #: Indices of layers after which rows are made too. Those are added to the hidden states of the text model's first
    #: layers.
    deep_layers: tuple[int, ...] = ()
    image_mean: tuple[float, float, float]  # per colour, after rescale_factor
    image_std: tuple[float, float, float]
    rescale_factor: float

    @property
    def unit(self) -> int:
        """Return the height and width of the pixels that become one row."""
        return self.patch_size * self.merge_size

    @property
    def joined_size(self) -> int:
        """Return the width of merged patches."""
        return self.hidden_size * self.merge_size**2

    @property
    def patch_numbers(self) -> int:
        """Return how many numbers the encoder reads of a patch."""
        return 3 * self.frames * self.patch_size**2


def grid_shapes(parts: GridParts, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use. hidden_size: the text model's."""
    width, inner, patch = parts.hidden_size, parts.intermediate_size, parts.patch_size

    def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.{kind}": (size,) for kind in (("weight", "bias") if parts.is_centred else ("weight",))}

    def product(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def merger(stem: str) -> dict[str, tuple[int, ...]]:
        first = product(f"{stem}.first", parts.joined_size, parts.joined_size)
        return first | product(f"{stem}.second", hidden_size, parts.joined_size)

    shapes: dict[str, tuple[int, ...]] = {"patches.weight": (width, 3, parts.frames, patch, patch)}
    if parts.patch_bias:
        shapes["patches.bias"] = (width,)
    if parts.positions_per_side:
        shapes["positions.weight"] = (parts.positions_per_side**2, width)
    for layer in range(parts.num_hidden_layers):
        stem = f"layers.{layer}."
        shapes |= norm(f"{stem}attention_norm", width) | norm(f"{stem}mlp_norm", width)
        shapes |= product(f"{stem}qkv", 3 * width, width) | product(f"{stem}o", width, width)
        if parts.is_gated:
            shapes |= product(f"{stem}gate", inner, width)
        shapes |= product(f"{stem}up", inner, width) | product(f"{stem}down", width, inner)
    shapes |= norm("norm", width) | merger("merger")
    for index in range(len(parts.deep_layers)):
        shapes |= norm(f"deep.{index}.norm", parts.joined_size) | merger(f"deep.{index}")
    return shapes
