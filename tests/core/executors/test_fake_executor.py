"""The fake executor: its tokens are a function of all ids before them, their positions and the seed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core.execution.plan import NO_TOKEN, NewRow, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.executors.by_name import load_executor
from core.executors.fake import FakeExecutor, checksum, create, mix
from core.executors.fake_options import with_fake_options
from ipc.params.sampling_params import SamplingParams
from tests.columns import num_used_pages
from tests.core.driving import VOCAB_SIZE, small_config
from tests.fake_tokens import fake_tokens
from tests.placed import placed


def int32s(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def ready(max_num_seqs: int = 4) -> FakeExecutor:
    config = small_config(max_num_seqs=max_num_seqs)
    executor = create(config)
    executor.initialize_cache(config)
    return executor


def new_row(row: int, ids: list[int], blocks: list[int], seed: int = 0, temperature: float = 0.0) -> NewRow:
    params = SamplingParams(temperature=temperature)
    return NewRow(row, int32s(*ids), len(ids), 0, int32s(*blocks), params, seed)


def plan(
    step: int,
    rows: list[int],
    counts: list[int],
    added: list[NewRow] | None = None,
    removed: list[int] | None = None,
    blocks: list[tuple[int, int]] | None = None,
) -> SchedulerOutput:
    block_rows, block_ids = [row for row, _ in blocks or []], [block for _, block in blocks or []]
    columns = int32s(*block_rows), int32s(*block_ids), int32s(*rows), int32s(*counts)
    return SchedulerOutput(step, int32s(*removed or []), added or [], *columns)


def test_mix_is_splitmix64() -> None:
    """The first outputs of splitmix64 for seed 1234567 (the test vectors of its reference implementation)."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + n * golden) % 2**64 for n in range(1, 6)], np.uint64)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_tokens_are_known_answers_inside_the_vocabulary() -> None:
    """These tokens may not change: golden logs replay by them."""
    assert fake_tokens([1, 2, 3], 6, VOCAB_SIZE) == [451, 877, 522, 522, 483, 687]
    assert fake_tokens([1, 2, 3], 6, VOCAB_SIZE, seed=2**64 - 1) == [957, 194, 132, 222, 975, 64]
    assert all(0 <= token < 7 for token in fake_tokens([5], 100, 7))


def test_every_id_position_and_the_seed_matter() -> None:
    prompt = list(range(10))
    base = fake_tokens(prompt, 8, 2**24)
    changed = [[*prompt[:at], 77, *prompt[at + 1 :]] for at in range(10)]
    changed += [[1, 0, *prompt[2:]], prompt[1:], [0, *prompt], [*prompt, 0]]
    others = [fake_tokens(ids, 8, 2**24) for ids in changed] + [fake_tokens(prompt, 8, 2**24, seed=1)]
    assert all(not set(base) & set(other) for other in others)
    assert fake_tokens(prompt + base[:3], 5, 2**24) == base[3:]


def test_checksums_of_neighbouring_parts_add_up() -> None:
    ids = np.arange(50, dtype=np.int32) * 37
    with np.errstate(over="ignore"):
        parts = checksum(ids[:20]) + checksum(ids[20:], 20)
    assert parts == checksum(ids)


def test_executor_agrees_with_the_oracle_in_chunks_and_batches() -> None:
    executor = ready()
    one, two = [5, 6, 7, 8, 9, 10], [11, 12]
    expected = fake_tokens(one, 3, VOCAB_SIZE), fake_tokens(two, 3, VOCAB_SIZE, seed=4)
    added = [new_row(2, one, [1]), new_row(0, two, [2], seed=4, temperature=1.0)]
    output = executor.execute(plan(0, [2, 0], [4, 2], added)).result()
    assert (output.step, output.token_ids.tolist()) == (0, [NO_TOKEN, expected[1][0]])
    output = executor.execute(plan(1, [0, 2], [1, 2], blocks=[(2, 3)])).result()
    assert output.token_ids.tolist() == [expected[1][1], expected[0][0]]
    assert output.token_ids.dtype == np.int32
    output = executor.execute(plan(2, [2], [1])).result()
    assert output.token_ids.tolist() == [expected[0][1]]


