"""GridParts: the properties of an encoder for images of any size, whose patches form a grid. Pure data."""

from typing import Literal

import msgspec

GridActivation = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"]


class PooledParts(msgspec.Struct, frozen=True, kw_only=True):
    """What differs in an encoder whose rows are means of patches (core/models/pooled_encoder.py).

    Its layers are as those of Gemma 4's text: norms before and behind attention and MLP, and of heads.
    """

    num_key_value_heads: int
    head_dim: int
    positions_per_axis: int  # rows of each of two tables: of a patch's column, and of its row
    clips: bool  # what each product of a layer reads and yields is kept within bounds
    standardizes: bool  # rows are shifted and scaled, each number by its own


class GridParts(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of patches, and what joins merge_size x merge_size of them to one row for the text model.

    Heads are rotated by a patch's row and column, unless rope_theta is 0. Patches are in the order of the rows that
    they become.
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
    #: Pixel for pixel, as an image is resized: a patch's position is a mean of those that it covers.
    averages_positions: bool = False
    colours_last: bool = False  # safetensors files have the numbers of a patch pixel by pixel
    window: int = 0  # side of the windows in which layers attend, in rows; 0 = all layers see the whole image
    full_layers: tuple[int, ...] = ()  # indices of the layers that see the whole image; without a window all do
    has_biases: bool = True  # of products, but not of `merge_first`
    patch_norm: bool = False  # patches are normalised before the layers
    #: Rows turn a head by its even frequencies, columns by the odd ones; otherwise both do by the even ones.
    alternates: bool = False
    split_qkv: bool = False  # files have Q, K and V as matrices of their own
    merge_first: bool = False  # one more product, without an activation, makes a patch of those that are merged
    #: Patches are not normalised before they become rows, by products with biases whose results have a row's width.
    plain_merger: bool = False
    merger_size: int = 0  # numbers between the two products that make a row; 0 = those of merged patches
    normalizes_merged: bool = False  # merged patches are normalised once more, together
    merger_eps: float | None = None  # of the norm before merging; None = norm_eps
    #: Each row of an image but the last one ends with the text model's embedding of a token.
    breaks_rows: bool = False
    pooled: PooledParts | None = None  # None: merged patches are concatenated, and two products make a row of them
    sees_whole: bool = False  # tokens of an image see each other in the text model's layers with a window
    turns_by_place: bool = True  # an image's tokens have three positions in the text model; otherwise one each
    #: Indices of layers after which rows are made too. Those are added to the hidden states of the text model's first
    #: layers.
    deep_layers: tuple[int, ...] = ()
    image_mean: tuple[float, float, float]  # per colour, after rescale_factor
    image_std: tuple[float, float, float]
    rescale_factor: float
    scales_at_once: bool = False  # see pixel_values()

    @property
    def unit(self) -> int:
        """Return the height and width of the pixels that become one row."""
        return self.patch_size * self.merge_size

    @property
    def joined_size(self) -> int:
        """Return the width of merged patches."""
        return self.hidden_size * self.merge_size**2

    @property
    def layer_products(self) -> int:
        """Return the multiplications of a patch in the products of a layer."""
        width, heads = self.hidden_size, 4 * self.hidden_size
        if self.pooled is not None:
            heads = 2 * self.pooled.head_dim * (self.num_attention_heads + self.pooled.num_key_value_heads)
        return width * (heads + (2 + self.is_gated) * self.intermediate_size)

    @property
    def patch_numbers(self) -> int:
        """Return how many numbers the encoder reads of a patch."""
        return 3 * self.frames * self.patch_size**2


def grid_shapes(parts: GridParts, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use. hidden_size: the text model's."""
    if parts.pooled is not None:
        return _pooled_shapes(parts, parts.pooled, hidden_size)
    width, inner, patch = parts.hidden_size, parts.intermediate_size, parts.patch_size

    def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.{kind}": (size,) for kind in (("weight", "bias") if parts.is_centred else ("weight",))}

    def product(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if parts.has_biases else {})

    def merger(stem: str) -> dict[str, tuple[int, ...]]:
        if parts.plain_merger:
            sizes = {"first": (hidden_size, parts.joined_size), "second": (hidden_size, hidden_size)}
            weights = {f"{stem}.{name}.weight": shape for name, shape in sizes.items()}
            return weights | {f"{stem}.{name}.bias": (hidden_size,) for name in sizes}
        if parts.merge_first:
            first = product(f"{stem}.first", hidden_size, width)
            return (
                {f"{stem}.merge.weight": (width, parts.joined_size)}
                | first
                | product(f"{stem}.second", hidden_size, hidden_size)
            )
        inside = parts.merger_size or parts.joined_size
        first = product(f"{stem}.first", inside, parts.joined_size)
        together = norm(f"{stem}.norm", parts.joined_size) if parts.normalizes_merged else {}
        return together | first | product(f"{stem}.second", hidden_size, inside)

    frames = (parts.frames,) if parts.frames > 1 else ()
    shapes: dict[str, tuple[int, ...]] = {"patches.weight": (width, 3, *frames, patch, patch)}
    if parts.patch_bias:
        shapes["patches.bias"] = (width,)
    if parts.patch_norm:
        shapes |= norm("patch_norm", width)
    if parts.positions_per_side:
        shapes["positions.weight"] = (parts.positions_per_side**2, width)
    for layer in range(parts.num_hidden_layers):
        stem = f"layers.{layer}."
        shapes |= norm(f"{stem}attention_norm", width) | norm(f"{stem}mlp_norm", width)
        for name in "qkv" if parts.split_qkv else ():
            shapes |= product(f"{stem}{name}", width, width)
        if not parts.split_qkv:
            shapes |= product(f"{stem}qkv", 3 * width, width)
        shapes |= product(f"{stem}o", width, width)
        if parts.is_gated:
            shapes |= product(f"{stem}gate", inner, width)
        shapes |= product(f"{stem}up", inner, width) | product(f"{stem}down", width, inner)
    shapes |= ({} if parts.plain_merger else norm("norm", width)) | merger("merger")
    for index in range(len(parts.deep_layers)):
        shapes |= norm(f"deep.{index}.norm", parts.joined_size) | merger(f"deep.{index}")
    return shapes | ({"break.weight": (hidden_size,)} if parts.breaks_rows else {})


#: The bounds of a product of an encoder that clips.
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _pooled_shapes(parts: GridParts, pooled: PooledParts, hidden_size: int) -> dict[str, tuple[int, ...]]:
    width, inner, patch = parts.hidden_size, parts.intermediate_size, parts.patch_size
    queries, keys = (heads * pooled.head_dim for heads in (parts.num_attention_heads, pooled.num_key_value_heads))
    products = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    products = {f"self_attn.{name}_proj": shape for name, shape in products.items()}
    products |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    norms = {f"self_attn.{name}_norm": pooled.head_dim for name in "qk"} | {"post_attention_layernorm": width}
    norms |= {f"{name}_feedforward_layernorm": width for name in ("pre", "post")}
    shapes: dict[str, tuple[int, ...]] = {
        "patches.weight": (width, 3, patch, patch),
        "positions.weight": (2, pooled.positions_per_axis, width),
    }
    for layer in range(parts.num_hidden_layers):
        stem = f"layers.{layer}."
        shapes[f"{stem}input_layernorm.weight"] = (width,)
        for name, shape in products.items():
            shapes[f"{stem}{name}.weight"] = shape
            shapes |= {f"{stem}{name}.{bound}": (1,) for bound in BOUNDS if pooled.clips}
        shapes |= {f"{stem}{name}.weight": (size,) for name, size in norms.items()}
    if pooled.standardizes:
        shapes |= {"standard.bias": (width,), "standard.weight": (width,)}
    return shapes | {"projection.weight": (hidden_size, width)}
