"""What the start leaves to the garbage collector: nothing, so that no step waits until it has looked through torch; and
what a started engine does while it is idle."""

import os
import subprocess
import sys
from pathlib import Path

from tests.placed import placed

ROOT = Path(__file__).parents[3]

CODE = """
import gc
from core.process.start import bind, start_engine
from ipc.options.config import EngineConfig
from ipc.wire.start_messages import Start

start = Start(EngineConfig(executor="fake"), "tcp://127.0.0.1:0")
started = start_engine(start, bind(start), lambda phase: print(phase, gc.isenabled(), gc.get_freeze_count() > 20_000))
print("started", gc.isenabled(), gc.get_freeze_count() > 20_000, len(gc.get_objects()) < 2_000, flush=True)
import os
os._exit(0)
"""

RESTS = """
import os
import msgspec
from core.process import start as module
from ipc.options.config import EngineConfig
from ipc.wire.start_messages import Start

prepare = module.prepare

def prepared(config, report):
    found = prepare(config, report)
    found.executor.info = msgspec.structs.replace(found.executor.info, tasks=tasks)
    return found

module.prepare = prepared
for tasks in ({}, {"generate": 0, "embed": 8}, {"embed": 8}):
    start = Start(EngineConfig(executor="fake"), "tcp://127.0.0.1:0")
    started = module.start_engine(start, module.bind(start), lambda phase: None)
    print(*tasks, started.rest.__name__, flush=True)
os._exit(0)
"""


def test_an_engine_that_generates_nothing_makes_no_vocabulary_ahead() -> None:
    command = [sys.executable, "-c", placed(RESTS)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["load_ahead", "generate embed load_ahead", "embed <lambda>"], done.stderr


def test_what_a_started_engine_has_is_kept_without_being_looked_at() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", placed(CODE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["started True True True"], done.stdout + done.stderr
    assert lines[1:] == ["import True False", "load model True True", "kv cache True True", lines[-1]], lines
