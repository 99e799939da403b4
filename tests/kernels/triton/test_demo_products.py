"""Goldens of the demo model in bfloat16 on a GPU: digests of all products of a prompt by emulated tensor cores, which a
GPU must give too, and the token that follows.

What is between the products is computed in float64 and rounded as the model rounds it, because exponentials, divisions
and square roots of a GPU are approximations. The emulation follows published measurements (tensor_core.c), so a GPU
that gives other digests shows where it is wrong.
"""

import zlib
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from core.model_files.load_format import open_weights
from core.model_files.model_config import read_model_config
from core.models.config import ModelConfig
from ipc.files.model_files import resolve_model
from kernels.elements import BFLOAT16
from kernels.triton.ordered_product import ProductTile, ordered_product
from tests.kernels.triton.tensor_core import AMPERE, HOPPER, Core, product
from tests.numbers import dense_tensor
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU

pytestmark = ANYWHERE

PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
#: What a step of the prompt multiplies, in order: digests of the results in float32 of each layer, and of the logits.
# fmt: off
GOLDEN: dict[str, int] = {
    "0": 3696472891, "1": 2466875691, "2": 1561449259, "3": 4251080200, "4": 1868152835,
    "5": 899032950, "6": 2243588183, "7": 2398504381, "8": 585196572, "9": 2321774768,
    "10": 2699559935, "11": 2464931188, "12": 3523579734, "13": 3649353454, "14": 908462476,
    "15": 887356572, "16": 3422184635, "17": 1604465428, "18": 281620347, "19": 2988815302,
    "20": 225526856, "21": 963228980, "22": 2900379137, "23": 134971638, "24": 2282017310,
    "25": 2631271463, "26": 642318059, "27": 2807669688, "28": 3913697726, "29": 2837930476,
    "head": 3102687036,
}
# fmt: on
#: The same for the results of cores that add 8 neighbours of K, for the same numbers.
GOLDEN_OF_8: dict[str, int] = {"0": 568038984, "7": 3708488962, "29": 2335789226, "head": 1506908157}
NEXT = 7042  # " Paris"
#: Few programs, because the interpreter takes milliseconds for each; the tile's shape changes no bit.
WIDE = ProductTile(512, 16, 128, 4, 3)
HEAD = "head"


class Multiplied(NamedTuple):
    """A product of the model: x [T, in] and weight [out, in] bfloat16, and the result [T, out] float32."""

    x: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor


def emulated(x: torch.Tensor, weight: torch.Tensor, core: Core) -> torch.Tensor:
    left, right = (numbers.contiguous().view(torch.uint16).numpy() for numbers in (weight, x))
    sums = np.zeros((len(left), len(right)), np.float32)
    return torch.from_numpy(np.ascontiguousarray(product(left, right.T, sums, core=core).T))


class Demo:
    """The demo model over the prompt: a Llama, whose products are those of a core."""

    def __init__(self, core: Core) -> None:
        path = resolve_model(None)
        self._core, self.config = core, read_model_config(path)
        opened = open_weights("auto", path, self.config, BFLOAT16)
        self._weights = {name: dense_tensor(weight, BFLOAT16) for name, weight in opened.tensors}

    def __iter__(self) -> Iterator[tuple[str, list[Multiplied]]]:
        """Yield the products of each layer, and that of the head."""
        hidden = self._matrix("model.embed_tokens")[list(PROMPT)].float()
        for index in range(self.config.num_hidden_layers):
            self._done: list[Multiplied] = []
            hidden = self._layer(f"model.layers.{index}.", hidden)
            yield str(index), self._done
        self._done = []
        self._times(self._norm("model.norm", hidden[-1:]), "model.embed_tokens")
        yield HEAD, self._done

    def _layer(self, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
        config, attention = self.config, f"{prefix}self_attn."
        x = self._norm(f"{prefix}input_layernorm", hidden)
        q, k, v = (self._times(x, f"{attention}{name}_proj") for name in "qkv")
        mixed = attended(*(rows.unflatten(1, (-1, config.head_dim)) for rows in (q, k, v)), config)
        hidden = hidden + self._times(mixed, f"{attention}o_proj").float()
        x = self._norm(f"{prefix}post_attention_layernorm", hidden)
        gate, up = (self._times(x, f"{prefix}mlp.{name}_proj").double() for name in ("gate", "up"))
        return hidden + self._times((gate * gate.sigmoid() * up).bfloat16(), f"{prefix}mlp.down_proj").float()

    def _matrix(self, name: str) -> torch.Tensor:
        return self._weights[f"{name}.weight"]

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.double()
        scale = (rows.square().mean(1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return (rows * scale * self._weights[f"{name}.weight"].double()).bfloat16()

    def _times(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._matrix(name)
        result = emulated(x, weight, self._core)
        self._done.append(Multiplied(x, weight, result))
        return result.bfloat16()


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k and v [T, Hkv, D], from position 0 on; [T, H * D]."""
    half, count = config.head_dim // 2, len(q)
    angles = torch.arange(count).double()[:, None] * config.rope_theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        a, b = rows.double().split(half, 2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 2).bfloat16().double()

    each = q.shape[1] // k.shape[1]
    keys, values = (rows.repeat_interleave(each, 1) for rows in (rotated(k), v.double()))
    scores = torch.einsum("thd,shd->hts", rotated(q), keys) * config.head_dim**-0.5
    scores.masked_fill_(torch.ones(count, count).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(2), values).bfloat16().flatten(1)


@cache
def products() -> dict[str, list[Multiplied]]:
    """Those of cores that add 16 neighbours of K."""
    return dict(Demo(HOPPER))


def digest(results: list[torch.Tensor]) -> int:
    return zlib.crc32(b"".join(result.contiguous().cpu().numpy().tobytes() for result in results))


def test_the_emulated_cores_give_the_goldens() -> None:
    found = {name: digest([one.result for one in done]) for name, done in products().items()}
    assert found == GOLDEN
    assert int(products()[HEAD][0].result.argmax()) == NEXT
    for name in ("7",):  # of some layers: CPUs take their time
        assert digest([emulated(one.x, one.weight, AMPERE) for one in products()[name]]) == GOLDEN_OF_8[name]


def test_the_kernels_give_the_goldens() -> None:
    """On a GPU of all layers, by the tiles of its sizes and of few rows."""
    is_old = ON_GPU and torch.cuda.get_device_capability()[0] < 9
    golden = GOLDEN_OF_8 if is_old else GOLDEN
    for name in golden if ON_GPU else ("7",):
        results = []
        for x, weight, result in products()[name]:
            out = torch.empty(result.shape, device=DEVICE)
            results.append(ordered_product(x.to(DEVICE), weight.to(DEVICE), None, out, None if ON_GPU else WIDE))
        assert digest(results) == golden[name], name
