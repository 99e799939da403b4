"""An encoder's run in parts: the bits of the whole run, whatever the blocks and parts are, and parts of equal work."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core.models import encoder_run
from core.models.encoder_run import EncoderInParts, EncoderRun
from core.models.grid_encoder import GridEncoder
from core.models.grid_parts import BOUNDS, GridParts, PooledParts, grid_shapes
from core.models.pooled_encoder import PooledEncoder
from core.models.vision_encoder import VisionEncoder
from core.models.vision_parts import VisionParts, vision_shapes
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, rounded

WIDTH = 32  # of the text model
PIXELS: dict[str, Any] = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "rescale_factor": 1 / 255}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SQUARES: dict[str, Any] = {
    "image_size": 96,
    "patch_size": 8,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "scale_factor": 2,
    "finds_positions": False,
    "sees_whole": False,
    **SIZES,
    **PIXELS,
}
GRIDS: dict[str, Any] = {
    "patch_size": 8,
    "frames": 1,
    "max_rows": 400,
    "norm_eps": 1e-6,
    "is_centred": False,
    "patch_bias": False,
    "hidden_act": "gelu_pytorch_tanh",
    "is_gated": True,
    "rope_theta": 100.0,
    **SIZES,
    **PIXELS,
}
NORMED: dict[str, Any] = {"first_token": True, "branch_scales": True, "qkv_bias": False, "qk_norms": True}
POOLED = PooledParts(num_key_value_heads=2, head_dim=16, positions_per_axis=40, clips=True, standardizes=True)
PARTS: dict[str, VisionParts | GridParts] = {
    "squares": VisionParts(join="shuffle", **SQUARES),
    "squares with norms of rows": VisionParts(
        join="norm and MLP", rms_norms=True, final_norm=False, **NORMED, **SQUARES
    ),
    "windows": GridParts(merge_size=2, window=2, full_layers=(1,), **GRIDS),
    "rows of several layers": GridParts(merge_size=2, positions_per_side=6, deep_layers=(0, 2), **GRIDS),
    "means": GridParts(merge_size=3, pooled=POOLED, **GRIDS),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    load_cpu_library().stop_threads()


def made_up(parts: VisionParts | GridParts, dtype: Dtype) -> Iterator[tuple[str, Numbers]]:
    rng = np.random.default_rng(1)
    shapes = vision_shapes(parts, WIDTH) if isinstance(parts, VisionParts) else grid_shapes(parts, WIDTH)
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape, np.float32) * np.float32(0.2)
        if name.endswith(BOUNDS):
            numbers = np.full(shape, 2 if name.endswith("max") else -2, np.float32)
        yield (
            name,
            numbers
            if len(shape) == 1
            else rounded(numbers.reshape(shape[0], -1) if len(shape) > 3 else numbers, dtype),
        )


def encoder_of(kind: str, dtype: Dtype = FLOAT32) -> EncoderInParts:
    parts = PARTS[kind]
    if isinstance(parts, VisionParts):
        return VisionEncoder(parts, WIDTH, made_up(parts, dtype), dtype, library=load_cpu_library())
    made = GridEncoder if parts.pooled is None else PooledEncoder
    return made(parts, WIDTH, made_up(parts, dtype), dtype, library=load_cpu_library())


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PARTS)
def test_bits_depend_on_no_block_and_on_no_part(kind: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of(kind, dtype)
    side = 96 if kind.startswith("squares") else 144
    pixels = np.random.default_rng(2).integers(0, 256, (96, side, 3)).astype(np.uint8)
    monkeypatch.setattr(encoder_run, "BLOCK_PATCHES", 1000)
    whole = encoder.encode(pixels)
    for block, num_parts in ((36, 7), (5, 40)):
        monkeypatch.setattr(encoder_run, "BLOCK_PATCHES", block)
        num_rows = encoder.grid_of(pixels.shape)[0]
        monkeypatch.setattr(encoder_run, "PART_WORK", encoder.work(num_rows) // num_parts)
        count = encoder.num_parts(num_rows)
        assert num_parts <= count <= num_parts + 1
        run = encoder.begin(pixels)
        assert [run.advance(part) for part in range(1, count)] == [None] * (count - 1)
        rows = run.advance(count)
        assert rows is not None
        assert rows.tobytes() == whole.tobytes(), (block, num_parts)


def test_parts_have_about_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of("windows")
    monkeypatch.setattr(encoder_run, "BLOCK_PATCHES", 5)
    pixels = np.zeros((96, 144, 3), np.uint8)
    shares = list(encoder.pieces(pixels))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert max(np.diff(shares[:-1])) < 0.01  # the last one makes all rows of so small an image
    # A part ends with the first piece behind its share of the work; parts that were left out are made up for.
    run = EncoderRun(encoder.pieces(pixels), 4)
    counts = []
    for part in (1, 3):
        run.advance(part)
        counts.append(sum(share < part / 4 for share in shares))
    assert counts[0] > 10 < counts[1] - counts[0]
    assert run.advance(4) is not None
