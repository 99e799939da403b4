"""features_for: the features that requests to a model may have; a part of the executors that run a model."""

from core.features.store import Features, ImageEncoder
from core.models.config import ModelConfig
from ipc.options.config import EngineConfig


def features_for(
    config: EngineConfig, model: ModelConfig, encoder: ImageEncoder | None, *, drafts: bool, pools: bool
) -> Features | None:
    """Return the features of a model that reads them; None if it takes neither embeddings nor images.

    model: the whole one. drafts: another model makes drafts, and it is no assistant, which reads sampled tokens only.
    pools: the engine answers with vectors, and then its requests may have images, but no prompt_embeds.
    """
    settings, refusal = config.speculative_config, ""
    if settings is not None and drafts:
        refusal = (
            f"this engine drafts with a model (speculative_config: {settings.method}) that does not read features "
            "(prompt_embeds, images): use method ngram or suffix"
        )
    most = config.limit_mm_per_prompt.get("image")
    takes_rows = model.per_layer is None and not pools
    if not takes_rows and encoder is None:
        return None
    return Features(model.hidden_size, encoder, refusal, max_images=most, takes_rows=takes_rows)
