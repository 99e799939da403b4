"""GridImages: how an encoder for images of any size takes an image: its shape, and its patches in order."""

from collections.abc import Sequence

import numpy as np

from core.models.grid_parts import GridParts
from core.models.pixel_values import pixel_values
from ipc.errors import InvalidRequestError
from ipc.tables.arrays import Floats, Ints, UInt8s


class GridImages:
    """The images of one encoder. Patches that become one row follow each other."""

    any_size = True

    def __init__(self, parts: GridParts) -> None:
        self.parts = parts
        self.image_size, self.num_rows, self.sees_whole = parts.unit, parts.max_rows, parts.sees_whole
        self._pixels = pixel_values(
            parts.image_mean, parts.image_std, parts.rescale_factor, at_once=parts.scales_at_once
        )

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (rows, columns of their grid) of an image of this shape; 0 columns: its tokens have one position each.

        Errors: InvalidRequestError.
        """
        unit, most = self.parts.unit, self.parts.max_rows
        if len(shape) != 3 or shape[2] != 3 or shape[0] % unit or shape[1] % unit:
            expected = f"[height, width, 3] with multiples of {unit}"
            raise InvalidRequestError(f"images for this model must have the shape {expected}; got {list(shape)}")
        rows, columns = shape[0] // unit, shape[1] // unit
        count = rows * (columns + 1) - 1 if self.parts.breaks_rows else rows * columns
        if count > most:
            raise InvalidRequestError(
                f"an image of {shape[1]} x {shape[0]} pixels has {count} rows for this model; at most {most} are "
                "allowed"
            )
        return count, columns if self.parts.turns_by_place else 0

    def pixel_bytes(self, num_rows: int) -> int:
        """Return the bytes of the pixels of an image with so many rows."""
        return 3 * self.parts.unit**2 * num_rows

    def places_of(self, pixels: UInt8s) -> tuple[Ints, tuple[int, int]]:
        """Return the row and column [patches, 2] of an image's patches, and the size of their grid."""
        merge = self.parts.merge_size
        height, width = pixels.shape[0] // self.parts.patch_size, pixels.shape[1] // self.parts.patch_size
        grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
        cut = grid.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
        return cut.reshape(-1, 2), (height, width)

    def cut(self, pixels: UInt8s) -> Floats:
        """Return the numbers [patches, patch_numbers] of an image: by colour, frame, row and column of a patch."""
        parts, merge, side = self.parts, self.parts.merge_size, self.parts.patch_size
        rows, columns = pixels.shape[0] // parts.unit, pixels.shape[1] // parts.unit
        cut = pixels.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        cut = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], parts.frames, side, side))
        values: Floats = self._pixels[np.arange(3)[:, None, None, None], cut]
        return values.reshape(-1, parts.patch_numbers)
