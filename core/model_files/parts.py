"""Which models several workers can compute together, and how many they may be: looked at before any worker starts."""

from collections.abc import Iterator
from pathlib import Path

from core.model_files.model_config import is_foreign, read_model_config
from core.models.config import ModelConfig
from core.models.parts.recurrent_part import most_ranks
from core.models.parts.stage import layers_of_stages
from ipc.errors import ConfigError
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig

NO_PARTS = " > 1 needs the C kernels at numerics level L2"


def check_workers(config: EngineConfig) -> None:
    """Check that the workers of this config can compute its model together.

    Errors: ConfigError; ModelFileError, UnsupportedModelError for a model that cannot be read.
    """
    num_ranks, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if config.executor != "local" or max(num_ranks, num_stages) == 1:
        return
    path = resolve_model(config.model)
    is_ours = config.model_impl == "native" or (config.model_impl == "auto" and not is_foreign(path))
    check_parts(path, config, read_model_config(path, config.mmproj) if is_ours else None, num_ranks, num_stages)


def check_parts(path: Path, config: EngineConfig, model: ModelConfig | None, num_ranks: int, num_stages: int) -> None:
    """Check that so many workers can compute the model together. model: None = transformers' code.

    Errors: ConfigError.
    """
    if num_ranks == num_stages == 1:
        return
    option = part_option(num_ranks)
    if config.device == "cuda":
        _check_devices(config, num_stages)
    elif config.numerics == "L0" or config.cpu_kernels == "torch":
        raise ConfigError(f"{option}{NO_PARTS}: leave out numerics and cpu_kernels, or {option}")
    if model is None or not model.is_causal:
        kind = "needs transformers' code" if model is None else "is an encoder"
        raise ConfigError(f"{option}{NO_PARTS}, for decoders of our own, and {path} {kind}: leave {option} out")
    if num_stages > 1:
        layers_of_stages(model, num_stages)
    if num_ranks == 1:
        return
    if model.full_heads is not None and not _is_nested(model):
        what = "layers with other heads"
        raise ConfigError(f"{path} has {what}, which cannot be split among ranks: leave tensor_parallel_size out")
    for most, what in _most_ranks(model):
        if num_ranks > most:
            raise ConfigError(
                f"tensor_parallel_size={num_ranks} is more than the {most} {what} of {path}: use at most {most}"
            )


def _most_ranks(model: ModelConfig) -> Iterator[tuple[int, str]]:
    """Yield how many there are of what each rank needs one of, and its name."""
    yield model.num_attention_heads, "query heads"
    widths = [model.intermediate_size]
    if (experts := model.experts) is not None:
        widths += [experts.intermediate_size, experts.shared_size]
    yield min(width for width in widths if width), "columns of an MLP"
    if (recurrent := model.recurrent) is not None:
        what = "groups of heads" if recurrent.takes_turns else "heads"
        yield most_ranks(recurrent), f"{what} of the recurrent layers"


def _check_devices(config: EngineConfig, num_stages: int) -> None:
    """Check that GPUs can compute the model together. Errors: ConfigError."""
    refusals = {
        "numerics='L0'": config.numerics == "L0",
        "pipeline_parallel_size > 1": num_stages > 1,
        "nnodes > 1": config.nnodes > 1,
    }
    if refused := next((name for name, is_wanted in refusals.items() if is_wanted), None):
        raise ConfigError(f"device='cuda' with several workers does not support {refused}: leave one of the two out")


def _is_nested(model: ModelConfig) -> bool:
    """Return whether ranks can have whole KV heads in all layers: of two numbers of them, one is a multiple."""
    counts = sorted({model.heads_of(layer).num_key_value_heads for layer in range(model.num_hidden_layers)})
    return all(count % counts[0] == 0 for count in counts)


def part_option(num_ranks: int) -> str:
    """Return the option that makes a process compute a part of a model only. num_ranks: 1 = as a stage."""
    return "pipeline_parallel_size" if num_ranks == 1 else "tensor_parallel_size"
