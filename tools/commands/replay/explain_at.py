"""The explanation that a captured engine would have given of its requests after one of its steps."""

from core.capture.bounds import bounded_memory, untrusted_file
from core.capture.file import CaptureFile
from core.scheduling.explain import explain
from ipc.errors import CaptureFileError, ConfigError
from ipc.wire.messages import CallFailed
from ipc.wire.scheduling_messages import EVERY_REQUEST, Explain, Explanation
from tools.commands.replay.rerun import Replay, recorded_executor, replay_config


def explain_at(path: str, step: int, session: int, number: int, limit: int) -> Explanation:
    """Return the explanation after a step, counted as `engine-core replay` counts them.

    The capture runs again from the last checkpoint before that step. session, number, limit: see Explain.
    Errors: CaptureFileError; ConfigError for a step that the file does not have, or a request that was not live then.
    """
    with bounded_memory(path):
        return _explain(path, step, session, number, limit)


def _explain(path: str, step: int, session: int, number: int, limit: int) -> Explanation:
    file = CaptureFile(path)
    first, last = file.first_step, file.first_step + file.num_steps - 1
    if not first <= step <= last:
        raise ConfigError(f"{path} has the steps {first} to {last}; got --at {step}")
    config = replay_config(file.header)
    replay = Replay(file, config, recorded_executor(file), file.last_checkpoint(step))
    now_ns = 0
    for turn, difference, _ in replay.steps():
        if difference is not None:
            raise CaptureFileError(
                f"{path}: this version of the engine decides step {turn.step_index} differently, so it cannot explain "
                "it; `engine-core replay` shows the difference"
            )
        now_ns = turn.step.now_ns
        if turn.step_index == step:
            break
    call = Explain(0, number, session, limit) if number != EVERY_REQUEST else Explain(0, limit=limit)
    with untrusted_file(path):
        answer = explain(replay.engine.scheduler, config.scheduling_policy, 0, call, now_ns)
    if isinstance(answer, CallFailed):
        raise ConfigError(f"at step {step}: {answer.message}")
    return answer
