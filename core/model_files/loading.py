"""Loads a model: with this engine's own code if it supports the architecture, otherwise with transformers'."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core import log
from core.device import cuda_device, start_cpu_kernels, start_torch
from core.model_files.load_format import CheckedWeights, open_weights
from core.model_files.model_config import is_foreign, read_model_config, refuse_missing_parts
from core.model_files.parts import NO_PARTS, check_parts, part_option
from core.model_files.pooling import pools, read_pooler
from core.model_files.tensors.kv_scales import read_kv_scales
from core.model_files.tensors.vision_weights import open_vision
from core.model_files.tensors.weights import load_weights
from core.model_files.weight_cache import WeightCache
from core.models.config import EncoderParts, ModelConfig
from core.models.encoder import Encoder
from core.models.grid_encoder import GridEncoder
from core.models.grid_parts import GridParts
from core.models.interface import Model
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.second_forms import SecondForms
from core.models.operations.stored_matrix import Weight
from core.models.operations.weight_form import WeightForm, best_form
from core.models.parts.rank import Rank
from core.models.parts.stage import Stage
from core.models.parts.stage_llama import StageLlama
from core.models.parts.stage_streams import StageStreams
from core.models.pooled_encoder import PooledEncoder
from core.models.vision_encoder import VisionEncoder
from core.pooling.pooler import Pooler
from ipc.errors import ConfigError
from ipc.files.gguf import forget_gguf
from ipc.files.model_files import model_fingerprint, resolve_model
from ipc.files.projector import projector_of
from ipc.files.safetensors import weight_files
from ipc.options.config import EngineConfig
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.quantized_kv_cache import QuantizedKVCache
from kernels.elements import Dtype, element_name
from kernels.memory.free_memory import return_free_memory
from kernels.memory.kv_cache import Scales

#: Tokens of an image whose encoding takes many seconds on a CPU.
LONG_IMAGE = 4096
_NO_INT8_CACHE = "kv_cache_dtype='int8' needs the C kernels at numerics level L2"

#: The form of matrices in a GPU's memory. They are dequantized by default, because the speed of other forms is not well
#: enough known on any GPU.
_GPU_FORMS = {
    "auto": WeightForm.DENSE,
    "none": WeightForm.DENSE,
    "stored": WeightForm.STORED,
    "int8": WeightForm.INT8,
    "fp8": WeightForm.FP8,
}


class EncoderFacts(NamedTuple):
    """What is known of a model's vision encoder in a process that does not run it."""

    variant: str
    num_rows: int
    width: int
    sees_whole: bool


class LoadedModel(NamedTuple):
    """A model with its weights, and their identity."""

    model: Model
    fingerprint: str  # hexadecimal digest that identifies the weights
    label: str  # prefix of the model's fingerprint
    pooler: Pooler | None = None  # for a model that pools and therefore generates no tokens
    encoder: EncoderParts | None = None  # for an encoder
    sees_all: bool = False  # tokens see the whole prompt, in an encoder or another model
    vision: VisionEncoder | GridEncoder | PooledEncoder | EncoderFacts | None = None  # for a model with images

    def without_encoder(self) -> "LoadedModel":
        """Return the same without the weights of the encoder, which another process runs."""
        if (vision := self.vision) is None:
            return self
        return self._replace(vision=EncoderFacts(vision.variant, vision.num_rows, vision.width, vision.sees_whole))


