"""The store of KV blocks at the engine's start and end: what it needs, and how long it may write."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from core import __main__ as process
from core.execution.executor import Executor
from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.process.loop import EXIT_FAILED
from core.process.start import StartedEngine, open_stores
from core.tiers.block_file import HEAD_BYTES
from ipc.errors import ConfigError
from ipc.wire.start_messages import EXIT_RESTART
from tests.resolved import resolved_config

MIB = 1 << 20


class _Sharing:
    """An executor with two host blocks of one MiB in two parts."""

    shared_blocks = SharedBlocks(*(BlockMemory([np.zeros((2, MIB // 2), np.uint8)] * 2) for _ in range(2)), "layout")


def test_a_bound_below_the_file_of_one_block_is_refused_with_the_numbers(tmp_path: Path) -> None:
    def opened(kv_dir_bytes: int) -> None:
        config = resolved_config(
            10, 64, executor="local", num_host_blocks=2, kv_dir=str(tmp_path / "kv"), kv_dir_bytes=kv_dir_bytes
        )
        stores = open_stores(config, cast("Executor", _Sharing()))
        assert stores is not None
        assert stores.folder is not None
        stores.folder.close()

    with pytest.raises(ConfigError, match=f"kv_dir_bytes={MIB} is less .* {MIB + HEAD_BYTES} bytes"):
        opened(MIB)
    assert not (tmp_path / "kv").exists()
    opened(MIB + HEAD_BYTES)


class _Part:
    """The executor, IO thread, store and scheduler of a started engine, which note their ends."""

    def __init__(self, ended: list[object]) -> None:
        self._ended = ended

    def prepare_ahead(self) -> bool:
        return False

    def shutdown(self) -> None:
        self._ended.append("scheduler")

    def close(self, timeout: float | None = None) -> None:
        self._ended.append(timeout)


@pytest.mark.parametrize(("code", "seconds"), [(0, 5.0), (EXIT_RESTART, 5.0), (EXIT_FAILED, 0.0), (None, 0.0)])
def test_only_a_drained_engine_takes_time_to_write(
    monkeypatch: pytest.MonkeyPatch, code: int | None, seconds: float
) -> None:
    def run(*_: Any, **__: Any) -> int:
        if code is None:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(process, "run", run)
    ended: list[object] = []
    part = cast("Any", _Part(ended))
    started = StartedEngine(part, part, part, lambda _: None, part, part, lambda: ended.append("capture"))
    if code is None:
        with pytest.raises(KeyboardInterrupt):
            process.serve(started)
    else:
        assert process.serve(started) == code
    assert ended == [seconds, "capture", "scheduler", None]
