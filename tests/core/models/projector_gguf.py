"""GGUF files of the tiny models with images, laid out by hand as llama.cpp's converter does it: text, and mmproj."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

from tests.core.models.gguf_checkpoints import write_model

_CONNECTOR = {
    "gemma3": ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    "idefics3": ("connector.modality_projection.proj.weight", "mm.model.fc.weight"),
}
#: The pair of bytes that a merge makes a token of: a file cannot have an empty list of merges.
_PAIR = ("\u0100", "\u0101")


def text_model(model: Any) -> Any:
    """The text's model of a model with images, by itself."""
    import transformers

    config = model.config.text_config
    config.eos_token_id = 0
    text = transformers.AutoModelForCausalLM.from_config(config).eval()
    own = {}
    for name, tensor in model.state_dict().items():
        found = re.fullmatch(r"model\.(?:language_model|text_model)\.(.+)", name)
        if found is not None:
            own[f"model.{found[1]}"] = tensor
        elif name == "lm_head.weight":
            own[name] = tensor
    text.load_state_dict(own, strict=False)
    return text


def write_text(path: Path, model: Any, architecture: str, hf: tokenizers.Tokenizer, unused: str) -> Path:
    """Write the text's model. unused: a token that no prompt has, whose place a merge's result takes."""
    vocabulary = sorted(hf.get_vocab(), key=hf.get_vocab().__getitem__)
    special = {token.content for token in hf.get_added_tokens_decoder().values()}

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["".join(_PAIR) if token == unused else token for token in vocabulary])
        writer.add_token_types([3 if token in special and token != unused else 1 for token in vocabulary])
        writer.add_token_merges([" ".join(_PAIR)])

    return write_model(path, text_model(model), architecture, tokenizer)


def _begun(path: Path, model: Any, kind: str, image_size: int, patch_size: int) -> gguf.GGUFWriter:
    """A file with what all projectors say of their sizes."""
    vision, writer = model.config.vision_config, gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(image_size)
    writer.add_vision_patch_size(patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_use_gelu(True)
    return writer


def _ended(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_internvl(path: Path, model: Any) -> Path:
    """Write InternVL's encoder."""
    vision = model.config.vision_config
    writer = _begun(path, model, "internvl", vision.image_size[0], vision.patch_size[0])
    writer.add_vision_image_mean([0.48145466, 0.4578275, 0.40821073])
    writer.add_vision_image_std([0.26862954, 0.26130258, 0.27577711])
    writer.add_vision_projector_scale_factor(int(1 / model.config.downsample_ratio))
    writer.add_uint32("clip.vision.preproc_min_tiles", 1)
    writer.add_uint32("clip.vision.preproc_max_tiles", 4)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 4)
    others = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
    for name, tensor in model.state_dict().items():
        if found := re.fullmatch(r"model\.multi_modal_projector\.(\w+)\.(\w+)", name):
            name = f"{others[found[1]]}.{found[2]}"
        elif ".vision_tower." not in name:
            continue
        elif ".lambda_" in name or name.endswith("position_embeddings"):
            name += ".weight"
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.float().numpy())
    return _ended(writer, path)


def write_lfm2_vl(path: Path, model: Any) -> Path:
    """Write LFM2-VL's encoder. The matrix of patches is that of a convolution."""
    vision = model.config.vision_config
    writer = _begun(path, model, "lfm2", 256, vision.patch_size)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_projector_scale_factor(model.config.downsample_factor)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        found = re.fullmatch(r"model\.(vision_tower|multi_modal_projector)\.(.+)", name)
        if found is None:
            continue
        if name.endswith("patch_embedding.weight"):
            side = vision.patch_size
            tensor = tensor.view(len(tensor), side, side, 3).permute(0, 3, 1, 2)
        theirs = f"vision_tower.vision_model.{found[2]}" if found[1] == "vision_tower" else name.removeprefix("model.")
        writer.add_tensor(names.get_name(theirs, (".weight", ".bias")), np.ascontiguousarray(tensor.float().numpy()))
    return _ended(writer, path)


def write_projector(path: Path, model: Any, kind: str, *, swapped: bool = False, **sizes: int) -> Path:
    """Write the vision encoder. swapped: the first converters' names of the MLP's matrices. sizes: clip.vision's."""
    vision, writer = model.config.vision_config, gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(True)
    for name, value in sizes.items():
        writer.add_uint32(f"clip.vision.{name.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    theirs, ours = _CONNECTOR[kind]
    for name, tensor in model.state_dict().items():
        numbers = tensor.float().numpy()
        if name.endswith(theirs):
            writer.add_tensor(ours, np.ascontiguousarray(numbers))
        elif name.endswith("mm_soft_emb_norm.weight"):
            writer.add_tensor("mm.soft_emb_norm.weight", numbers + 1)
        elif (found := re.search(r"(?:embeddings|encoder|post_layernorm)\..*", name)) and "vision" in name:
            stem, ending = f"vision_tower.vision_model.{found[0]}".rsplit(".", 1)
            file_name = names.get_name(stem)
            if swapped and "ffn" in file_name:
                block, _, part = file_name.rpartition("_")
                file_name = f"{block}_{'down' if part == 'up' else 'up'}"
            writer.add_tensor(f"{file_name}.{ending}", numbers)
    return _ended(writer, path)
