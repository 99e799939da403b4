"""Loading a transformers model from its folder, with this engine's attention, and its errors."""

import traceback
from pathlib import Path
from typing import Any

import torch

from core.models.transformers.transformers_attention import INSTEAD, attend, make_mask
from ipc.errors import EngineCoreError, ModelFileError, UnsupportedModelError

#: The name under which this engine's attention is registered in transformers.
ATTENTION_NAME = "engine_core_paged"
#: Nothing is downloaded, and no code from the model's folder is run. Without the second, transformers may ask on stdin.
_FROM_FILES: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_transformers_model(path: Path, dtype: torch.dtype, made_up: bool) -> Any:
    """Load the model of a folder, with this engine's attention.

    made_up: use random weights, the same in each run. Errors: ModelFileError, UnsupportedModelError.
    """
    if path.suffix == ".gguf":
        raise UnsupportedModelError(f"{path}: transformers runs model folders here, not .gguf files")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ModelFileError(
            f"{path}: this architecture runs through transformers, which is not installed: "
            "pip install transformers, or engine-core with its extra [transformers]"
        ) from error
    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
    try:
        model = _open(path, dtype, made_up)
    except (EngineCoreError, MemoryError):
        raise
    except Exception as error:  # transformers and the libraries that it calls raise many types
        # it has its own table of attention functions
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            text = f"{path}: its code does not use transformers' attention interface{INSTEAD}"
            raise UnsupportedModelError(text) from error
        raise ModelFileError(f"{path}: transformers cannot load it: {described(error)}") from error
    model.train(False)
    return model


def described(error: Exception) -> str:
    """Return the error's type, text and location, because the text alone rarely explains it to a user."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "transformers" in Path(frame.filename).parts), frames[-1])
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}: {error}"


def _open(path: Path, dtype: torch.dtype, made_up: bool) -> Any:
    """Load the model of a folder; made_up: with random weights, as transformers initializes them.

    Errors: ModelFileError, and any error of transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    _check_kind(path)
    config = AutoConfig.from_pretrained(path, **_FROM_FILES)
    _check_quantization(path, getattr(config, "quantization_config", None))
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    if not made_up:
        options |= {"use_safetensors": True, **_FROM_FILES}
        model, found = auto.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        _check_found(path, found)
        return model
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return auto.from_config(config, **options)


def _check_kind(path: Path) -> None:
    """Check that transformers has such a model: its own error tells to upgrade it. Errors: UnsupportedModelError."""
    from transformers import CONFIG_MAPPING, PretrainedConfig, __version__

    settings, _ = PretrainedConfig.get_config_dict(path, **_FROM_FILES)
    kind = settings.get("model_type")
    if kind not in CONFIG_MAPPING and "auto_map" not in settings:  # code of the folder: transformers' error says so
        names = settings.get("architectures")
        raise UnsupportedModelError(
            f"{path}: model_type={kind!r:.80}, architectures={names!r:.200}: neither this engine nor transformers "
            f"{__version__} has such a model; docs/models.md names those that run"
        )


def _check_quantization(path: Path, settings: Any) -> None:
    """Check that transformers supports a quantization, because it ignores unknown ones.

    Errors: UnsupportedModelError.
    """
    if settings is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    kinds: Any = AutoHfQuantizer
    values = settings if isinstance(settings, dict) else settings.to_dict()
    if values.get("quant_method") == "bitnet":
        raise UnsupportedModelError(
            f"{path}: quantization_config.quant_method='bitnet' needs products of ternary weights with activations of "
            "8 bits and one scale for a token, which this version does not have"
        )
    if not kinds.supports_quant_method(values):
        method = values.get("quant_method")
        raise UnsupportedModelError(f"{path}: quantization_config.quant_method={method!r:.80} is none of transformers'")


def _check_found(path: Path, found: dict[str, Any]) -> None:
    """Check that the files have all weights with the shapes of config.json: transformers would make up the others.

    Errors: ModelFileError.
    """
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        raise ModelFileError(f"{path}: {name} has the shape {list(theirs)}; by its config.json it is {list(ours)}")
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise ModelFileError(f"{path}: no file has {missing[0]}{more}, which its config.json requires")


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the EOS token ids from the model's generation config or else its config; empty if it has none."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = model.config.get_text_config().eos_token_id
    ids = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
    return tuple(int(token) for token in ids)
