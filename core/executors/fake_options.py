"""FakeOptions: the fake executor's own options, passed in executor_options like those of a plug-in."""

from typing import Annotated

import msgspec

from ipc.errors import ConfigError
from ipc.options.config import Config, EngineConfig
from ipc.options.option import Option, declared_options

#: What a poison does to the engine; implemented in core/executors/poisoned.py.
POISONS = ("raise", "row", "memory", "abort", "segv", "hang")
_GROUP = "fake executor"


class FakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the fake executor. Errors: ConfigError that names the option and the allowed values."""

    vocab_size: Annotated[int, Option(_GROUP, "size of the vocabulary", 4, 2**24)] = 32_000
    eos_token_id: Annotated[int, Option(_GROUP, "end token", 0, 2**24)] = 2
    max_model_len: Annotated[int, Option(_GROUP, "longest sequence that the model supports", 2, 2**24)] = 131_072
    tokens_per_step: Annotated[int, Option(_GROUP, "most tokens of a request in one step", 1, 256)] = 1
    step_us: Annotated[int, Option(_GROUP, "least duration of a step, in microseconds", 0, 10**9)] = 0
    poison: Annotated[
        str,
        Option(
            _GROUP,
            "KIND:TOKEN:POSITION: a request whose first token is TOKEN harms the executor when it has POSITION tokens; "
            f"KIND is one of {', '.join(POISONS)}",
        ),
    ] = ""

    def __post_init__(self) -> None:
        for name, declared in FAKE_OPTIONS.items():
            declared.check(getattr(self, name))
        kind, _, place = self.poison.partition(":")
        token, _, position = place.partition(":")
        if self.poison and not (kind in POISONS and token.isdecimal() and position.isdecimal()):
            raise ConfigError(
                f"poison must be KIND:TOKEN:POSITION, KIND one of {', '.join(POISONS)}; got {self.poison!r:.80}"
            )


#: All options by name.
FAKE_OPTIONS = declared_options(FakeOptions)


def read_fake_options(config: EngineConfig) -> FakeOptions:
    """Return the fake executor's options, or the defaults if the config names another executor.

    Errors: ConfigError for an unknown option or a bad value.
    """
    given: dict[str, int | str] = {}
    for name, text in (config.executor_options if config.executor == "fake" else {}).items():
        if name not in FAKE_OPTIONS:
            raise ConfigError(f"executor 'fake' has no option {name!r:.80}; it has {', '.join(FAKE_OPTIONS)}")
        is_number = FAKE_OPTIONS[name].plain is int and text.removeprefix("-").isdecimal() and len(text) < 20
        given[name] = int(text) if is_number else text
    try:
        return FakeOptions(**given)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"executor 'fake': {error}") from None


def with_fake_options(config: Config, **options: int | str) -> Config:
    """Return the config with these options of the fake executor.

    A config with another executor is returned unchanged.
    """
    if config.executor != "fake":
        return config
    texts = {name: str(value) for name, value in options.items()}
    return msgspec.structs.replace(config, executor_options={**config.executor_options, **texts})
