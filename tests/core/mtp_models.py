"""Folders of tiny models with a layer for multi-token prediction, and its drafts by transformers' own layer.

transformers has no code for these layers. They are one of the model's decoder layers, with an input and an output of
their own, as in vLLM's qwen3_5_mtp.py, deepseek_mtp.py, glm4_moe_mtp.py and exaone_moe_mtp.py. No published checkpoint
was tried: a layer that read another hidden state would guess worse, and change no token.
"""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from safetensors.torch import load_file, save_file

from tests.core.models.checkpoints import build
from tests.core.models.gguf_checkpoints import GGUF_CASES, converted, write_model


class Family(NamedTuple):
    case: str  # of tests/core/models/checkpoints.py
    layer: int  # the model's layer that the layer for multi-token prediction is like
    setting: str = "num_nextn_predict_layers"
    is_nextn: bool = True  # it has the name of a layer after the last one


FAMILIES = {
    "qwen3.5": Family("qwen3.5", 3, "mtp_num_hidden_layers", False),
    "qwen3.5-moe": Family("qwen3.5-moe", 3, "mtp_num_hidden_layers", False),
    "qwen3-next": Family("qwen3-next", 3, "", False),
    "glm4-moe": Family("glm4-moe", 2),
    "glm4.7-flash": Family("glm4.7-flash", 2),
    "deepseek-v3": Family("deepseek-v3", 2),
    "exaone-moe": Family("exaone-moe", 0, is_nextn=False),
}


class MtpModel:
    """transformers' model, and a layer for multi-token prediction."""

    def __init__(self, family: Family, share: float | None = None, **settings: Any) -> None:
        """Make a random layer. share: of what layers add to the hidden states; then the layer knows what the model
        makes of a token without its layers, and is right as often as they change nothing.
        """
        self.family, self.model = family, build(family.case, **settings)
        base = self.model.model
        self.layer = copy.deepcopy(base.layers[family.layer])
        generator = torch.Generator().manual_seed(5)
        hidden = self.model.config.hidden_size
        self.fc = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
        self.token_norm, self.state_norm, self.norm = (copy.deepcopy(base.norm) for _ in range(3))
        with torch.no_grad():
            for part in (self.layer, self.token_norm, self.state_norm, self.norm):
                for tensor in (*part.parameters(), *part.buffers()):
                    tensor += 0.2 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)

        if share is not None:
            self._know(share, base.norm)

    @torch.no_grad()
    def _know(self, share: float, norm: Any) -> None:
        hidden = self.model.config.hidden_size
        self.fc = torch.eye(hidden, 2 * hidden)
        self.norm.load_state_dict(norm.state_dict())
        plain = torch.ones(hidden)
        self.token_norm.weight.copy_(0 * plain if "qwen" in self.family.case else plain)  # Qwen's adds 1
        for part, factor in ((self.model.model.layers, share), (self.layer, 0.0)):
            for name, tensor in part.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    tensor *= factor

    def write(self, folder: Path) -> str:
        """Write a folder as the family's are. Embeddings and head are the model's, and a nextn layer repeats them."""
        self.model.save_pretrained(folder)
        whole = load_file(folder / "model.safetensors")
        layers = self.model.config.num_hidden_layers
        if self.family.is_nextn:
            stem = f"model.layers.{layers}."
            places = {"fc": "eh_proj", "token": "enorm", "state": "hnorm", "norm": "shared_head.norm", "layer": ""}
            whole[f"{stem}embed_tokens.weight"] = whole["model.embed_tokens.weight"].clone()
            whole[f"{stem}shared_head.head.weight"] = whole["lm_head.weight"].clone()
        else:
            stem = "mtp."
            places = {"token": "pre_fc_norm_embedding", "state": "pre_fc_norm_hidden"}
            places |= {"fc": "fc", "norm": "norm", "layer": "layers.0."}
        norms = {"token": self.token_norm, "state": self.state_norm, "norm": self.norm}
        tensors = {f"{stem}{places[name]}.weight": norm.weight for name, norm in norms.items()}
        tensors[f"{stem}{places['fc']}.weight"] = self.fc
        self.model.model.layers[self.family.layer], before = self.layer, self.model.model.layers[self.family.layer]
        self.model.save_pretrained(folder / "other")  # with the names that transformers gives a layer's tensors
        self.model.model.layers[self.family.layer] = before
        own = f"model.layers.{self.family.layer}."
        for name, tensor in load_file(folder / "other" / "model.safetensors").items():
            if name.startswith(own):
                tensors[f"{stem}{places['layer']}{name.removeprefix(own)}"] = tensor
        save_file(
            whole | {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
        )
        settings = json.loads((folder / "config.json").read_text())
        settings |= {self.family.setting: 1} if self.family.setting else {}
        (folder / "config.json").write_text(json.dumps(settings))
        return str(folder)

    @torch.no_grad()
    def write_gguf(self, path: Path, layer: Path | None = None) -> str:
        """Write a file as llama.cpp's converter does: the layer follows the model's last one.

        layer: the file with the layer, with embeddings and head, but without the other layers; None = it is the same.
        """
        index, count, kind = self.family.layer, self.model.config.num_hidden_layers, GGUF_CASES[self.family.case]
        more = 1.0 if "qwen" in self.family.case else 0.0  # what the converter adds to norms
        parts = {"eh_proj": self.fc, "enorm": self.token_norm.weight + more, "hnorm": self.state_norm.weight + more}
        own = {f"blk.{count}.nextn.{name}.weight": tensor.contiguous() for name, tensor in parts.items()}
        own[f"blk.{count}.nextn.shared_head_norm.weight"] = self.norm.weight + more
        self.model.model.layers[index], before = self.layer, self.model.model.layers[index]
        for name, tensor in converted(self.model, kind).items():
            if name.startswith(f"blk.{index}."):
                own[name.replace(f"blk.{index}.", f"blk.{count}.")] = tensor
        self.model.model.layers[index] = before

        def further(writer: gguf.GGUFWriter) -> None:
            writer.kv_data[0].pop(f"{kind}.block_count")
            writer.add_block_count(count + 1)
            writer.kv_data[0].pop(f"{kind}.nextn_predict_layers", None)
            writer.add_nextn_predict_layers(1)

        def with_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor for name, tensor in tensors.items() if layer is None or "blk" not in name} | own

        write_model(layer or path, self.model, kind, further, with_layer)
        if layer is not None:
            write_model(path, self.model, kind)
        return str(path)

    @torch.no_grad()
    def check(self, tokens: list[int], drafts: list[int], tolerance: float = 2e-3) -> None:
        """Each draft is a largest logit of the layer after the tokens and the drafts before it."""
        base = self.model.model
        states = base(torch.tensor([tokens[:-1]])).last_hidden_state  # after the final norm
        ids = tokens[1:]
        for index, draft in enumerate(drafts):
            embedded = base.embed_tokens(torch.tensor([ids]))
            if self.family.is_nextn:
                embedded[:, 0] = 0
            x = torch.cat((self.token_norm(embedded), self.state_norm(states)), -1) @ self.fc.T
            places = torch.arange(len(ids))[None]
            rotation = base.rotary_emb(x, places)
            mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            out = self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=places)
            out = self.norm(out[0] if isinstance(out, tuple) else out)
            logits = self.model.lm_head(out[0, -1])
            assert logits[draft] >= logits.max() - tolerance, (index, draft, int(logits.argmax()))
            ids = [*ids, draft]
            states = torch.cat((states, out[:, -1:]), 1)
