"""Folders of tiny Gemma 4 models with an assistant, and its drafts by transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch

from tests.core.models.checkpoints import SIZES, build, with_random_weights
from tests.core.models.gemma4_checkpoints import GEMMA4_CASES, gemma4_metadata, gemma4_tensors
from tests.core.models.gguf_checkpoints import write_model

#: Fewer tokens than most requests of the tests have.
WINDOW = 20
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 3}
_HIDDEN = 32


class AssistedModel:
    """transformers' model and its assistant."""

    def __init__(
        self, case: str, share: float | None = None, own: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """Make random weights. own: settings of the assistant. share: of what layers add to the hidden states.

        With a share the assistant knows what the model makes of a token without its layers, and is right as often as
        they change nothing.
        """
        import transformers

        self.model = build(case, sliding_window=WINDOW, **settings)
        hidden = self.model.config.hidden_size
        kind, sizes = GEMMA4_CASES[case]
        text = {
            **SIZES,
            **{name: value for name, value in sizes.items() if "expert" not in name and "moe" not in name},
            **settings,
            "hidden_size": _HIDDEN if share is None else hidden,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": False,
            "final_logit_softcapping": None,
        }
        if kind == "gemma4_text":
            text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        name = "Gemma4Assistant" if kind == "gemma4_text" else "Gemma4UnifiedAssistant"
        config = getattr(transformers, f"{name}Config")(
            text_config=transformers.AutoConfig.for_model(kind, **text, attn_implementation="eager"),
            backbone_hidden_size=hidden,
            **(own or {}),
        )
        self.assistant = with_random_weights(getattr(transformers, f"{name}ForCausalLM")(config).eval(), 12)
        if config.use_ordered_embeddings:
            order = torch.randperm(text["vocab_size"], generator=torch.Generator().manual_seed(13))
            self.assistant.masked_embedding.token_ordering.copy_(order)
        if share is not None:
            self._know(share)

    @torch.no_grad()
    def _know(self, share: float) -> None:
        hidden = self.model.config.hidden_size
        self.assistant.pre_projection.weight.copy_(torch.eye(hidden, 2 * hidden))
        self.assistant.model.norm.load_state_dict(self.model.model.norm.state_dict())
        self.assistant.model.embed_tokens.weight.copy_(self.model.model.embed_tokens.weight)
        for part, factor in ((self.model.model.layers, share), (self.assistant.model.layers, 0.0)):
            for name, tensor in part.named_parameters():
                # What a layer adds is normalised last.
                if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                    tensor *= factor

    def write(self, folder: Path) -> tuple[str, str]:
        """Write the two folders."""
        self.model.save_pretrained(folder / "model")
        self.assistant.save_pretrained(folder / "assistant")
        return str(folder / "model"), str(folder / "assistant")

    def write_gguf(self, folder: Path) -> tuple[str, str]:
        """Write the two files as llama.cpp's converter does, without the clusters of tokens."""
        model = write_model(folder / "model.gguf", self.model, "gemma4")
        config, kind = self.assistant.config.text_config, "gemma4-assistant"
        around, own = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, tensor in self.assistant.state_dict().items():
            if "projection" in name:
                around[f"nextn.{name}"] = tensor
            elif not name.startswith(("masked", "lm_head")):
                own[name] = tensor
        tensors = gemma4_tensors(SimpleNamespace(config=config, state_dict=lambda: own))
        writer = gguf.GGUFWriter(folder / "assistant.gguf", kind)
        gemma4_metadata(writer, config)
        writer.add_uint32(f"{kind}.embedding_length_out", self.model.config.hidden_size)
        writer.add_nextn_predict_layers(config.num_hidden_layers)
        for name, tensor in {**tensors, **around}.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(model), str(folder / "assistant.gguf")

    @torch.no_grad()
    def check(self, tokens: list[int], drafts: list[int], tolerance: float = 2e-3) -> None:
        """Each draft is a largest logit of the assistant after the tokens and the drafts before it."""
        found = self.model(
            torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        state, token, embed = found.hidden_states[-1][:, -1:], tokens[-1], self.model.get_input_embeddings()
        for index, draft in enumerate(drafts):
            read = self.assistant(
                inputs_embeds=torch.cat((embed(torch.tensor([[token]])), state), -1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=found.shared_kv_states,
            )
            logits = read.logits[0, 0]
            assert logits[draft] >= logits.max() - tolerance, (index, draft, int(logits.argmax()))
            token, state = draft, read.last_hidden_state
