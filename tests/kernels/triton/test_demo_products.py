"""Goldens of the demo model's products in bfloat16: digests by the emulated tensor cores, which a GPU must give too.

The emulation follows published measurements (tensor_core.c), so a GPU that gives other digests shows where it is wrong.
"""

import zlib
from functools import cache

import numpy as np
import torch

from core.model_files.load_format import open_weights
from core.model_files.model_config import read_model_config
from ipc.files.model_files import resolve_model
from kernels.elements import BFLOAT16
from kernels.triton.ordered_product import FEW, ProductTile, ordered_product
from tests.kernels.triton.tensor_core import AMPERE, HOPPER, Core, product
from tests.numbers import dense_tensor
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

pytestmark = ANYWHERE

LAYER, EMBEDDING = "model.layers.7.", "model.embed_tokens.weight"
#: By matrix: the digest of its product with two rows of another one, by cores that add 16 and 8 neighbours of K.
GOLDEN: dict[str, tuple[int, int]] = {
    "model.embed_tokens.weight": (1066099039, 3375767604),
    "model.layers.7.mlp.down_proj.weight": (3819956973, 3090089131),
    "model.layers.7.mlp.gate_proj.weight": (1190095705, 1783453156),
    "model.layers.7.mlp.up_proj.weight": (813481054, 3084143510),
    "model.layers.7.self_attn.k_proj.weight": (283319553, 3843228897),
    "model.layers.7.self_attn.o_proj.weight": (3810639054, 2593600136),
    "model.layers.7.self_attn.q_proj.weight": (758733922, 2575434556),
    "model.layers.7.self_attn.v_proj.weight": (1337345777, 796114501),
}
#: Few programs, because the interpreter takes milliseconds for each; the tile's shape changes no bit.
WIDE = ProductTile(512, 16, 128, 4, 3)


@cache
def matrices() -> dict[str, torch.Tensor]:
    """The matrices of one layer, and the first rows of the head, which is the embedding."""
    path = resolve_model(None)
    config = read_model_config(path)
    opened = open_weights("auto", path, config, BFLOAT16, None, lambda name: name == EMBEDDING or LAYER in name)
    found = {name: dense_tensor(weight) for name, weight in opened.tensors}
    return {name: numbers[:2048].to(torch.bfloat16) for name, numbers in found.items() if numbers.ndim == 2}


def rows_for(weight: torch.Tensor) -> torch.Tensor:
    """Two rows [2, in] of another matrix, whose numbers a sum of products does not round away."""
    others = (other for other in matrices().values() if other.shape[1] == weight.shape[1] and other is not weight)
    source = next(others, weight)
    return source[[3, 40]].contiguous()


def emulated(weight: torch.Tensor, core: Core) -> int:
    x, w = (numbers.view(torch.uint16).numpy() for numbers in (rows_for(weight), weight.contiguous()))
    sums = np.zeros((len(w), len(x)), np.float32)
    return zlib.crc32(product(w, x.T, sums, is_bfloat16=True, core=core).T.tobytes())


def test_the_emulated_cores_give_the_goldens() -> None:
    found = {name: (emulated(weight, HOPPER), emulated(weight, AMPERE)) for name, weight in matrices().items()}
    assert found == GOLDEN


def test_the_kernels_give_the_goldens() -> None:
    core = AMPERE if ON_GPU and torch.cuda.get_device_capability()[0] < 9 else HOPPER
    for name, weight in matrices().items():
        x = rows_for(weight).to(DEVICE)
        for tile in (None, FEW) if ON_GPU else (WIDE,):
            out = torch.empty(2, len(weight), device=DEVICE)
            ordered_product(x, weight.contiguous().to(DEVICE), None, out, tile)
            assert zlib.crc32(out.cpu().numpy().tobytes()) == GOLDEN[name][(HOPPER, AMPERE).index(core)], (name, tile)
