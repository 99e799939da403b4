"""load: loads and describes the model that a config names; a part of the executors that run a model."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from core.execution.executor import ModelInfo
from core.model_files.assistant import Assisted, is_assistant, load_assistant
from core.model_files.draft_head import head_taps, load_eagle3, load_mtp
from core.model_files.loading import LoadedModel, load_model, load_update
from core.model_files.model_config import read_model_config
from core.model_files.model_ends import ReadEnds
from core.models.assistant import Assistant
from core.models.draft_head import DraftHead
from core.models.interface import Model
from core.models.llama import Llama
from core.models.parts.rank import Rank
from core.models.parts.stage import Stage
from ipc.errors import ConfigError
from ipc.files.hub_name import hub_name
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.tables.rounding import ceil_div
from kernels.elements import ELEMENT_TYPES, Dtype, element_name
from kernels.gumbel import DRAW

#: What drafts from the hidden states of the model, and belongs to it.
Head: TypeAlias = DraftHead | Assistant


class Loaded(NamedTuple):
    """A loaded model and its description."""

    model: Model
    info: ModelInfo
    source: LoadedModel
    dtype: Dtype

    def settle_length(self, max_model_len: int) -> ModelInfo:
        """Set the maximum number of tokens of a request, and return the model's updated description.

        Rotary frequencies that depend on this length are part of the fingerprint.
        """
        self.model.settle_length(max_model_len)
        fingerprint, variant = _fingerprint(self.source, self.dtype), _variant(self.source)
        return msgspec.structs.replace(self.info, fingerprint=fingerprint, variant=variant)


def load(
    config: EngineConfig,
    usual_dtype: Callable[[Path, str | None], Dtype],
    rank: Rank | None = None,
    stage: Stage | None = None,
) -> Loaded:
    """Load the config's model on the config's device.

    usual_dtype: the dtype of a model with this projector (mmproj) for "auto". rank: see Llama. stage: the part to
    load; None = all layers. Errors: ModelFileError, UnsupportedModelError, ConfigError, OutOfMemoryError.
    """
    path = resolve_model(config.model)
    dtype = ELEMENT_TYPES[config.dtype] if config.dtype != "auto" else usual_dtype(path, config.mmproj)
    source = load_model(path, dtype, config, rank, stage)
    model, pooler = source.model, source.pooler
    kv_window, kv_page_blocks = _kv_window(model, config)
    own_state, size = 4 * model.config.state_size if isinstance(model, Llama) else 0, config.block_size
    most_whole = 0 if source.vision is None or not source.vision.sees_whole else source.vision.num_rows
    info = ModelInfo(
        name=hub_name(path) or path.name,
        fingerprint=_fingerprint(source, dtype),
        dtype=element_name(dtype),
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        numerics=model.numerics,
        tasks={} if pooler is None else pooler.tasks,
        whole_prompt_tasks=() if pooler is None else pooler.whole_prompt_tasks,
        is_encoder=source.sees_all,
        num_token_kinds=1 if source.encoder is None else max(1, source.encoder.num_kinds),
        kv_window=kv_window and max(kv_window, most_whole),  # an image's last token sees its first one
        kv_page_blocks=kv_page_blocks,
        max_whole_tokens=most_whole,
        image_tokens=0 if source.vision is None else source.vision.num_rows,
        image_token_bytes=0 if source.vision is None else 4 * source.vision.width,
        state_bytes=4 * model.state_size_of_model if isinstance(model, Llama) else 0,
        state_tokens=own_state and ceil_div(own_state * size, model.bytes_per_block(size)),
        weights=source.label + source.fingerprint,
        variant=_variant(source),
        cpu_kernels=library.variant if isinstance(model, Llama) and (library := model.library) is not None else "",
    )
    return Loaded(model, info, source, dtype)


def load_new_weights(path: Path | None, loaded: Loaded, config: EngineConfig, first: LoadedModel) -> Loaded:
    """Return the same model with other weights; see load_update(). config: resolved."""
    source = load_update(path, loaded.source, loaded.dtype, config, first)
    model, before = source.model, loaded.model
    assert isinstance(model, Llama), type(model)
    assert isinstance(before, Llama), type(before)
    if loaded.info.kv_page_blocks:
        model.split_cache(loaded.info.kv_page_blocks)
    model.sampler = before.sampler  # the rows' token masks belong to it
    digests = {"fingerprint": _fingerprint(source, loaded.dtype), "weights": source.label + source.fingerprint}
    info = msgspec.structs.replace(loaded.info, variant=_variant(source), **digests)
    return Loaded(model, info, source, loaded.dtype)


def load_drafting_model(
    config: EngineConfig, loaded: Loaded, *, is_part: bool = False, rank: Rank | None = None
) -> Model | Head | None:
    """Load the draft model, head or assistant of speculative_config in the target's dtype; None: it needs none.

    is_part: the target is a part of the model. rank: of this process in a group, which an assistant needs. Errors:
    those of load(), and ConfigError if it does not fit the target.
    """
    settings = config.speculative_config
    if settings is None or not settings.runs_model:
        return None
    is_made_up = config.load_format == "dummy"
    if settings.method != "draft_model":
        if not isinstance(loaded.model, Llama):
            raise ConfigError(
                f"speculative_config: method {settings.method!r} needs a model of a built-in architecture; "
                f"{config.model} is none"
            )
        path, whole = resolve_model(settings.model or config.model), resolve_model(config.model)
        target = loaded.model
        sizes = read_model_config(whole, config.mmproj) if is_part else target.config
        ends = ReadEnds(whole, sizes, config, target) if is_part and not target.has_gathered_ends else None
        if is_assistant(path):
            is_led = rank is not None and rank.shard.rank > 0
            return load_assistant(path, Assisted(target, sizes, rank, None if is_led else ends), is_made_up)
        load_head = load_mtp if settings.method == "mtp" else load_eagle3
        return load_head(path, sizes, target, is_made_up=is_made_up, ends=ends)
    assert settings.model is not None, settings
    load_format = "dummy" if is_made_up else "auto"
    given = {"model": settings.model, "load_format": load_format, "model_impl": "native", "mmproj": None}
    own = msgspec.structs.replace(config, **given)
    model = load_model(resolve_model(settings.model), loaded.dtype, own).model
    if isinstance(model, Llama) and model.config.recurrent is not None:
        raise ConfigError(f"speculative_config: the draft model {settings.model!r} has recurrent layers: use another")
    if model.vocab_size != loaded.model.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {settings.model!r} has {model.vocab_size} tokens and the model has "
            f"{loaded.model.vocab_size}: use one with the same vocabulary"
        )
    return model


def tap_for_head(config: EngineConfig, model: Llama) -> None:
    """Let a part of a model keep the hidden states that a draft head in another process reads, if there is one.

    Errors: those of load_drafting_model().
    """
    settings = config.speculative_config
    if settings is not None and settings.runs_head:
        whole = read_model_config(resolve_model(config.model), config.mmproj)
        path = resolve_model(settings.model or config.model)
        of_assistant = (whole.num_hidden_layers,)
        model.tap(of_assistant if is_assistant(path) else head_taps(path, settings.method, whole))


def _kv_window(model: Model, config: EngineConfig) -> tuple[int, int]:
    """Return kv_window and kv_page_blocks of ModelInfo, and give the model's cache such pages.

    Both are 0 with a draft model, which sees other tokens, and on a GPU, whose kernels also multiply tokens outside the
    window.
    """
    drafts = config.speculative_config is not None and config.speculative_config.runs_model
    if not isinstance(model, Llama) or config.device != "cpu" or drafts:
        return 0, 0
    window = max((window for window in model.windows_of_model if window is not None), default=0)
    if None not in model.windows_of_model:
        return window, 0
    if not model.num_blocks_per_page:
        return 0, 0
    if (option := keeping_option(config)) is not None:
        if config.kv_window:
            raise ConfigError(
                f"kv_window={config.kv_window}: some layers of this model see all tokens, but "
                f"with {option} the others "
                f"keep their KV blocks too: leave out kv_window or {option}"
            )
        return 0, 0
    model.split_cache(model.num_blocks_per_page)
    return window, model.num_blocks_per_page


def _fingerprint(source: LoadedModel, dtype: Dtype) -> str:
    parts = [source.fingerprint, element_name(dtype), _variant(source)]
    return source.label + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _variant(source: LoadedModel) -> str:
    """Return the name of every kernel and summation order, a line for each part of the model."""
    parts = [source.model.variant, f"draw={DRAW}"]
    if source.pooler is not None:
        parts.append(source.pooler.variant)
    if source.vision is not None:
        parts.append(source.vision.variant)
    return "\n".join(parts)


# The pages for a config whose window layers free KV blocks (core/models/layers/cache_pages.py).


def keeping_option(config: EngineConfig) -> str | None:
    """If only some layers have a window, return the option that makes layers keep all blocks; None: there is none.

    A step of whole prompts needs them all.
    """
    if config.kv_window == 0:
        return "kv_window"
    if config.kv_page_blocks == 0:
        return "kv_page_blocks"
    return None if config.enable_chunked_prefill else "enable_chunked_prefill"
