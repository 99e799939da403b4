"""Programs for vLLM, unchanged, on this engine: `python -m engine_core.as_vllm -m lm_eval ...`, or by install().

After install(), `import vllm` gives this engine's names under vLLM's modules. Only the names of MODULES exist; a module
or a name beyond them is an ImportError, as with a vLLM that lacks it. docs/vllm.md says what was seen to run.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import runpy
import sys
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

from ipc.errors import ConfigError

#: The version of vLLM whose names these are; programs ask for it.
VLLM_VERSION = "0.33.0"

_LLM = ("frontend.llm", "LLM")
_ASYNC_LLM = ("frontend.async_llm", "AsyncLLM")
_ENGINE = ("frontend.llm_engine", "LLMEngine")
_ARGS = {"EngineArgs": ("frontend.engine_args", "EngineArgs")}
_ASYNC_ARGS = {"AsyncEngineArgs": ("frontend.engine_args", "AsyncEngineArgs")}
_OUTPUTS = {name: ("frontend.results.outputs", name) for name in ("CompletionOutput", "RequestOutput")}
_POOLING_OUTPUTS = {
    name: ("frontend.results.pooling_outputs", name)
    for name in (
        *("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"),
        *("ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    )
}
_POOLING_PARAMS = {"PoolingParams": ("ipc.params.pooling_params", "PoolingParams")}
_BEAMS = {name: ("frontend.results.beam_search", name) for name in ("BeamSearchOutput", "BeamSearchSequence")}
_PARSER = {"FlexibleArgumentParser": ("frontend.vllm_arguments", "FlexibleArgumentParser")}
_PROMPTS = {name: ("frontend.text.prompt_forms", name) for name in ("TextPrompt", "TokensPrompt")}
_PARAMS = {"SamplingParams": ("ipc.params.sampling_params", "SamplingParams")}
_TOKENIZER = {"get_tokenizer": ("frontend.vllm_functions", "get_tokenizer")}
_FUNCTIONS = "frontend.vllm_functions"
_NCCL = (_FUNCTIONS, "refuse_nccl")
#: Module of vLLM -> its names -> module and name here.
MODULES: dict[str, dict[str, tuple[str, str]]] = {
    "vllm": {
        "LLM": _LLM,
        "LLMEngine": _ENGINE,
        "AsyncLLMEngine": _ASYNC_LLM,
        **_ARGS,
        **_ASYNC_ARGS,
        **_OUTPUTS,
        **_POOLING_OUTPUTS,
        **_PROMPTS,
        **_PARAMS,
        **_POOLING_PARAMS,
    },
    "vllm.beam_search": _BEAMS,
    "vllm.config": {},
    "vllm.distributed": {"cleanup_dist_env_and_memory": (_FUNCTIONS, "cleanup_dist_env_and_memory")},
    "vllm.distributed.parallel_state": {
        name: (_FUNCTIONS, name)
        for name in ("cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel")
    },
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": _NCCL},
    "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": _NCCL},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {**_ARGS, **_ASYNC_ARGS},
    "vllm.engine.async_llm_engine": {"AsyncLLMEngine": _ASYNC_LLM},
    "vllm.engine.llm_engine": {"LLMEngine": _ENGINE},
    "vllm.entrypoints": {},
    "vllm.entrypoints.chat_utils": {"resolve_hf_chat_template": (_FUNCTIONS, "resolve_chat_template")},
    "vllm.entrypoints.llm": {"LLM": _LLM},
    "vllm.exceptions": {"VLLMValidationError": ("ipc.errors", "InvalidRequestError")},
    "vllm.inputs": _PROMPTS,
    "vllm.logprobs": {"Logprob": ("frontend.results.outputs", "Logprob")},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": ("frontend.lora", "LoRARequest")},
    "vllm.outputs": {**_OUTPUTS, **_POOLING_OUTPUTS},
    "vllm.platforms": {"current_platform": (_FUNCTIONS, "current_platform")},
    "vllm.pooling_params": _POOLING_PARAMS,
    "vllm.renderers": {},
    "vllm.renderers.hf": {"resolve_chat_template": (_FUNCTIONS, "resolve_chat_template")},
    "vllm.sampling_params": {
        **_PARAMS,
        "BeamSearchParams": ("ipc.params.beam_search", "BeamSearchParams"),
        "RequestOutputKind": ("ipc.params.sampling_params", "RequestOutputKind"),
        "StructuredOutputsParams": ("ipc.params.structured_outputs", "StructuredOutputsParams"),
    },
    "vllm.tokenizers": _TOKENIZER,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": _TOKENIZER,
    "vllm.utils": _PARSER,
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.utils.network_utils": {"get_ip": (_FUNCTIONS, "get_ip"), "get_open_port": (_FUNCTIONS, "get_open_port")},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": _ASYNC_LLM},
    "vllm.v1.engine.llm_engine": {"LLMEngine": _ENGINE},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.reader": {name: ("frontend.llm_engine", name) for name in ("Counter", "Gauge", "Vector")},
    "vllm.version": {},
}
#: What comes before "frontend": "" in a checkout, "engine_core." in an installed wheel.
_HOME = ConfigError.__module__.removesuffix("ipc.errors")


def install() -> None:
    """Let `import vllm` give this engine's names from now on, in this process. A second call does nothing.

    Errors: ConfigError if vLLM itself has been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "vllm" in sys.modules:
        raise ConfigError("vllm has been imported already: call engine_core.as_vllm.install() before that")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills the modules of MODULES, and the metadata of a distribution vllm."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="engine-core", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        names: dict[str, Any] = {
            name: getattr(importlib.import_module(_HOME + home), ours)
            for name, (home, ours) in MODULES[module.__name__].items()
        }
        module.__dict__.update(names, __version__=VLLM_VERSION, __all__=sorted(names))

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "vllm"):
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata says of vllm: its name and version."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        metadata = Message()
        metadata["Metadata-Version"], metadata["Name"], metadata["Version"] = "2.1", "vllm", VLLM_VERSION
        return str(metadata)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


def main(arguments: Sequence[str]) -> int:
    """Run a program with install() done. arguments: -m MODULE, or FILE, then the program's own; return the status."""
    is_module = list(arguments[:1]) == ["-m"]
    words = list(arguments[1:] if is_module else arguments)
    if not words or (words[0].startswith("-") and not is_module):
        print("usage: python -m engine_core.as_vllm {-m MODULE | FILE} [ARGUMENT ...]", file=sys.stderr)
        return 2
    install()
    sys.argv[:] = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
