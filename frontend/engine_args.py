"""EngineArgs: the arguments of LLM() as an object, under vLLM's name."""

import argparse
from typing import Any, Self

from frontend.session import EngineHandle
from frontend.vllm_arguments import add_cli_args, names_of_arguments
from ipc.errors import ConfigError

#: Arguments of EngineHandle that are not options of EngineConfig, with their defaults.
_OTHERS: dict[str, Any] = {
    "connect": None,
    "route": None,
    "seed": 0,
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "start_timeout": 300.0,
    "connect_timeout": 10.0,
    "restart_engine": True,
    "client_name": "",
}


class EngineArgs:
    """Arguments of LLM(), as attributes. They are checked when an engine is made from them."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        self.model = model
        self.__dict__.update(arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each argument, and return the parser."""
        return add_cli_args(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the arguments that a parser with these flags has read."""
        return cls(**{name: value for name, value in vars(args).items() if name in names_of_arguments()})

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return dict(vars(self))


class AsyncEngineArgs(EngineArgs):
    """The same for AsyncLLM, under vLLM's name for it."""


def arguments_of(engine_args: object) -> dict[str, Any]:
    """Return the arguments of an EngineArgs. Errors: ConfigError for anything else."""
    if not isinstance(engine_args, EngineArgs):
        raise ConfigError(f"engine_args must be EngineArgs(...); got {type(engine_args).__name__}")
    return engine_args.arguments()


def open_engine(engine_args: EngineArgs) -> EngineHandle:
    """Return the engine for these arguments, started or connected to. Errors: those of LLM()."""
    options = arguments_of(engine_args)
    others = {name: options.pop(name, default) for name, default in _OTHERS.items()}
    skip, restart = others.pop("skip_tokenizer_init"), others.pop("restart_engine")
    return EngineHandle(options.pop("model"), skip_tokenizer=skip, restart=restart, options=options, **others)
