"""Options of the fake executor as tests write them: numbers, where executor_options has texts."""

from typing import Any

import msgspec

from ipc.options.config import Config


def fake_options(**options: int | str) -> dict[str, str]:
    """The executor_options: fake_options(vocab_size=10) is {"vocab_size": "10"}."""
    return {name: str(value) for name, value in options.items()}


def with_options(config: Config, **options: Any) -> Config:
    """The config with these options; executor_options are added to its own."""
    own = options.pop("executor_options", {})
    return msgspec.structs.replace(config, **options, executor_options={**config.executor_options, **own})