def load_model(
    path: Path, dtype: Dtype, config: EngineConfig, rank: Rank | None = None, stage: Stage | None = None
) -> LoadedModel:
    """Load the model in a folder or .gguf file, to run in dtype on the config's device. rank, stage: only that part.

    Errors: ModelFileError, UnsupportedModelError; ConfigError for options that do not fit the model; OutOfMemoryError
    if the weights do not fit the GPU.
    """
    if config.model_impl == "native" or (config.model_impl == "auto" and not is_foreign(path)):
        model_config, projector = read_model_config(path, config.mmproj), projector_of(path, config.mmproj)
        _check_fit(path, config, rank, stage, model_config)
        if config.device == "cuda":
            return _load_for_gpu(path, dtype, config, model_config, rank, projector)
        library = start_cpu_kernels(config)
        _check_kernels(path, config, library, model_config)
        if library is None or config.numerics == "L0":
            start_torch(config)
        is_pooled = pools(config, path, model_config)
        form = _weight_form(config, model_config, library, generates=not is_pooled)
        reads = stage.reads(model_config) if stage is not None else lambda name: True
        weights = open_weights(config.load_format, path, model_config, dtype, library, reads)
        cache = _weight_cache(path, dtype, config, library, form, weights.fingerprint, rank, stage)
        native = _native(model_config, weights.tensors, dtype, config, library, form, rank, stage, cache)
        has_pooler = is_pooled and (stage is None or stage.is_last)
        pooler = read_pooler(config, path, native, model_config) if has_pooler else None
        vision, sees_all = None, not model_config.is_causal
        if native.library is not None and native.reads_features:
            vision = _vision(projector or path, model_config, dtype, config, native.library)
        _return_free_memory()
        if cache is not None:
            cache.keep()
        identity = _with_projector(weights.fingerprint, projector)
        return LoadedModel(native, identity, weights.label, pooler, model_config.encoder, sees_all, vision)
    refuse_missing_parts(path)
    _check_fit(path, config, rank, stage, None)
    projector_of(path, config.mmproj)
    if config.quantization in ("stored", "int8"):
        raise ConfigError(f"quantization={config.quantization!r} does not fit {path}, which uses transformers' code")
    if config.runner == "pooling":
        raise ConfigError(f"{path}: models that run with transformers' code do not pool: leave runner at 'auto'")
    if config.device == "cuda":
        raise ConfigError(f"device='cuda' needs a built-in architecture, but {path} uses transformers' code: use 'cpu'")
    if config.load_format == "gguf":
        raise ConfigError(f"load_format='gguf' does not support {path}, which runs with transformers' code: use 'auto'")
    # Imported here because transformers and torch take seconds to import, and in-tree models never need them.
    start_torch(config)
    from core.models.transformers.transformers_model import TransformersModel

    made_up = config.load_format == "dummy"
    foreign = TransformersModel(path, dtype, made_up=made_up, max_model_len=config.max_model_len)
    if made_up:
        return LoadedModel(foreign, hashlib.sha256((path / "config.json").read_bytes()).hexdigest(), "dummy-")
    return LoadedModel(foreign, model_fingerprint(path), "")


def load_update(
    path: Path | None, base: LoadedModel, dtype: Dtype, config: EngineConfig, first: LoadedModel
) -> LoadedModel:
    """Return the same model with the weights of a safetensors file, a folder of them or a .gguf file.

    It may run next to the base's steps, in a thread that runs its kernels alone (CpuLibrary.alone()). Of matrices in
    two forms it packs the first; the operations' second_forms has the rest. path: None = the weights that the engine
    started with. first: the model with these, perhaps without its weights. Errors: ModelFileError,
    UnsupportedModelError; ConfigError for a model that cannot change its weights.
    """
    model = base.model
    if reason := why_not_updated(base, config):
        raise ConfigError(f"the weights of this engine cannot be changed while it runs: {reason}")
    assert isinstance(model, Llama), type(model)
    own = resolve_model(config.model)
    library = model.library
    second_forms: SecondForms | None = None
    with contextlib.ExitStack() as stack:
        if library is not None:
            library.memory.keep(True)  # of the weights that these replace, for the next ones
        if path is None:
            opened = open_weights(config.load_format, own, model.config, dtype, library).tensors
        else:
            opened = load_weights(path, model.config, dtype, library)
        if isinstance(model.operations, CpuOperations):
            size = model.operations.num_packed_bytes
            second_forms = SecondForms(stack.enter_context(model.operations.library.memory.together(size)), size)
        weights = CheckedWeights(path or own, opened)
        tensors, form = iter(weights), _weight_form(config, model.config, library, generates=True)
        changed = _native(model.config, tensors, dtype, config, library, form, None, None, second_forms=second_forms)
        for _ in tensors:  # up to the check at the end
            pass
    _return_free_memory()
    if path is None:
        return first._replace(model=changed)
    digest = hashlib.sha256(f"{first.fingerprint} {weights.hexdigest()}".encode()).hexdigest()
    return LoadedModel(changed, digest, "")


def why_not_updated(base: LoadedModel, config: EngineConfig) -> str:
    """Return why a model cannot change its weights while it runs; "" if it can."""
    if config.device != "cpu":
        return "it runs on a GPU"
    if base.encoder is not None:
        return "it is an encoder"
    if not isinstance(base.model, Llama):
        return "it runs with transformers' code"
    if base.pooler is not None:
        return "it is a pooling model"
    return "it has a vision encoder" if base.vision is not None else ""


def _load_for_gpu(
    path: Path,
    dtype: Dtype,
    config: EngineConfig,
    model_config: ModelConfig,
    rank: Rank | None,
    projector: Path | None,
) -> LoadedModel:
    """Load a model of our own for a GPU. Images are encoded by the C kernels. Errors: those of load_model()."""
    _check_form(path, config, model_config)
    form = _GPU_FORMS[config.quantization]
    weights = open_weights(config.load_format, path, model_config, dtype)
    # Imported here because only this path needs torch and triton.
    from core.models.device_model import device_model

    model = device_model(
        model_config,
        weights.tensors,
        dtype,
        cuda_device(),
        form,
        config.numerics,
        rank=rank,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_scales=_kv_scales(path, config, model_config),
    )
    pooler = read_pooler(config, path, model, model_config) if pools(config, path, model_config) else None
    vision, sees_all = None, not model_config.is_causal
    if model_config.vision is not None and model.reads_features and (library := start_cpu_kernels(config)) is not None:
        vision = _vision(projector or path, model_config, dtype, config, library)
    identity = weights.fingerprint if vision is None else _with_projector(weights.fingerprint, projector)
    return LoadedModel(model, identity, weights.label, pooler, model_config.encoder, sees_all, vision)


