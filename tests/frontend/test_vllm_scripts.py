"""LLM under the arguments that scripts for vLLM bring, and what it says of wrong ones."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import engine_core
from frontend.llm import LLM
from ipc.errors import (
    InvalidRequestError,
    UnsupportedParameterError,
)
from tests.frontend.conftest import greedy
from tests.placed import PREFIX

ROOT = Path(engine_core.__file__).parents[1]


#: A script as vLLM's users write them; only the import is changed.
VLLM_SCRIPT = """
from engine_core import LLM, SamplingParams, TokensPrompt

llm = LLM(model=None, executor="fake", tokenizer_mode="auto", trust_remote_code=True, tensor_parallel_size=1,
          dtype="float", seed=None, gpu_memory_utilization=0.9, swap_space=0, cpu_offload_gb=0, enforce_eager=True,
          max_seq_len_to_capture=8192, disable_custom_all_reduce=False, kv_cache_dtype="auto", revision=None,
          generation_config="auto", num_gpu_blocks_override=64, max_model_len=1008,
          distributed_executor_backend="mp", enable_lora=False,
          hf_token=None, served_model_name=None, attention_backend=None, skip_tokenizer_init=True)
params = llm.get_default_sampling_params()
params.max_tokens = 4
prompts = [TokensPrompt(prompt_token_ids=[1, 2]), TokensPrompt(prompt_token_ids=[3])]
for output in llm.generate(prompts, params, use_tqdm=False, lora_request=None, tokenization_kwargs=None):
    assert output.encoder_prompt is output.encoder_prompt_token_ids is output.kv_transfer_params is None
    print(output.prompt_token_ids, len(output.outputs[0].token_ids))
"""


def test_a_whole_script_of_vllms_users(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", VLLM_SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2] 4\n[3] 4\n", "")


def test_arguments_of_vllms_that_would_change_something(llm):
    chat = [{"role": "user", "content": "w7 w8"}]
    assert llm.chat(chat, greedy(), False, None, "w1", "auto", True, False, None, {})[0].prompt_token_ids == [1]
    with pytest.raises(UnsupportedParameterError, match=r"^tokenization_kwargs=.* is not supported"):
        llm.generate([1], greedy(), tokenization_kwargs={"truncation": True})
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest; got str"):
        llm.generate([[1]], greedy(), lora_request=["l"])
    for name, value in (("chat_template_content_format", "openai"),):
        with pytest.raises(UnsupportedParameterError, match=f"^{name}=.* is not supported"):
            llm.chat(chat, greedy(), **{name: value})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"chat_template": 3}, "chat_template must be a str, got int"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a dict with str keys"),
        ({"chat_template_kwargs": {"template": "w1", "messages": []}}, "must not name template, messages"),
        ({"use_tqdm": 3}, "use_tqdm must be True, False or a class such as tqdm; got 3"),
    ],
)
def test_wrong_arguments_of_a_chat(llm, arguments, text):
    with pytest.raises(InvalidRequestError, match=text):
        llm.chat([{"role": "user", "content": "w7"}], greedy(), **arguments)


def test_template_arguments_replace_those_of_chat(llm):
    kwargs = {"add_generation_prompt": False, "continue_final_message": False, "tools": None}
    (output,) = llm.chat([{"role": "user", "content": "w7"}], greedy(), use_tqdm=False, chat_template_kwargs=kwargs)
    assert output.prompt_token_ids == [7]


def test_a_lower_numerics_level_is_told_once(played_engine, monkeypatch, caplog):
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, numerics="L0")
    monkeypatch.setattr(f"{PREFIX}frontend.session.ZmqTransport", lambda address, **_: played_engine)
    for options, count in (({}, 1), ({"numerics": "L0"}, 0)):
        caplog.clear()
        with LLM(executor="fake", **options) as llm:
            assert llm.numerics == "L0"
        found = [record.getMessage() for record in caplog.records if record.name == "engine_core"]
        assert len(found) == count
        assert all("runs at numerics level L0, not L2" in message for message in found)
