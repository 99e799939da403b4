"""inspect_model: what a model's files hold, what it needs in memory, and what of it runs, without reading a weight."""

import json
import math
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import msgspec

from core.model_files.model_config import is_foreign, read_model_config
from core.model_files.tensors.packed_matrix import ELEMENT_DTYPES
from core.model_files.tensors.packed_size import packed_bits
from core.model_files.tensors.stored_tensor import PackedTensor, StoredTensor
from core.model_files.tensors.weights import plan_weights
from core.models.config import ModelConfig
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import GgufHeader, read_gguf
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import read_small_file
from ipc.files.safetensors import read_safetensors_folder
from kernels.cpu.quantized import bits_in_memory
from kernels.dequantize import FILE_TYPES, PLAIN_TYPES
from kernels.elements import BFLOAT16, FLOAT32
from kernels.memory.kv_cache import bytes_per_block


class TypeUse(msgspec.Struct, frozen=True):
    """The tensors of one type."""

    type: str
    tensors: int
    bytes: int  # in the files
    runs: bool
    bits_in_memory: float | None  # of a matrix's weight, as the CPU's products read it; None: not kept as stored


class Needs(msgspec.Struct, frozen=True):
    """Bytes of memory that a model needs on the CPU, in bfloat16, in addition to the engine itself."""

    weights_as_stored: int | None  # None: whether packed matrices stay packed is only known once they are read
    weights_dequantized: int
    kv_cache_per_token: int  # of layers whose tokens see all others; a window needs no more than its length
    state_per_request: int  # of recurrent layers
    weights_quantized: int = 0  # as stored: of those that could be dequantized
    matrix_weights: int = 0  # number of weights that steps multiply with


class Inspection(msgspec.Struct, frozen=True):
    """What is known of a model from the headers of its files."""

    path: str
    format: str  # "GGUF" or "safetensors"
    architecture: str  # as the files name it; "" = they do not
    packing: str  # how a folder's matrices are packed (core.models.config.Packing); "" = they are not, or it is refused
    file_bytes: int  # of all tensors
    types: tuple[TypeUse, ...]  # the largest first
    runs_with: str  # what runs it; "" = nothing does
    refusals: tuple[str, ...]  # why not; or what does not run, such as the tokenizer
    max_model_len: int | None
    needs: Needs | None  # None for a model that is refused, or that other code runs
    takes_images: bool = False


def inspect_model(path: Path) -> Inspection:
    """Return what the headers of a model's files say. A model that does not run is no error.

    path: a model folder or .gguf file, of ipc.files.model_files.resolve_model. Errors: ModelFileError,
    UnsupportedModelError for files whose headers cannot be read.
    """
    is_gguf = path.suffix == ".gguf"
    header = read_gguf(path) if is_gguf else None
    tensors = _tensors(path, header)
    architecture = _architecture(path, header)
    if not is_gguf and is_foreign(path):
        runs, config = "transformers' code, at numerics level L0 (needs torch and transformers)", None
        plan: _Plan = {}
        refusals: list[str] = []
    else:
        config, plan, refusals = _checked(path)
        runs = "" if config is None else "this engine's own code"
        refusals += [] if header is None else _tokenizer_refusals(header)
    return Inspection(
        path=str(path),
        format="GGUF" if is_gguf else "safetensors",
        architecture=architecture,
        packing="" if config is None or config.packing == "none" else config.packing,
        file_bytes=sum(num_bytes for _, _, num_bytes in tensors),
        types=_types(tensors, frozenset(FILE_TYPES) if is_gguf else ELEMENT_DTYPES.keys()),
        runs_with=runs,
        refusals=tuple(refusals),
        max_model_len=None if config is None else config.max_position_embeddings,
        needs=None if config is None else _needs(config, tensors, plan),
        takes_images=config is not None and config.vision is not None,
    )


_Plan = Mapping[str, StoredTensor | PackedTensor]
#: type, shape and bytes of a tensor
_Tensor = tuple[str, tuple[int, ...], int]


