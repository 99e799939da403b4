"""Signs of life: how long an engine has shown none, and how long is too long, from its black box.

The engine is not asked, so a hung one cannot delay the answer. Times: ns of the machine's monotonic clock.
"""

import os

from ipc.records.black_box import Reading

DEFAULT_HANG_S = 5.0
_SLOWER = 20  # factor by which a step may be slower than any recent one of its size
_FIRST_S = 300.0  # for a start, and for a first step whose executor has no warm-up
_IDLE_S = 5.0  # core/process/loop.py: how often an idle engine shows a sign of life
_NS = 1e-9


def limit_s(reading: Reading, least_s: float = DEFAULT_HANG_S) -> float:
    """Return the seconds without a sign after which this engine counts as hung. least_s: the least value in a step."""
    if reading.epoch < 0:
        return _FIRST_S
    if not reading.is_in_step:
        return _IDLE_S + least_s
    return max(least_s, _SLOWER * reading.expected_ns * _NS) if reading.expected_ns else _FIRST_S


def silence_s(reading: Reading, now_ns: int) -> float:
    """Return the seconds since the last sign; 0 before the first."""
    return max(0, now_ns - max(reading.begun_ns, reading.turned_ns)) * _NS if reading.epoch >= 0 else 0.0


def step_age_s(reading: Reading, now_ns: int) -> float:
    """Return the seconds for which the present step has run; 0 between steps."""
    return max(0, now_ns - reading.begun_ns) * _NS if reading.is_in_step else 0.0


def describe_silence(reading: Reading, seconds: float, limit: float) -> str:
    """Return what shows no sign of life and for how long, as text."""
    what = f"its step {reading.num_begun} has not ended" if reading.is_in_step else "its loop does not turn"
    return f"{what} for {seconds:.1f} s; the limit is {limit:.1f} s"


def trouble(reading: Reading, now_ns: int, least_s: float = DEFAULT_HANG_S) -> str:
    """Return why the engine counts as hung, "" if it does not. least_s: see limit_s(); 0 = an engine never counts as
    hung.

    A process that has died does not hang; its owner decides whether it is restarted.
    """
    silence, limit = silence_s(reading, now_ns), limit_s(reading, least_s)
    if least_s <= 0 or silence <= limit or not os.path.exists(f"/proc/{reading.pid}"):
        return ""
    return describe_silence(reading, silence, limit)
