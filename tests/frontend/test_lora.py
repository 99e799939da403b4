"""Adapters from LLM on: tokens are those of the merged model by transformers, alone and among other requests."""

import contextlib
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model_files.model_config import read_model_config
from frontend.llm import LLM
from frontend.lora import LoRARequest
from ipc.errors import InvalidRequestError
from ipc.files.model_files import resolve_model
from ipc.params.beam_search import BeamSearchParams
from ipc.params.sampling_params import SamplingParams
from tests.core.adapters.peft_files import matrix_shapes, random_matrices, write_peft
from tests.core.models.checkpoints import build

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

PROMPTS = [list(np.random.default_rng(n).integers(3, 300, n)) for n in (7, 40, 23)]
PROMPTS = [[int(token) for token in prompt] for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Checkpoint:
    """A tiny model with two adapters, and what transformers makes of each merged into it."""

    def __init__(self, folder: Path) -> None:
        self.model = build("llama3")
        self.path = folder / "model"
        self.model.save_pretrained(self.path)
        shapes = matrix_shapes(self.model.config)
        self.adapters, self.paths = [], []
        for seed, (rank, alpha) in enumerate([(4, 8.0), (8, 4.0)], 1):
            matrices = random_matrices(shapes, rank, seed)
            self.adapters.append((matrices, alpha / rank))
            self.paths.append(write_peft(folder / f"adapter-{seed}", matrices, rank=rank, alpha=alpha))
        self.requests = [LoRARequest(f"a{n}", n + 1, str(path)) for n, path in enumerate(self.paths)]

    def expected(self, prompt: list[int], adapter: int | None) -> list[int]:
        return merged_tokens(self.model, prompt, None if adapter is None else self.adapters[adapter])


def merged_tokens(model: Any, prompt: list[int], adapter: Any) -> list[int]:
    """transformers' greedy tokens with the adapter merged into the weights, in float32."""
    weights = dict(model.named_parameters())
    before: dict[str, torch.Tensor] = {}
    if adapter is not None:
        matrices, scale = adapter
        for name, (a, b) in matrices.items():
            weight = weights[f"{name}.weight"]
            before[f"{name}.weight"] = weight.detach().clone()
            with torch.no_grad():
                weight += scale * torch.from_numpy(b).double() @ torch.from_numpy(a).double()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens or 0):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    for name, weight in before.items():
        with torch.no_grad():
            weights[name].copy_(weight)
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    options = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "kv_cache_memory_bytes": 1 << 22, "threads": 1}
    with LLM(str(checkpoint.path), skip_tokenizer_init=True, **options) as llm:
        yield llm


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_the_merged_model(llm: LLM, checkpoint: Checkpoint) -> None:
    """All prompts with each adapter and with none, in one batch."""
    which = [None, 0, 1]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in which]
    requests = [None if one is None else checkpoint.requests[one] for _ in PROMPTS for one in which]
    together = tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=requests))
    assert together == [checkpoint.expected(prompt, one) for prompt in PROMPTS for one in which]
    assert together[0] != together[1] != together[2]
    alone = [
        tokens_of(llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request))[0]
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    assert alone == together


def test_what_is_no_adapter_of_the_engine_is_refused(llm: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": PROMPTS[0]}
    for request, text in [
        (LoRARequest("b", 3, str(tmp_path)), "adapter_config.json"),
        (LoRARequest("b", 3), "the engine has no adapter 'b' (it has a0, a1)"),
        (LoRARequest("b", 3, str(tmp_path / "none")), "expected a folder"),
    ]:
        with pytest.raises(InvalidRequestError, match=text.replace("(", r"\(").replace(")", r"\)")):
            llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)
    with pytest.raises(InvalidRequestError, match="2 prompts need one lora_request each, or one for all; got 3"):
        llm.generate([prompt] * 2, GREEDY, use_tqdm=False, lora_request=[None] * 3)


def test_a_name_gets_new_content_and_the_digest_says_so(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt, client = {"prompt_token_ids": PROMPTS[1]}, llm.client
    first = client.load_lora("changing", str(checkpoint.paths[0]))
    second = client.load_lora("changing", str(checkpoint.paths[1]))
    assert first.digest != second.digest
    assert [one.digest for one in client.list_lora() if one.name == "changing"] == [second.digest]
    named = tokens_of(llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=LoRARequest("changing", 9)))
    assert named[0] == checkpoint.expected(PROMPTS[1], 1)
    client.unload_lora("changing")
    assert "changing" not in [one.name for one in client.list_lora()]


