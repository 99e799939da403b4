"""Adapters of models whose files have other rows or names than the kernels: logits are those of the merged model.

Heads in another order, Q, K and V or gate and up in one layer, and names of their own; from PEFT's folders and from
GGUF files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from core.adapters.adapter import AdapterWeights
from core.adapters.peft_folder import read_peft_folder
from core.adapters.store import read_gguf_adapter
from core.model_files.model_config import read_model_config
from core.model_files.tensors.adapted_layers import gguf_layers, peft_layers
from core.model_files.tensors.weights import load_weights
from core.models.config import ModelConfig
from core.models.layers.adapted import AdaptedMatrices, takes_adapters
from core.models.llama import Llama
from core.models.operations.token_adapters import TokenAdapters
from core.models.step import ModelInputs
from ipc.errors import ModelFileError
from ipc.tables.arrays import Floats
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.elements import FLOAT32
from tests.core.adapters.peft_files import write_peft
from tests.core.models.centred_checkpoints import parts_in_turn
from tests.core.models.checkpoints import PROMPT_LENGTHS, SIZES, build
from tests.core.models.float_errors import check_errors
from tests.core.models.gguf_checkpoints import GGUF_CASES, INTERLEAVED, interleaved
from tests.core.models.recurrent_gguf import in_turns, parts_of_qkvz
from tests.core.models.test_llama import Requests
from tests.core.runner.invariance import KINDS, random_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: Partial rotation; neighbours that are rotated; both, with gate and up in one layer; Q, K and V in one layer, too; and
#: KV head by KV head; names of their own.
CASES = ("stablelm-head-norms", "nemotron", "cohere-head-norms", "ernie4.5", "glm4", "phi4-mini", "gpt-neox", "phi")
CASES += ("starcoder2", "exaone", "llama2")
#: Routed MLPs, of which only the attention takes adapters, and the dense MLP of a first layer.
CASES += ("qwen3-moe", "gpt-oss", "glm4.5-air", "llama4")
#: Layers whose matrices differ: of two sizes, without K and V or without V, and with a dense MLP next to experts.
CASES += ("gemma4-e2b", "gemma4-31b", "gemma4-26b-a4b")
#: Layers with recurrent states: convolutions, gated delta nets with gates of attention, by head groups in one file, and
#: with experts, and Mamba-2, with MLPs and without.
CASES += ("lfm2", "qwen3.5", "qwen3-next", "granite4-hybrid", "nemotron-h", "olmo-hybrid", "falcon-h1")
#: Whose GGUF files have two matrices in place of one, or factors in matrices: an adapter there does not fit a model
#: from safetensors, or only up to a rounding.
NO_GGUF_ADAPTER = ("qwen3-next", "granite4-hybrid", "falcon-h1")
RANK, ALPHA = 4, 6.0

Pairs = dict[str, tuple[Floats, Floats]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_adapter(model: Any) -> Pairs:
    """A and B of every linear layer but the head and shared experts."""
    generator, pairs = np.random.default_rng(3), {}
    for name, layer in model.named_modules():
        is_other = layer is model.get_output_embeddings() or any(
            part in name for part in ("shared_expert", "per_layer", "router")
        )
        if isinstance(layer, torch.nn.Linear) and not is_other:
            columns, depth = layer.weight.shape
            a = generator.standard_normal((RANK, depth), np.float32) * np.float32(depth**-0.5)
            pairs[name] = a, generator.standard_normal((columns, RANK), np.float32) * np.float32(0.5 * RANK**-0.5)
    return pairs


def merge(model: Any, pairs: Pairs) -> None:
    layers = dict(model.named_modules())
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            more = ALPHA / RANK * torch.from_numpy(b).double() @ torch.from_numpy(a).double()
            layers[name].weight += more.to(layers[name].weight.dtype)


def prompts() -> list[Any]:
    return [np.random.default_rng(n).integers(3, SIZES["vocab_size"], n) for n in PROMPT_LENGTHS]  # type: ignore[call-overload]


def logits_of(model: Any) -> torch.Tensor:
    """Of all tokens of all prompts."""
    with torch.inference_mode():
        return torch.cat([model(torch.from_numpy(ids)[None]).logits[0] for ids in prompts()])


class AdaptedModel:
    """A model all of whose tokens have one adapter."""

    def __init__(self, model: Llama, host: AdaptedMatrices, weights: AdapterWeights) -> None:
        self._model, self._packed = model, host.pack(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: ModelInputs) -> Any:
        of_token = np.zeros(len(inputs.token_ids), np.int64)
        return self._model.forward(inputs._replace(adapters=TokenAdapters((self._packed,), of_token)))


def adapted_logits(folder: Path, adapter: Path, library: CpuLibrary | None) -> list[torch.Tensor]:
    """All prompts at once, in two chunks."""
    config = read_model_config(folder)
    model = Llama(config, load_weights(folder, config, FLOAT32), FLOAT32, library=library)
    assert takes_adapters(model.layers)
    host = AdaptedMatrices(config, model.operations, peft_layers(config), gguf_layers(config))  # type: ignore[arg-type]
    weights = read_peft_folder(adapter, host.peft_layers, host.shapes, 16)
    assert weights.matrices.keys() == host.shapes.keys()
    requests = Requests(AdaptedModel(model, host, weights), prompts())
    first = requests.step(dict.fromkeys(range(len(PROMPT_LENGTHS)), 3))
    rest = requests.step({n: length - 3 for n, length in enumerate(PROMPT_LENGTHS)})
    return [torch.cat([first[n], rest[n]]) for n in first]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_model(case: str, tmp_path: Path) -> None:
    model = build(case)
    folder, pairs = tmp_path / "model", random_adapter(model)
    model.save_pretrained(folder)
    adapter = write_peft(tmp_path / "adapter", pairs, rank=RANK, alpha=ALPHA, target_modules="all-linear")
    base = logits_of(model)
    merge(model, pairs)
    theirs = logits_of(model)
    exact_model = build(case).double()
    merge(exact_model, pairs)
    exact = logits_of(exact_model)
    for library in (load_cpu_library(), None):
        ours = torch.cat(adapted_logits(folder, adapter, library))
        error = (ours - exact).abs()
        check_errors(error, (theirs - exact).abs())
        assert (base - exact).abs().max() > 1000 * error.max()


def write_gguf(path: Path, model: Any, architecture: str, pairs: Pairs) -> Path:
    """Write an adapter as llama.cpp's convert_lora_to_gguf.py does."""
    config = model.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (a, b) in pairs.items():
        rows = parts_in_turn(name, torch.from_numpy(b), config)
        if config.model_type.startswith("qwen3_5"):
            if name.endswith("out_proj"):
                a = in_turns(name, torch.from_numpy(a), config).contiguous().numpy()
            else:
                rows = in_turns(name, rows, config).contiguous()
        if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            rows = interleaved(rows, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        name = name.replace("model.", "backbone.", config.model_type == "nemotron_h")  # as its files have them
        for part, numbers in (("lora_a", a), ("lora_b", rows.numpy())):
            writer.add_tensor(f"{names.get_name(name)}.weight.{part}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", [case for case in CASES if case in GGUF_CASES and case not in NO_GGUF_ADAPTER])
def test_a_gguf_file_is_the_adapter_of_its_peft_folder(case: str, tmp_path: Path) -> None:
    model = build(case)
    pairs = random_adapter(model)
    model.save_pretrained(tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    shapes = AdaptedMatrices(config, None).shapes  # type: ignore[arg-type]
    folder = write_peft(tmp_path / "adapter", pairs, rank=RANK, alpha=ALPHA, target_modules="all-linear")
    peft = read_peft_folder(folder, peft_layers(config), shapes, 16)
    path = write_gguf(tmp_path / "a.gguf", model, GGUF_CASES[case], pairs)
    assert read_gguf_adapter(path, gguf_layers(config), shapes, 16).digest == peft.digest


def test_heads_that_take_turns_in_the_models_file_do_not_in_peft(tmp_path: Path) -> None:
    """Of Qwen 3.5's GGUF files; and Qwen3-Next's have one matrix of PEFT as two."""
    model = build("qwen3.5")
    model.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    turned = peft_layers(with_heads(config, takes_turns=True))
    for name, size in (("qkv", 2 * 2 * 12 + 4 * 20), ("z", 4 * 20), ("b", 4), ("a", 4)):
        layer = f"model.layers.0.linear_attn.in_proj_{name}"
        (part,) = turned[layer].parts
        rows = torch.arange(size, dtype=torch.float32)[:, None]
        assert part.rows.tolist() == in_turns(layer, rows, model.config)[:, 0].tolist()  # type: ignore[union-attr]
    (out,) = turned["model.layers.0.linear_attn.out_proj"].parts
    columns = torch.arange(4 * 20, dtype=torch.float32)[None]
    expected = in_turns("linear_attn.out_proj", columns, model.config)
    assert out.columns.tolist() == expected[0].tolist()  # type: ignore[union-attr]
    pair = np.ones((RANK, 81), np.float32), np.ones((48, RANK), np.float32)
    folder = write_peft(tmp_path / "a", {"model.layers.0.linear_attn.out_proj": pair}, rank=RANK, alpha=ALPHA)
    with pytest.raises(ModelFileError, match=r"lora_A is \[4, 81\]; the model's layer has 80 columns"):
        read_peft_folder(folder, turned, AdaptedMatrices(config, None).shapes, 16)  # type: ignore[arg-type]


def test_a_matrix_of_peft_may_be_two_of_the_model(tmp_path: Path) -> None:
    """Qwen3-Next's GGUF files have queries, keys and values, and gates; transformers has them by groups of heads."""
    model = build("qwen3-next")
    model.save_pretrained(tmp_path)
    config = with_heads(read_model_config(tmp_path), inputs=("qkv_proj", "z_proj", "ba_proj"))
    layer = "model.layers.0.linear_attn.in_proj_qkvz"
    parts = peft_layers(config)[layer].parts
    rows = torch.arange(2 * 2 * 12 + 2 * 4 * 20, dtype=torch.float32)[:, None]
    expected = parts_of_qkvz(f"{layer}.weight", rows, model.config).values()
    assert [part.name for part in parts] == ["model.layers.0.mixer.qkv_proj", "model.layers.0.mixer.z_proj"]
    for part, own in zip(parts, expected, strict=True):
        assert part.rows.tolist() == own[:, 0].tolist()  # type: ignore[union-attr]


def with_heads(config: ModelConfig, **properties: Any) -> ModelConfig:
    assert config.recurrent is not None
    return msgspec.structs.replace(config, recurrent=msgspec.structs.replace(config.recurrent, **properties))


def test_layers_have_the_names_of_either_code(tmp_path: Path) -> None:
    """EXAONE's own, which its checkpoints have, and Llama's, which transformers runs it by."""
    model = build("exaone")
    model.save_pretrained(tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    shapes, layers = AdaptedMatrices(config, None).shapes, peft_layers(config)  # type: ignore[arg-type]
    pairs = random_adapter(model)
    own = {layer.parts[0].name: name for name, layer in layers.items() if name.startswith("transformer.h.")}
    renamed = {own[name]: pair for name, pair in pairs.items()}
    headless = {name.removeprefix("transformer."): pair for name, pair in renamed.items()}
    digests = set()
    for each in (pairs, renamed, headless):
        folder = write_peft(tmp_path / "adapter", each, rank=RANK, alpha=ALPHA, target_modules="all-linear")
        digests.add(read_peft_folder(folder, layers, shapes, 16).digest)
    assert len(digests) == 1
    folder = write_peft(tmp_path / "adapter", pairs | renamed, rank=RANK, alpha=ALPHA, target_modules="all-linear")
    with pytest.raises(ModelFileError, match="under two names"):
        read_peft_folder(folder, layers, shapes, 16)


def test_adapters_of_a_model_with_images_change_its_texts_model(tmp_path: Path) -> None:
    """As PEFT names the layers of Gemma 3 and Qwen-VL, of Mistral 3 and earlier versions, and of SmolVLM."""
    model = build("llama2")
    model.save_pretrained(tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    shapes, layers = AdaptedMatrices(config, None).shapes, peft_layers(config)  # type: ignore[arg-type]
    pairs, digests = random_adapter(model), set()
    for stem in ("model", "model.language_model", "language_model.model", "model.text_model"):
        renamed = {name.replace("model", stem, 1): pair for name, pair in pairs.items()}
        folder = write_peft(tmp_path / "adapter", renamed, rank=RANK, alpha=ALPHA, target_modules="all-linear")
        digests.add(read_peft_folder(folder, layers, shapes, 16).digest)
    assert len(digests) == 1
    seeing = {f"model.visual.blocks.0.{name}": pair for name, pair in pairs.items()}
    folder = write_peft(tmp_path / "adapter", pairs | seeing, rank=RANK, alpha=ALPHA, target_modules="all-linear")
    with pytest.raises(ModelFileError, match=r"it changes 'model\.visual\.blocks"):
        read_peft_folder(folder, layers, shapes, 16)


def test_layers_of_wrong_sizes_and_names_are_refused(tmp_path: Path) -> None:
    model = build("gpt-neox")
    model.save_pretrained(tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    shapes = AdaptedMatrices(config, None).shapes  # type: ignore[arg-type]
    a, rows = np.ones((RANK, 64), np.float32), np.ones((3 * 64, RANK), np.float32)
    layer = "gpt_neox.layers.0.attention"
    for pairs, text in (
        ({f"{layer}.query_key_value": (a, rows[1:])}, r"lora_B is \[191, 4\]; the model's layer has 192 rows"),
        ({f"{layer}.query_key_value": (a[:, 1:], rows)}, r"lora_A is \[4, 63\]"),
        ({f"{layer}.q_proj": (a, rows[:64])}, "no such matrix"),
    ):
        folder = write_peft(tmp_path / "adapter", pairs, rank=RANK, alpha=ALPHA)
        with pytest.raises(ModelFileError, match=text):
            read_peft_folder(folder, peft_layers(config), shapes, 16)


def test_latent_attention_takes_no_adapters() -> None:
    assert not takes_adapters(random_model(KINDS["latent attention"], FLOAT32).layers)


@pytest.mark.parametrize("name", ["experts.0.gate_proj", "shared_experts.up_proj", "gate", "up_proj"])
def test_adapters_of_experts_are_refused(name: str, tmp_path: Path) -> None:
    build("glm4.5-air").save_pretrained(tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    shapes = AdaptedMatrices(config, None).shapes  # type: ignore[arg-type]
    pair = np.ones((RANK, 48), np.float32), np.ones((40, RANK), np.float32)
    folder = write_peft(tmp_path / "adapter", {f"model.layers.1.mlp.{name}": pair}, rank=RANK, alpha=ALPHA)
    with pytest.raises(ModelFileError, match=rf"it changes 'model\.layers\.1\.mlp\.{name}', but the model has no"):
        read_peft_folder(folder, peft_layers(config), shapes, 16)