def _kv_scales(path: Path, config: EngineConfig, model: ModelConfig) -> tuple[Scales, ...]:
    """Return the scales of a KV cache of 8-bit floats; () = none. Errors: ModelFileError, ConfigError."""
    if config.kv_cache_dtype != "fp8" or config.load_format == "dummy":
        return ()
    layers = [layer for layer in range(model.num_hidden_layers) if layer not in model.recurrent_layers]
    scales = read_kv_scales(path, layers)
    if scales and model.latent is not None:
        raise ConfigError(
            f"kv_cache_dtype='fp8' does not support the scales of {path}, whose layers have no K and V: use 'int8', or "
            "leave it out"
        )
    return scales


def _check_cache(path: Path, config: EngineConfig, model: ModelConfig | None) -> None:
    """Refuse a KV cache type that only decoders support. model: None = transformers' code. Errors: ConfigError."""
    if config.kv_cache_dtype == "auto":
        return
    if config.device != "cuda":
        if config.kv_cache_dtype == "fp8":
            raise ConfigError("kv_cache_dtype='fp8' needs device='cuda': use 'int8' on a CPU, or leave it out")
        if config.numerics == "L0" or config.cpu_kernels == "torch":
            raise ConfigError(f"{_NO_INT8_CACHE}: leave numerics and cpu_kernels out, or kv_cache_dtype")
    if model is None or not model.is_causal:
        kind = "needs transformers' code" if model is None else "is an encoder, which caches no K and V"
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} needs a decoder of our own, and {path} {kind}: leave it out"
        )


def _cache_type(config: EngineConfig, library: CpuLibrary | None) -> type[CpuKVCache]:
    """Return the type of the C kernels' KV cache. Errors: ConfigError for a quantized one without C kernels."""
    if config.kv_cache_dtype == "auto":
        return CpuKVCache
    if library is None:
        raise ConfigError(f"{_NO_INT8_CACHE}, and there are no C kernels here: leave kv_cache_dtype out")
    return QuantizedKVCache


def _check_fit(
    path: Path, config: EngineConfig, rank: Rank | None, stage: Stage | None, model: ModelConfig | None
) -> None:
    """Refuse options that do not fit a model. model: None = transformers' code. Errors: ConfigError."""
    num_ranks = 1 if rank is None else rank.shard.size
    check_parts(path, config, model, num_ranks, 1 if stage is None else stage.size)
    if config.quantization == "fp8" and (config.device != "cuda" or config.numerics == "L0"):
        raise ConfigError(
            "quantization='fp8' needs device='cuda' at numerics level L2: use 'int8' on a CPU, or leave it out"
        )
    _check_cache(path, config, model)


def _check_kernels(path: Path, config: EngineConfig, library: CpuLibrary | None, model: ModelConfig) -> None:
    """Refuse options that encoders do not support, or layers that read one of several streams. Errors: ConfigError."""
    if model.is_causal and model.streams is None:
        return
    kind = "has hidden states in several streams" if model.is_causal else "is an encoder"
    if library is None or config.numerics == "L0":
        raise ConfigError(
            f"{path} {kind}, which needs the C kernels: install a C compiler or a wheel, and leave numerics and "
            "cpu_kernels out"
        )
    _check_form(path, config, model)


def _check_form(path: Path, config: EngineConfig, model: ModelConfig) -> None:
    """Refuse a form of matrices that encoders do not support. Errors: ConfigError."""
    if not model.is_causal and config.quantization in ("int8", "fp8"):
        raise ConfigError(
            f"quantization={config.quantization!r} does not support {path}, which is an encoder: leave it out"
        )


