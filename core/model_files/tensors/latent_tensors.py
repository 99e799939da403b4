"""The tensors of latent attention in model files: their shapes, and the order of their rows."""

from core.model_files.tensors.tensor_names import head_order
from core.models.config import LatentParts, ModelConfig


def latent_shapes(config: ModelConfig, latent: LatentParts) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a layer's attention by name, without the layer's prefix."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries = heads * (latent.plain_dim + latent.rotated_dim)
    cached = latent.latent_dim + latent.rotated_dim
    shapes: dict[str, tuple[int, ...]]
    if latent.query_dim is None:
        shapes = {"q_proj.weight": (queries, hidden), "kv_a_proj.weight": (cached, hidden)}
    else:
        shapes = {
            "q_a_proj.weight": (latent.query_dim, hidden),
            "kv_a_proj.weight": (cached, hidden),
            "q_a_norm.weight": (latent.query_dim,),
            "q_b_proj.weight": (queries, latent.query_dim),
        }
    shapes["kv_a_norm.weight"] = (latent.latent_dim,)
    if latent.is_split:
        shapes |= {f"heads.{head}.k_b_proj.weight": (latent.latent_dim, latent.plain_dim) for head in range(heads)}
        shapes |= {f"heads.{head}.v_b_proj.weight": (latent.value_dim, latent.latent_dim) for head in range(heads)}
    else:
        shapes["kv_b_proj.weight"] = (heads * (latent.plain_dim + latent.value_dim), latent.latent_dim)
    shapes["o_proj.weight"] = (hidden, heads * latent.value_dim)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def latent_orders(
    config: ModelConfig, latent: LatentParts, interleaves: bool
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return, by name, the number of row groups, and the order in which each group's rows are taken from the file.

    Rotated numbers come last in a query head, and after the latent vector. interleaves: see head_order().
    """
    rotated = head_order(latent.rotated_dim, latent.rotated_dim, interleaves=interleaves)
    if rotated == tuple(range(latent.rotated_dim)):
        return {}

    def after(count: int) -> tuple[int, ...]:
        return (*range(count), *(count + place for place in rotated))

    query = "q_proj" if latent.query_dim is None else "q_b_proj"
    return {query: (config.num_attention_heads, after(latent.plain_dim)), "kv_a_proj": (1, after(latent.latent_dim))}
