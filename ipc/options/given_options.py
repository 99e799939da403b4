"""config_from_options: an EngineConfig from a caller's options, under our names or vLLM's."""

import os
from typing import Any

from ipc.errors import ConfigError
from ipc.options.block_stores import options_of_connector, parse_kv_transfer_config
from ipc.options.config import OPTIONS, EngineConfig
from ipc.options.config_checks import with_revision
from ipc.options.devices import BUILT_IN_DEVICES, executor_of_device
from ipc.options.neutral_options import ELSEWHERE, check_neutral, is_neutral
from ipc.options.option import DeclaredOption, Option, nearest, parse_bytes
from ipc.options.speculation import parse_speculative_config

#: vLLM's name -> ours, for options that are named differently.
_OTHER_NAMES = {other: name for name, declared in OPTIONS.items() for other in declared.option.names}
#: vLLM's swap_space, in GiB; ours is swap_space_bytes.
_SWAP_SPACE = DeclaredOption("swap_space", Option("preemption", "", 0, 2**14), float, is_optional=False, default=0)
#: vLLM's kv_offloading_size, in GiB; ours is kv_host_bytes.
_OFFLOADING = DeclaredOption(
    "kv_offloading_size", Option("KV cache", "", 0, 2**14), float, is_optional=True, default=None
)
#: vLLM's worker_use_ray, a switch; ours is distributed_executor_backend.
_BY_RAY = DeclaredOption("worker_use_ray", Option("machine", ""), bool, is_optional=True, default=None)
_REVISION = "revision"
#: How much an unknown name is like an option that is suggested for it: less suggests options of another meaning.
_LIKENESS = 0.75
#: Options that become part of another one.
_NO_FIELDS = (_SWAP_SPACE.name, _OFFLOADING.name, _BY_RAY.name, _REVISION)


def config_from_options(**options: Any) -> EngineConfig:
    """Return the EngineConfig of these options, under our names or vLLM's. None = the option was not given.

    Errors: ConfigError for a bad value or an unknown option.
    """
    accepted: dict[str, Any] = {}
    for given, value in options.items():
        name = _OTHER_NAMES.get(given, given)
        if value is None and (name in OPTIONS or name in _NO_FIELDS or is_neutral(name)):
            continue
        if name in accepted:
            raise ConfigError(f"{given} is another name of an option that was also given; leave one of them out")
        if name in OPTIONS or name in _NO_FIELDS:
            accepted[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
        elif is_neutral(name):
            check_neutral(name, value)
        elif name.startswith("fake_"):
            given = f"{{{name.removeprefix('fake_')!r}: {str(value)!r:.80}}}"
            raise ConfigError(f"{name} is an option of the fake executor: executor_options={given}")
        else:
            near = nearest(name, OPTIONS, _LIKENESS)
            hint = f"did you mean {near!r}? " if near else ""
            if name in ELSEWHERE:
                hint = f"{ELSEWHERE[name]}; "
            raise ConfigError(f"unknown option {name!r}; {hint}known options: {', '.join(OPTIONS)}")
    if (revision := accepted.pop(_REVISION, None)) is not None:
        accepted["model"] = with_revision(accepted.get("model"), revision)
    if (dtype := str(accepted.get("dtype"))).startswith("torch."):  # torch.bfloat16 itself
        accepted["dtype"] = dtype.removeprefix("torch.")
    if (gibibytes := accepted.pop(_SWAP_SPACE.name, None)) is not None:
        _SWAP_SPACE.check(gibibytes)
        accepted.setdefault("swap_space_bytes", round(gibibytes * 2**30))
    if (gibibytes := accepted.pop(_OFFLOADING.name, None)) is not None:
        _OFFLOADING.check(gibibytes)
        accepted.setdefault("kv_host_bytes", round(gibibytes * 2**30))
    if (is_by_ray := accepted.pop(_BY_RAY.name, None)) is not None:
        _BY_RAY.check(is_by_ray)
        if is_by_ray and accepted.setdefault("distributed_executor_backend", "ray") != "ray":
            raise ConfigError(
                f"worker_use_ray is distributed_executor_backend='ray', but "
                f"{accepted['distributed_executor_backend']!r:.80} was given; leave one of them out"
            )
    if "speculative_config" in accepted:
        accepted["speculative_config"] = parse_speculative_config(accepted["speculative_config"])
    if "kv_transfer_config" in accepted:
        _take_connector(accepted)
    device = accepted.get("device")
    if "executor" not in accepted and isinstance(device, str) and device not in BUILT_IN_DEVICES:
        accepted["executor"] = executor_of_device(device)
    for name, value in accepted.items():
        if isinstance(value, str):
            accepted[name] = _from_text(OPTIONS[name], value)
    return EngineConfig(**accepted)


def _take_connector(accepted: dict[str, Any]) -> None:
    """Replace kv_transfer_config by its parsed form, or by the options of a built-in connector. Errors: ConfigError."""
    accepted["kv_transfer_config"] = settings = parse_kv_transfer_config(accepted["kv_transfer_config"])
    options = None if settings is None else options_of_connector(settings)
    if options is None:
        return
    del accepted["kv_transfer_config"]
    for name, value in options.items():
        if name in accepted:
            raise ConfigError(f"{name} is given twice: in kv_transfer_config too; leave one of them out")
        accepted[name] = value


def _from_text(declared: DeclaredOption, text: str) -> object:
    """Return the value that a text stands for: a number of bytes for '512M', our spelling of a choice.

    Errors: ConfigError for a number of bytes that cannot be read.
    """
    if not declared.is_bytes:
        return declared.option.spellings.get(text, text)
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{declared.name}: {error}") from None