def _native(
    model: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    dtype: Dtype,
    config: EngineConfig,
    library: CpuLibrary | None,
    form: WeightForm,
    rank: Rank | None,
    stage: Stage | None,
    cache: WeightCache | None = None,
    second_forms: SecondForms | None = None,
) -> Llama:
    """Return one of our own models with its weights. cache: of a decoder's packed weights. second_forms: of a decoder.

    Errors: ModelFileError; ConfigError for parts without C kernels.
    """
    if (rank is not None or stage is not None) and library is None:
        option = part_option(1 if rank is None else rank.shard.size)
        raise ConfigError(f"{option}{NO_PARTS}, and there are no C kernels here: leave {option} out")
    if model.encoder is None:
        caches = _cache_type(config, library)
        options: dict[str, Any] = {"library": library, "form": form, "rank": rank, "cache_type": caches}
        options["shares_blocks"] = not config.disable_cascade_attn
        options |= {"take_packed": None if cache is None else cache.take, "second_forms": second_forms}
        if stage is None:
            llama = Llama(model, weights, dtype, config.numerics, **options)
        else:
            of_stage = StageLlama if model.streams is None else StageStreams
            llama = of_stage(model, weights, dtype, stage, numerics=config.numerics, **options)
        if config.max_model_len is not None:  # known from the start for a resolved config
            llama.settle_length(config.max_model_len)
        return llama
    assert library is not None, "an encoder needs the C kernels"
    return Encoder(model, weights, dtype, library, form=form)


def _weight_cache(
    path: Path,
    dtype: Dtype,
    config: EngineConfig,
    library: CpuLibrary | None,
    form: WeightForm,
    fingerprint: str,
    rank: Rank | None,
    stage: Stage | None,
) -> WeightCache | None:
    """Return the cache of the packed weights of a model's files; None for weights that are not packed, or made up."""
    if library is None or config.numerics == "L0" or config.load_format == "dummy" or not config.weight_cache_bytes:
        return None
    files = [(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) for status in _stats(path)]
    part = (rank and (rank.shard.rank, rank.shard.size), stage and (stage.number, stage.size))
    key = [fingerprint, repr(files), element_name(dtype), form.name, repr(part)]
    return WeightCache(key, library, config.weight_cache_bytes)


def _stats(path: Path) -> list[os.stat_result]:
    """Return the status of each weight file, which tells whether it was changed."""
    return [file.stat() for file in ([path] if path.suffix == ".gguf" else weight_files(path))]


def load_vision(path: Path, dtype: Dtype, config: EngineConfig) -> VisionEncoder | GridEncoder | PooledEncoder | None:
    """Load the vision encoder of a model that others compute, on this CPU; None: it has none.

    Errors: those of load_model().
    """
    model, projector = read_model_config(path, config.mmproj), projector_of(path, config.mmproj)
    library = start_cpu_kernels(config)
    return None if library is None else _vision(projector or path, model, dtype, config, library)


def _vision(
    source: Path, model: ModelConfig, dtype: Dtype, config: EngineConfig, library: CpuLibrary
) -> VisionEncoder | GridEncoder | PooledEncoder | None:
    """Return the model's vision encoder, or None if it has none. source: see open_vision()."""
    if model.vision is None:
        return None
    is_made_up = config.load_format == "dummy"
    parts, width = model.vision, model.hidden_size
    weights = open_vision(source, parts, width, dtype, is_made_up=is_made_up)
    if weights is None:
        return None
    if isinstance(parts, GridParts):
        if (most := config.image_max_pixels) is not None:
            parts = msgspec.structs.replace(parts, max_rows=max(1, min(parts.max_rows, most // parts.unit**2)))
        elif parts.max_rows > LONG_IMAGE:
            log.say(
                f"engine-core: an image may have up to {parts.max_rows} tokens, as the model's processor allows, and "
                "takes minutes to encode then: image_max_pixels makes large images smaller"
            )
        kind = GridEncoder if parts.pooled is None else PooledEncoder
        return kind(parts, width, weights, dtype, library=library)
    if config.image_max_pixels is not None:
        raise ConfigError(f"image_max_pixels: images of {source} have one size: leave it out")
    return VisionEncoder(parts, width, weights, dtype, library=library)


def _with_projector(fingerprint: str, projector: Path | None) -> str:
    """Return the identity of a model's weights, including those of its projector, if there is one."""
    if projector is None:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} {model_fingerprint(projector)}".encode()).hexdigest()


def _weight_form(
    config: EngineConfig, model_config: ModelConfig, library: CpuLibrary | None, *, generates: bool
) -> WeightForm:
    """Return the form of matrices in memory. Errors: ConfigError if it needs C kernels and there are none."""
    if config.quantization == "none":
        return WeightForm.DENSE
    if library is None or config.numerics == "L0":
        if config.quantization == "auto":
            return WeightForm.DENSE
        raise ConfigError(
            f"quantization={config.quantization!r} needs the C kernels, at numerics level L2: use quantization='none'"
        )
    if config.quantization == "auto":
        num_weights = model_config.num_matrix_weights
        return best_form(library.variant, library.num_threads, num_weights, has_few_rows=generates)
    return WeightForm.STORED if config.quantization == "stored" else WeightForm.INT8


def _return_free_memory() -> None:
    """Return free memory to the operating system.

    The vocabulary of a GGUF file and the temporary copies of tensors take an eighth of a small model's size.
    """
    forget_gguf()
    return_free_memory()