def test_seed_counts_only_where_tokens_are_drawn() -> None:
    executor = ready()
    added = [new_row(0, [5], [1], seed=9), new_row(1, [5], [2], seed=9, temperature=0.5), new_row(2, [5], [3])]
    greedy, drawn, plain = executor.execute(plan(0, [0, 1, 2], [1, 1, 1], added)).result().token_ids.tolist()
    assert greedy == plain == fake_tokens([5], 1, VOCAB_SIZE)[0]
    assert drawn == fake_tokens([5], 1, VOCAB_SIZE, seed=9)[0] != greedy


def test_a_row_is_removed_and_given_again_in_one_plan() -> None:
    executor = ready()
    executor.execute(plan(0, [1], [3], [new_row(1, [5, 6, 7], [1])]))
    output = executor.execute(plan(1, [1], [2], [new_row(1, [8, 9], [2])], removed=[1])).result()
    assert output.token_ids.tolist() == fake_tokens([8, 9], 1, VOCAB_SIZE)


def test_plans_that_schedule_too_much_are_broken_invariants() -> None:
    with pytest.raises(AssertionError, match=r"scheduled up to \[4\] tokens, but \[3\] are known"):
        ready().execute(plan(0, [0], [4], [new_row(0, [5, 6, 7], [1])]))
    with pytest.raises(AssertionError, match=r"scheduled up to \[5\] tokens, but the blocks hold \[4\]"):
        ready().execute(plan(0, [0], [5], [new_row(0, [5, 6, 7, 8, 9], [1])]))


def test_runner_table_takes_several_blocks_for_several_rows() -> None:
    table = RunnerTable(3, 4)
    table.apply(plan(0, [], [], [new_row(0, [1], [1]), new_row(2, [1], [2])]))
    table.apply(plan(1, [], [], blocks=[(2, 5), (2, 3), (0, 9), (0, 4), (0, 6)]))
    assert table.blocks.read(2, 0, 3).tolist() == [2, 5, 3]
    assert table.blocks.read(0, 0, 4).tolist() == [1, 9, 4, 6]
    assert table.num_blocks.tolist() == [4, 0, 3]


def test_removed_rows_give_their_pages_back() -> None:
    table = RunnerTable(2, 4)
    table.apply(plan(0, [], [], [new_row(0, [1], [1]), new_row(1, [2], [2])]))
    assert (num_used_pages(table.tokens), num_used_pages(table.blocks)) == (2, 2)
    table.apply(plan(1, [], [], removed=[0]))
    assert (num_used_pages(table.tokens), num_used_pages(table.blocks)) == (1, 1)


def test_it_is_found_by_name_and_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from ipc.options.config import EngineConfig\n"
        "from core.executors.by_name import load_executor\n"
        "import core.engine\n"
        "options = {'vocab_size': '50', 'eos_token_id': '3'}\n"
        "executor = load_executor(EngineConfig(executor='fake', executor_options=options))\n"
        "assert executor.info.vocab_size == 50 and executor.info.eos_token_ids == (3,), executor.info\n"
        "assert executor.determine_num_available_blocks(2**20, 16) == 16\n"
        "assert executor.determine_num_available_blocks(0, 16) == 2\n"
        "executor.close()\n"
        "bad = {'torch', 'transformers', 'zmq'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", placed(code)], check=True, timeout=60, cwd=Path(__file__).parents[3])


def test_fingerprint_tells_configs_apart() -> None:
    one = load_executor(small_config()).info.fingerprint
    assert one == load_executor(small_config(max_num_seqs=3)).info.fingerprint
    assert one != create(with_fake_options(small_config(), vocab_size=77)).info.fingerprint
