"""Functions of vLLM that programs import in addition to its classes, for engine_core/as_vllm.py."""

import importlib
import operator
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError
from ipc.files.model_files import locate_model, read_tokenizer_files, resolve_model


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: object,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Return the tokenizer of a model: transformers' if it is installed and reads the files, otherwise ours.

    args, tokenizer_mode, trust_remote_code: vLLM's, without effect. kwargs: those of transformers. Errors:
    ModelFileError; those of transformers.
    """
    name = str(tokenizer_name)
    path = resolve_model(locate_model(f"{name}@{revision}" if revision else name, with_weights=False))
    if path.suffix != ".gguf":
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            pass
        else:
            return transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, **kwargs)
    found = Tokenizer.from_files(read_tokenizer_files(path))
    found.name_or_path = name
    return found


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None, **others: object) -> Any:
    """Return the chat template that is used: the given one, otherwise the tokenizer's.

    others: vLLM's, without effect.
    """
    if chat_template is not None or isinstance(tokenizer, Tokenizer):
        return chat_template or tokenizer.choose_chat_template(None, with_tools=bool(tools))
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:  # transformers': there is none
        return None


def get_ip() -> str:
    """Return this machine's address, for programs that connect its processes: the loopback's."""
    return "127.0.0.1"


def get_open_port() -> int:
    """Return a TCP port that no program of this machine has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def refuse_nccl(*arguments: object, **others: object) -> NoReturn:
    """Refuse to send weights over NCCL, as trainers do to vLLM's server. Errors: ConfigError."""
    raise ConfigError("this engine does not receive weights over NCCL: use the trainer's colocated mode")


def destroy_model_parallel() -> None:
    """Do nothing: an engine ends with its LLM."""


def destroy_distributed_environment() -> None:
    """Do nothing: an engine of ours ends with its LLM."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Do nothing: an engine of ours ends with its LLM, and its memory with its process."""


_KINDS = ("cpu", "cuda", "cuda_alike", "rocm", "tpu", "xpu", "hpu", "neuron", "out_of_tree")
#: What programs ask of vLLM's platform: the kind of device on which an engine runs that is told none.
current_platform = SimpleNamespace(
    device_type="cpu", device_name="cpu", **{f"is_{kind}": partial(operator.eq, kind, "cpu") for kind in _KINDS}
)