def test_blocks_of_the_prefix_cache_are_an_adapters_own(llm: LLM, checkpoint: Checkpoint) -> None:
    """By content: another name of the same adapter finds them, and another adapter does not."""
    prompt = {"prompt_token_ids": [int(token) for token in np.random.default_rng(5).integers(3, 300, 64)]}
    one, other = checkpoint.requests
    renamed = LoRARequest("again", 7, one.lora_path)
    found = [
        llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)[0].num_cached_tokens
        for request in (None, one, other, renamed, one, None)
    ]
    assert found == [0, 0, 0, 48, 48, 48]


def test_beams_and_choices_have_the_requests_adapter(llm: LLM, checkpoint: Checkpoint) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)
    prompt, adapter = {"prompt_token_ids": PROMPTS[1]}, checkpoint.requests[1]
    alone = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0]
    crowd = llm.generate([prompt] * 3, params, use_tqdm=False, lora_request=[None, adapter, checkpoint.requests[0]])
    assert [one.token_ids for one in crowd[1].outputs] == [one.token_ids for one in alone.outputs]
    assert [one.token_ids for one in crowd[0].outputs] != [one.token_ids for one in alone.outputs]
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (one,), (base,) = (
        [each.tokens for each in llm.beam_search([prompt], beams, lora_request=request)[0].sequences[:1]]
        for request in (adapter, None)
    )
    assert one != base


def test_an_engine_that_died_has_its_adapters_again(llm: LLM, checkpoint: Checkpoint) -> None:
    """Those that were loaded while it ran, too; the requests go on with the same content."""
    llm.client.load_lora("late", str(checkpoint.paths[1]))
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt, adapter = {"prompt_token_ids": PROMPTS[2]}, LoRARequest("late", 4)
    expected = tokens_of(llm.generate(prompt, long, use_tqdm=False, lora_request=adapter))
    llm.client.pause()  # it would be answered before the kill if this process had to wait for a core
    llm.llm_engine.add_request("a", prompt, long, lora_request=adapter)
    os.kill(llm.client.welcome.pid, signal.SIGKILL)
    outputs: list[Any] = []
    while not outputs or not outputs[-1].finished:
        outputs += llm.llm_engine.step()
    assert tokens_of(outputs[-1:]) == expected
    assert llm.client.welcome.epoch == 1
    assert "late" in [one.name for one in llm.client.list_lora()]


@pytest.mark.checkout  # docs/
def test_the_documents_snippet_runs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()
    (snippet,) = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    shapes = matrix_shapes(read_model_config(resolve_model(None)))
    write_peft(tmp_path / "sql-lora", random_matrices(shapes, 2, 1, ("q_proj",)), rank=2, alpha=4)
    snippet = snippet.replace('model="/tmp/model"', f"max_model_len=128, kv_cache_memory_bytes={1 << 24}")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(snippet.replace("/tmp/", f"{tmp_path}/"), {})
    adapted, base = shown.getvalue().strip().split("|")
    assert adapted.strip() != base.strip()


def test_vectors_have_an_adapter_too(tmp_path: Path) -> None:
    """With made-up vectors: each is a function of its prompt and its adapter."""
    shapes = {"model.layers.0.self_attn.q_proj": (16, 16)}
    path = write_peft(tmp_path / "a", random_matrices(shapes, 2, 1), rank=2, alpha=4)
    with LLM(executor="fake", enable_lora=True, lora_modules={"a": str(path)}, skip_tokenizer_init=True) as llm:
        prompts, adapter = [{"prompt_token_ids": [5, 6, 7]}] * 2, LoRARequest("a", 1)
        base, adapted = llm.embed(prompts, use_tqdm=False, lora_request=[None, adapter])
        assert base.outputs.embedding != adapted.outputs.embedding
        assert llm.embed(prompts[0], use_tqdm=False)[0].outputs.embedding == base.outputs.embedding


def test_an_engine_without_adapters_says_so(checkpoint: Checkpoint) -> None:
    with (
        LLM(executor="fake", skip_tokenizer_init=True) as llm,
        pytest.raises(InvalidRequestError, match="start it with enable_lora"),
    ):
        llm.generate({"prompt_token_ids": [5, 6]}, lora_request=checkpoint.requests[0], use_tqdm=False)
