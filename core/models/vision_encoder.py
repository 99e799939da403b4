"""VisionEncoder: computes embeddings from the pixels of images (SigLIP), on the C kernels.

Each image is computed alone, so its rows are a function of its pixels only. Patches are the tokens, given by their
embeddings.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from core.models.config import EncoderParts, HeadSizes, ModelConfig
from core.models.encoder_run import EncoderInParts, LayersInBlocks, Pieces, plain_layer, runs_of
from core.models.grid_parts import GridParts
from core.models.layers.layer import Layer
from core.models.layers.mixers import Mixer
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.weight_parts import WeightParts
from core.models.pixel_values import pixel_values
from core.models.vision_parts import VisionParts
from ipc.errors import InvalidRequestError
from ipc.tables.arrays import Floats, Ints, UInt8s
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats

_JOINED_EPS = 1e-5  # of the norm of concatenated patches


class VisionEncoder(EncoderInParts):
    """The weights and the forward pass of one model's vision encoder."""

    any_size = False

    def __init__(
        self,
        parts: VisionParts,
        hidden_size: int,
        weights: Iterable[tuple[str, Weight]],
        dtype: Dtype,
        *,
        library: CpuLibrary,
    ) -> None:
        """Pack the weights. hidden_size: the text model's. weights: as in vision_shapes(), preferably in its order."""
        self.parts, self._dtype, self._library = parts, dtype, library
        self.image_size, self.num_rows, self.sees_whole = parts.image_size, parts.num_rows, parts.sees_whole
        self.width = hidden_size
        files = WeightParts(weights)
        count = parts.num_tokens
        sizes = sizes_of(
            parts, eps=parts.layer_norm_eps, num_tokens=count, num_positions=count, norms_of_rows=parts.qk_norms
        )
        self._operations = operations = CpuOperations(sizes, dtype, library)
        patches = files.take_matrix("patches.weight")
        self._patches = operations.linear(patches, files.take("patches.bias"), out_dtype=FLOAT32)
        table = to_floats(files.take_matrix("positions.weight").dense(dtype))
        self._positions = table[position_ids(parts.patches_per_side)] if parts.finds_positions else table
        self._first = np.zeros((0, parts.hidden_size), np.float32)
        if parts.first_token:
            self._first = to_floats(files.take_matrix("first.weight").dense(dtype)) + table[:1]
            self._positions = np.ascontiguousarray(table[1:])
        layers = [self._layer(files, f"layers.{index}.") for index in range(parts.num_hidden_layers)]
        heads = parts.num_attention_heads
        self._layers = LayersInBlocks(layers, operations, heads, heads)
        self._last_norm = CpuNorm(library, None, parts.layer_norm_eps, FLOAT32)
        if parts.final_norm:
            self._last_norm = self._norm(files, "norm", FLOAT32)
        self._join = self._make_join(files)
        self._connector = self._make_connector(files)
        self._pixels = pixel_values(parts.image_mean, parts.image_std, parts.rescale_factor)
        self._run = runs_of(np.array([count]))

    def _make_join(self, files: WeightParts) -> Callable[[Floats], Numbers]:
        """Return the function that joins patches [n, width] float32 to rows of the model's dtype."""
        parts, dtype = self.parts, self._dtype
        side, factor = parts.patches_per_side, parts.scale_factor
        if parts.join == "shuffle":
            return lambda hidden: rounded(_shuffled(hidden, side, factor), dtype)
        if parts.join == "norm and MLP":
            own, bias = files.take("connector_norm.weight"), files.take("connector_norm.bias")
            centred = CpuNorm(self._library, own, _JOINED_EPS, dtype, bias=bias, is_centred=True)
            first = self._operations.linear(
                files.take_matrix("connector.weight"), files.take("connector.bias"), activation="gelu"
            )
            return lambda hidden: first(centred(_shuffled(hidden, side, factor)))
        weight = files.take("connector_norm.weight") + np.float32(1)
        norm = CpuNorm(self._library, weight, parts.layer_norm_eps, dtype)
        return lambda hidden: norm(_means(hidden, side, factor))

    def _make_connector(self, files: WeightParts) -> PackedMatrix:
        """Return the product that ends in the rows."""
        if self.parts.join == "norm and MLP":
            matrix, bias = files.take_matrix("connector_out.weight"), files.take("connector_out.bias")
            return self._operations.linear(matrix, bias, out_dtype=FLOAT32)
        connector = files.take_matrix("connector.weight")
        if self.parts.join == "mean and norm":
            connector = StoredMatrix.of(np.ascontiguousarray(connector.dense(self._dtype).T))
        return self._operations.linear(connector, out_dtype=FLOAT32)

    def _norm(self, files: WeightParts, name: str, dtype: Dtype) -> CpuNorm:
        weight, is_centred = files.take(f"{name}.weight"), name == "norm" or not self.parts.rms_norms
        bias, eps = files.take(f"{name}.bias") if is_centred else None, self.parts.layer_norm_eps
        return CpuNorm(self._library, weight, eps, dtype, bias=bias, is_centred=is_centred)

    def _layer(self, files: WeightParts, stem: str) -> Layer:
        parts, operations = self.parts, self._operations

        def product(*names: str, activates: bool = False, scale: str = "") -> PackedMatrix:
            weight = files.take_matrix(*(f"{stem}{name}.weight" for name in names))
            has_bias = parts.qkv_bias or len(names) == 1
            bias = files.take(*(f"{stem}{name}.bias" for name in names)) if has_bias else None
            if scale and parts.branch_scales and bias is not None:
                factors = files.take(f"{stem}{scale}_scale.weight")
                numbers = to_floats(weight.dense(FLOAT32)) * factors[:, None]
                weight, bias = StoredMatrix.of(rounded(numbers, self._dtype)), bias * factors
            return operations.linear(weight, bias, activation=parts.hidden_act if activates else None)

        dtype = self._dtype
        before, mlp_norm = (
            self._norm(files, f"{stem}attention_norm", dtype),
            self._norm(files, f"{stem}mlp_norm", dtype),
        )
        norms = None
        if parts.qk_norms:
            norms = files.take(f"{stem}q_norm.weight", f"{stem}k_norm.weight")
            norms = np.ascontiguousarray(norms.reshape(2 * parts.num_attention_heads, -1))
        qkv, o = product("q", "k", "v"), product("o", scale="attention")
        mixer = Mixer(qkv, operations.attention(0, norms), o, 0)
        return plain_layer(0, (before, mlp_norm), mixer, product("up", activates=True), product("down", scale="mlp"))

    @property
    def variant(self) -> str:
        """Return the names of the kernels in use; part of the fingerprint."""
        return f"vision={self._patches.variant} {self._operations.variant}"

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (num_rows, 0): rows of a square have one position each. Errors: InvalidRequestError."""
        expected = [self.image_size, self.image_size, 3]
        if list(shape) != expected:
            raise InvalidRequestError(f"images for this model must have the shape {expected}; got {list(shape)}")
        return self.num_rows, 0

    def pixel_bytes(self, num_rows: int) -> int:
        """Return the bytes of the pixels of an image with so many rows; 0 if no image has."""
        return 3 * self.image_size**2 if num_rows == self.num_rows else 0

    def work(self, num_rows: int) -> int:
        """Return about how many multiplications an image takes."""
        return self._layers.work(self.parts.layer_products, self.parts.hidden_size, [self._run])

    def pieces(self, pixels: UInt8s) -> Pieces:
        """Compute the rows [num_rows, hidden] float32 of an image [image_size, image_size, 3]."""
        side, patch = self.parts.patches_per_side, self.parts.patch_size
        values = self._pixels[np.arange(3), pixels]
        cut = values.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3).reshape(side * side, -1)
        patches = to_floats(self._patches(rounded(cut, self._dtype))) + self._positions
        hidden = np.concatenate((self._first, patches))
        yield from self._layers.run(hidden, [self._run], None)
        last = to_floats(self._last_norm(hidden))[len(self._first) :]
        rows: Floats = to_floats(self._connector(self._join(last)))
        return rows


def position_ids(side: int) -> Ints:
    """Return the rows [side * side] of the position table for an image's patches, found as in Idefics3.

    It compares each patch's relative position in the image with those of the table, in float32.
    """
    fractions = np.minimum(np.arange(side, dtype=np.float32) * np.float32(1 / side), np.float32(1.0 - 1e-6))
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    places = np.searchsorted(bounds, fractions, side="right")
    ids: Ints = (places[:, None] * side + places).reshape(-1)
    return ids


def _shuffled(hidden: Floats, side: int, factor: int) -> Floats:
    """Return rows [n / factor**2, factor**2 * width] of patches [n, width]: factor x factor patches become one row."""
    width, few = hidden.shape[1], side // factor
    squares = hidden.reshape(few, factor, few, factor * width).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(squares).reshape(few * few, factor * factor * width)


def _means(hidden: Floats, side: int, factor: int) -> Floats:
    """Return the means [n / factor**2, width] of factor x factor patches of [n, width], summed in order."""
    few, width = side // factor, hidden.shape[1]
    squares = hidden.reshape(side, side, width)[: few * factor, : few * factor].reshape(few, factor, few, factor, width)
    total = np.zeros((few, few, width), np.float32)
    for row in range(factor):
        for column in range(factor):
            total += squares[:, row, :, column]
    total *= np.float32(1 / factor**2)
    return total.reshape(few * few, width)


def sizes_of(
    parts: VisionParts | GridParts,
    *,
    eps: float,
    num_tokens: int,
    num_positions: int,
    rope_theta: float = 10_000.0,
    heads: HeadSizes | None = None,
    scores_scalar: float | None = None,
    norms_of_rows: bool = False,
) -> ModelConfig:
    """Return the sizes that operations need of an encoder, as those of a model.

    num_tokens: of the largest image. num_positions: of the table of positions; 1 = there is none. heads: of K and V,
    None = they are as many as queries. scores_scalar: see ModelConfig.query_pre_attn_scalar. norms_of_rows: Q's heads
    are normalised together, and so are K's.
    """
    own = heads or HeadSizes(parts.num_attention_heads, parts.hidden_size // parts.num_attention_heads)
    return ModelConfig(
        architecture="vision",
        vocab_size=1,
        hidden_size=parts.hidden_size,
        intermediate_size=parts.intermediate_size,
        num_hidden_layers=parts.num_hidden_layers,
        num_attention_heads=parts.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        query_pre_attn_scalar=scores_scalar,
        qk_norm_of_rows=norms_of_rows,
        rms_norm_eps=eps,
        rope_theta=rope_theta,
        max_position_embeddings=num_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        dtype="float32",
        has_head=False,
        encoder=EncoderParts(num_positions=num_positions, norms_follow=False),
    )
