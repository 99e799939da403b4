"""What GGUF files of encoders with grids of patches have in common: sizes of blocks, and names of tensors."""

from collections.abc import Mapping
from typing import TypedDict

from core.model_files.settings.values import Values


class BlockSizes(TypedDict):
    """Fields of GridParts: the sizes of blocks, but for the MLP's, and that of a patch."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int


def block_sizes(values: Values) -> BlockSizes:
    """Return the sizes. Errors: ModelFileError; also for heads whose numbers are no pairs for two axes."""
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    if width % heads or width // heads % 4:
        values.fail("hidden_size", f"must be a multiple of 4 * {values.key('num_attention_heads')}={4 * heads}")
    return BlockSizes(
        hidden_size=width,
        num_hidden_layers=values.integer("num_hidden_layers"),
        num_attention_heads=heads,
        patch_size=values.integer("patch_size"),
    )


def tensor_name(name: str, names: Mapping[str, str]) -> str:
    """Return the file's name of a tensor of grid_shapes(). names: of what is in a block, and of all else."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".")
        return f"v.blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"
