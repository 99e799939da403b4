"""Devices beyond the CPU and NVIDIA GPUs: --device NAME chooses the installed executor that declares the name.

A distribution declares a device by an entry in the group DEVICES, whose value is the module that it registers as an
executor. Nothing is imported here.
"""

from ipc.errors import ConfigError

#: Entry-point groups: executors and the devices that they run on.
EXECUTORS, DEVICES = "engine_core.executors", "engine_core.devices"
BUILT_IN_DEVICES = ("cpu", "cuda")


def executor_of_device(device: str) -> str:
    """Return the name of the one executor that declares this device.

    Errors: ConfigError if none does, or several do; if the module that the device names is no executor.
    """
    from importlib.metadata import entry_points  # takes 40 ms, and only plug-ins need it

    declared = entry_points(group=DEVICES)
    modules = {entry.value for entry in declared if entry.name == device}
    names = {entry.name for entry in entry_points(group=EXECUTORS) if entry.value in modules}
    if len(names) == 1:
        return names.pop()
    if names:
        raise ConfigError(
            f"device={device!r} is declared by several executors: choose one of {', '.join(sorted(names))} by executor"
        )
    if modules:
        raise ConfigError(f"device={device!r} names {', '.join(modules)}, which no entry of {EXECUTORS} registers")
    there = ", ".join([*BUILT_IN_DEVICES, *sorted(declared.names)])
    raise ConfigError(
        f"device must be one of {there}; got {device!r:.80}: an installed executor can declare others "
        "(docs/executors.md)"
    )


def check_device(device: object, executor: str, built_in: tuple[str, ...]) -> None:
    """Check a device's name, and that a built-in executor has it. Errors: ConfigError."""
    if not isinstance(device, str) or not device.isidentifier():
        raise ConfigError(f"device must be cpu, cuda or a name that an executor declares; got {device!r:.80}")
    if executor in built_in and device not in BUILT_IN_DEVICES:
        raise ConfigError(
            f"executor={executor!r} runs on {' and '.join(BUILT_IN_DEVICES)}; got device={device!r:.80}: it is for an "
            "installed executor that declares it (docs/executors.md)"
        )
