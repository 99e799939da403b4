"""model_features: the features that a loaded model takes; a part of the executors that run a model."""

from core.executors.load import Loaded
from core.features.store import Features
from core.models.llama import Llama
from ipc.options.config import EngineConfig


def model_features(config: EngineConfig, loaded: Loaded) -> Features | None:
    """Return the model's features; None for a model that reads none."""
    model = loaded.model
    if not isinstance(model, Llama) or not model.reads_features or loaded.source.pooler is not None:
        return None
    settings = config.speculative_config
    refusal = ""
    if settings is not None and settings.runs_model:
        refusal = (
            f"this engine drafts by a model (speculative_config: {settings.method}), which does not read features "
            "(prompt_embeds, images): use method ngram or suffix"
        )
    return Features(model.config.hidden_size, loaded.source.vision, refusal)
