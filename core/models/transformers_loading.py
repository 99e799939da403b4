"""A model of transformers from its folder, with our attention in it, or an error that says what is wrong with it."""

import traceback
from pathlib import Path
from typing import Any

import torch

from core.models.transformers_attention import INSTEAD, attend, make_mask
from ipc.errors import EngineCoreError, ModelFileError, UnsupportedModelError

#: Under this name our attention is known to transformers.
ATTENTION_NAME = "engine_core_paged"


def load_transformers_model(path: Path, dtype: torch.dtype, made_up: bool) -> Any:
    """The model of a folder, with this engine's attention; made up: with random weights, the same every time.

    Errors: ModelFileError, UnsupportedModelError."""
    if path.suffix == ".gguf":
        raise UnsupportedModelError(f"{path}: transformers runs model folders here, not .gguf files")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ModelFileError(
            f"{path}: this architecture runs through transformers, which is not installed: "
            "pip install 'engine-core[transformers]'"
        ) from error
    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
    try:
        model = _open(path, dtype, made_up)
    except (EngineCoreError, MemoryError):
        raise
    except Exception as error:  # of transformers and what it calls, each with errors of its own
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # a table of attention functions of its own
            text = f"{path}: its code does not use transformers' attention interface{INSTEAD}"
            raise UnsupportedModelError(text) from error
        raise ModelFileError(f"{path}: transformers cannot load it: {described(error)}") from error
    model.train(False)
    return model


def described(error: Exception) -> str:
    """What it says, and, since that is for programmers, where."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "transformers" in Path(frame.filename).parts), frames[-1])
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}: {error}"


def _open(path: Path, dtype: torch.dtype, made_up: bool) -> Any:
    """The model of a folder; made up: with random weights, as transformers initializes them. Errors: ModelFileError,
    and whatever transformers raises."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    if not made_up:
        options |= {"use_safetensors": True, "local_files_only": True}
        model, found = auto.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        _check_found(path, found)
        return model
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return auto.from_config(AutoConfig.from_pretrained(path, local_files_only=True), **options)


def _check_found(path: Path, found: dict[str, Any]) -> None:
    """Transformers makes weights up where the files have none, or others than config.json says. Errors:
    ModelFileError."""
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        raise ModelFileError(f"{path}: {name} has the shape {list(theirs)}; by its config.json it is {list(ours)}")
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise ModelFileError(f"{path}: no file has {missing[0]}{more}, which its config.json asks for")


def eos_token_ids(model: Any) -> tuple[int, ...]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = model.config.get_text_config().eos_token_id
    ids = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
    return tuple(int(token) for token in ids)
