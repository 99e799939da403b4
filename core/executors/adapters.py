"""model_adapters: the adapters that a loaded model takes; a part of the executors that run a model."""

from core.adapters.store import Adapters
from core.executors.load import Loaded
from core.model_files.tensors.adapted_layers import gguf_layers, peft_layers
from core.models.layers.adapted import AdaptedMatrices, takes_adapters
from core.models.llama import Llama
from core.models.operations.operations import AdaptingOperations
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig


def model_adapters(config: EngineConfig, loaded: Loaded) -> Adapters | None:
    """Return the model's adapters, with the config's lora_modules loaded; None without enable_lora.

    Errors: ConfigError for a model that takes none; ModelFileError, UnsupportedModelError for the modules' files.
    """
    if not config.enable_lora:
        return None
    model = loaded.model
    if not isinstance(model, Llama):
        what = "an encoder" if loaded.info.is_encoder else "run by transformers' code"
        raise ConfigError(f"enable_lora: {loaded.info.name} is {what}, whose layers take no adapters: leave it out")
    if not isinstance(model.operations, AdaptingOperations) or not takes_adapters(model.layers):
        raise ConfigError(f"enable_lora: layers of {loaded.info.name} take no adapters: leave it out")
    sizes = model.config
    return Adapters(config, AdaptedMatrices(sizes, model.operations, peft_layers(sizes), gguf_layers(sizes)))
