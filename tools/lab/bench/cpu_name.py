"""cpu_name(): the CPU of this machine. Names alone do not tell generations apart on virtual machines."""

from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the CPU's name, family and model number; "unknown" where the system does not say."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return "unknown"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in fields:
        return "unknown"
    return f"{fields['model name']}, family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