def _tensors(path: Path, header: GgufHeader | None) -> list[_Tensor]:
    if header is not None:
        return [(tensor.type, tensor.shape, tensor.num_bytes) for tensor in header.tensors.values()]
    files = read_safetensors_folder(path).values()
    return [(tensor.dtype, tensor.shape, tensor.end - tensor.begin) for file in files for tensor in file.values()]


def _architecture(path: Path, header: GgufHeader | None) -> str:
    if header is not None:
        return str(header.metadata.get("general.architecture", ""))
    try:
        names = json.loads(read_small_file(path / "config.json")).get("architectures")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return ", ".join(map(str, names)) if isinstance(names, list) else ""


def _checked(path: Path) -> tuple[ModelConfig | None, _Plan, list[str]]:
    """Return the configuration of a model that runs, its weights and no refusal; or None and why it does not run."""
    try:
        config = read_model_config(path)
        plan = plan_weights(path, config)  # checks names, shapes and types
    except (ModelFileError, UnsupportedModelError) as error:
        return None, {}, [str(error)]
    return config, plan, []


def _tokenizer_refusals(header: GgufHeader) -> list[str]:
    try:
        build_gguf_tokenizer(header.metadata)
    except (ModelFileError, UnsupportedModelError) as error:
        return [f"prompts of text: {error}"]
    return []


def _types(tensors: Iterable[_Tensor], readable: Set[str]) -> tuple[TypeUse, ...]:
    """Return the tensors by type. readable: the types of weights, and of the parts of packed matrices."""
    totals: dict[str, list[int]] = {}
    for name, _, num_bytes in tensors:
        total = totals.setdefault(name, [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + num_bytes
    uses = [
        TypeUse(name, count, num_bytes, name in readable, bits_in_memory(name) if _is_quantized(name) else None)
        for name, (count, num_bytes) in totals.items()
    ]
    return tuple(sorted(uses, key=lambda use: -use.bytes))


def _is_quantized(name: str) -> bool:
    return name in FILE_TYPES and name not in PLAIN_TYPES


def _needs(config: ModelConfig, tensors: Iterable[_Tensor], plan: _Plan) -> Needs:
    is_packed = config.packing != "none"
    if is_packed:
        tensors = [(each.type, each.shape, 0) for each in plan.values() if isinstance(each, StoredTensor)]
    stored, quantized, dense = 0.0, 0.0, 0
    for name, shape, _ in tensors:
        count = math.prod(shape)
        if len(shape) == 1:
            stored, dense = stored + count * FLOAT32.itemsize, dense + count * FLOAT32.itemsize
            continue
        num_bytes = count * bits_in_memory(name) / 8 if _is_quantized(name) else count * BFLOAT16.itemsize
        stored, quantized = stored + num_bytes, quantized + num_bytes * _is_quantized(name)
        dense += count * BFLOAT16.itemsize
    packed = [_packed_bytes(each) for each in plan.values() if isinstance(each, PackedTensor)]
    return Needs(
        weights_as_stored=None if None in packed else round(stored + sum(size or 0 for size in packed)),
        weights_dequantized=config.num_matrix_weights * BFLOAT16.itemsize if is_packed else dense,
        kv_cache_per_token=_kv_bytes(config) if config.is_causal else 0,
        state_per_request=config.state_size * FLOAT32.itemsize,
        weights_quantized=round(quantized + sum(size or 0 for size in packed)),
        matrix_weights=config.num_matrix_weights,
    )


def _packed_bytes(packed: PackedTensor) -> float | None:
    tensors = {kind: (part.type, part.shape) for kind, part in packed.parts.items()}
    bits = packed_bits(tensors, packed.shape)
    return None if bits is None else math.prod(packed.shape) * bits / 8


def _kv_bytes(config: ModelConfig) -> int:
    return bytes_per_block(
        1,
        config.num_key_value_heads,
        config.head_dim,
        config.num_caches,
        BFLOAT16,
        num_sides=2 if config.latent is None else 1,
    )
