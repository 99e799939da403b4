"""engine_core.as_vllm: the calls that lm_eval, langchain, llama-index and distilabel make, written out.

`make programs` runs those programs themselves.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core import as_vllm
from ipc.errors import ConfigError
from ipc.files.model_files import resolve_model
from tests.placed import placed

PROGRAM = """
import sys
from importlib.metadata import version
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import get_tokenizer

# lm_eval
arguments = {"model": sys.argv[1], "revision": None, "dtype": "auto", "tokenizer": None, "tokenizer_mode": "auto",
    "tokenizer_revision": None, "trust_remote_code": False, "tensor_parallel_size": 1, "max_model_len": 64,
    "max_num_seqs": None, "quantization": None, "seed": 1234, "enable_lora": False, "max_lora_rank": 16}
# langchain, llama-index
arguments |= {"download_dir": None, "swap_space": 1, "gpu_memory_utilization": 0.5}
llm = LLM(executor="fake", executor_options={"vocab_size": "49152"}, **arguments)
assert llm.llm_engine.model_config.max_model_len == 64
tokenizer = llm.get_tokenizer()
template = resolve_chat_template(tokenizer=tokenizer, chat_template=None, tools=None,
                                 model_config=llm.llm_engine.model_config)
text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False,
                                     add_generation_prompt=True, chat_template=template, enable_thinking=None)
ids = tokenizer([text, "more"], return_attention_mask=False, add_special_tokens=False).input_ids
likelihood = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
outputs = llm.generate([TokensPrompt(prompt_token_ids=one) for one in ids], sampling_params=[likelihood] * 2,
                       use_tqdm=False, lora_request=None)
assert [len(output.prompt_logprobs) for output in outputs] == [len(one) for one in ids]
generation = SamplingParams(max_tokens=8, stop=["\\n", tokenizer.decode(tokenizer.eos_token_id)], temperature=0.0,
                            skip_special_tokens=False, spaces_between_special_tokens=False)
assert isinstance(llm.generate([text], generation, use_tqdm=False)[0].outputs[0].text, str)
# langchain
params = {"n": 1, "best_of": None, "max_tokens": 4, "top_k": -1, "top_p": 1.0, "temperature": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": None, "ignore_eos": False, "use_beam_search": False,
    "logprobs": None, "unknown": 1}
known = SamplingParams.__annotations__.keys()
llm.generate([text], SamplingParams(**{name: value for name, value in params.items() if name in known}), use_tqdm=False)
# distilabel
llm.generate(prompts=[text], sampling_params=SamplingParams(n=2, logprobs=2, prompt_logprobs=None, stop_token_ids=None,
             logits_processors=[], max_tokens=4), use_tqdm=False)
# vLLM's own tests
import vllm.config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
assert (current_platform.is_cpu(), current_platform.is_cuda(), current_platform.device_type) == (True, False, "cpu")
try:
    llm.generate([TokensPrompt(prompt_token_ids=[])], use_tqdm=False)
except VLLMValidationError as error:
    assert isinstance(error, ValueError)
else:
    raise AssertionError("an empty prompt was taken")
cleanup_dist_env_and_memory()
destroy_model_parallel()
destroy_distributed_environment()
del llm.llm_engine.model_executor
del llm
print(version("vllm"), sys.argv[2:])
"""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine_core.as_vllm", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("form", ["FILE", "-m"])
def test_programs_run_unchanged(form: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "program"] if form == "-m" else [str(tmp_path / "program.py")]
    done = run(*words, str(resolve_model(None)), "--flag", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{as_vllm.VLLM_VERSION} ['--flag', 'x']\n"


def test_without_a_program_it_says_how(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m engine_core.as_vllm")


def test_every_name_is_there() -> None:
    as_vllm.install()
    as_vllm.install()
    try:
        for module, names in as_vllm.MODULES.items():
            loaded = importlib.import_module(module)
            assert sorted(loaded.__all__) == sorted(names)
            assert all(hasattr(loaded, name) for name in names)
            assert module.rpartition(".")[0] in ("", *as_vllm.MODULES), "a package of each module is there"
        assert importlib.metadata.version("vllm") == as_vllm.VLLM_VERSION
        assert importlib.util.find_spec("vllm") is not None
        assert importlib.util.find_spec("vllm.nothing") is None
        with pytest.raises(ImportError, match="ModelRegistry"):
            from vllm import ModelRegistry  # noqa: F401
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("nothing-of-this-name")
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, as_vllm._Finder)]
        for module in as_vllm.MODULES:
            sys.modules.pop(module, None)
    assert importlib.util.find_spec("vllm") is None
    assert "vllm" not in sys.modules


EXAMPLE = """
from vllm import LLM, EngineArgs, PoolingParams, EmbeddingRequestOutput
from vllm.beam_search import BeamSearchOutput
from vllm.sampling_params import BeamSearchParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(executor="fake", executor_options={"vocab_size": "49152"}, max_num_seqs=4)
parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
args = vars(parser.parse_args())
max_tokens = args.pop("max_tokens")
llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = max_tokens
outputs = llm.generate(["Hello, my name is"], sampling_params, use_tqdm=False)
assert llm.llm_engine.model_config.max_model_len == 128
assert EngineArgs.from_cli_args(parser.parse_args(["--model", "x"])).model == "x"
print(len(outputs[0].outputs[0].token_ids))
"""


def test_an_example_of_vllms_reads_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(EXAMPLE)
    words = ["--model", str(resolve_model(None)), "--max_model_len=128", "-tp", "1", "--max-tokens", "3"]
    done = run(str(tmp_path / "generate.py"), *words, "--trust-remote-code", "--enforce-eager", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
    done = run(str(tmp_path / "generate.py"), *words, "--enable-tower-connector-lora", cwd=tmp_path)
    assert "enable_tower_connector_lora=True is not supported" in done.stderr


def test_a_vllm_that_is_there_already_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(ConfigError, match="vllm has been imported already"):
        as_vllm.install()


def test_the_written_out_program_has_the_suites_imports() -> None:
    assert placed(PROGRAM) == PROGRAM, "it names vllm alone, in a checkout and in a wheel"
