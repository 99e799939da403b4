"""The vision encoder alone: the time of one image through Qwen3-VL-2B's, and through transformers' of the same shape.

Weights are made up. Encoders take turns, and times are medians. Without transformers only ours is measured.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.device import num_threads, start_cpu_kernels
from core.model_files.model_config import read_model_config
from core.model_files.tensors.vision_weights import open_vision
from core.models.grid_encoder import GridEncoder
from core.models.grid_parts import GridParts
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.tables.arrays import UInt8s
from ipc.version import NAME, VERSION
from kernels.elements import ELEMENT_TYPES


class EncoderShape(NamedTuple):
    """The vision_config of a Qwen3-VL, and the height and width of its image."""

    vision: Mapping[str, Any]
    height: int = 768
    width: int = 1024


QWEN3_VL_2B = EncoderShape(
    {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
        "hidden_act": "gelu_pytorch_tanh",
    }
)


def measure_encoder(
    options: dict[str, Any], *, rounds: int, shape: EncoderShape = QWEN3_VL_2B
) -> Iterator[dict[str, Any]]:
    """Yield a record for each encoder. options: of the engine. Errors: ConfigError without the C kernels."""
    config = config_from_options(**options)
    threads = num_threads(config)
    image = np.random.default_rng(1).integers(0, 256, (shape.height, shape.width, 3), np.uint8)
    ours = _ours(shape, config)
    runs = {NAME: lambda: ours.encode(image), **_peer(shape, image, str(config.dtype), threads)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number:  # the first one allocates
                times[name].append(time.perf_counter() - begin)
    for name in runs:
        yield {
            "engine": name,
            "version": VERSION,
            "workload": "encoder",
            "kernels": ours.variant,
            "dtype": str(config.dtype),
            "threads": threads,
            "height": shape.height,
            "width": shape.width,
            "rounds": rounds,
            "ms": round(statistics.median(times[name]) * 1000, 1),
            "ratio": round(statistics.median(times[NAME]) / statistics.median(times[name]), 3),
        }


def _ours(shape: EncoderShape, config: EngineConfig) -> GridEncoder:
    library, element = start_cpu_kernels(config), ELEMENT_TYPES[str(config.dtype)]
    if library is None:
        raise ConfigError("the encoder runs on the C kernels, and this machine has none and no compiler")
    with tempfile.TemporaryDirectory(prefix="engine-core-bench-") as folder:
        model = read_model_config(_written(Path(folder), shape))
        assert isinstance(model.vision, GridParts), model.vision
        weights = open_vision(Path(folder), model.vision, model.hidden_size, element, is_made_up=True)
        assert weights is not None, "made-up weights are always there"
        return GridEncoder(model.vision, model.hidden_size, weights, element, library=library)


def _written(folder: Path, shape: EncoderShape) -> Path:
    """Write the config.json of a model with this encoder and a small text model."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    text = {"model_type": "qwen3_vl_text", "vocab_size": 1000, "hidden_size": shape.vision["out_hidden_size"], **heads}
    text |= {"intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}}
    whole: dict[str, Any] = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    whole |= {"text_config": text, "vision_config": dict(shape.vision), "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def _peer(shape: EncoderShape, image: UInt8s, dtype: str, threads: int) -> dict[str, Callable[[], object]]:
    """Return transformers' encoder on the same number of patches, by its name; nothing without transformers."""
    try:
        import torch
        import transformers
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    build: Any = Qwen3VLVisionModel  # its methods have no types
    model = build(Qwen3VLVisionConfig(**shape.vision)).eval().to(getattr(torch, dtype))
    side = int(shape.vision["patch_size"])
    grid = torch.tensor([[1, image.shape[0] // side, image.shape[1] // side]])
    numbers = torch.randn(int(grid.prod()), 3 * int(shape.vision["temporal_patch_size"]) * side**2)
    pixels = numbers.to(getattr(torch, dtype))

    def run() -> object:
        with torch.no_grad():
            return model(pixels, grid_thw=grid)

    return {f"transformers {transformers.__version__}": run}
