"""The fault matrix: every fault, victim and moment in real processes. `make soak` plays all cells, the suite a choice.

soak_faults.md has the counts of whole runs.
"""

from pathlib import Path

import pytest

from tests.frontend.engine.fault_matrix import FAULTS, MOMENTS, VICTIMS, Cell, all_cells, promise, run_cell

#: What breaks first when something breaks: a death in each moment, and one cell of each other kind.
CHOICE = (
    Cell("SEGV", "engine", "prefill"),
    Cell("KILL", "engine", "upgrading"),
    Cell("TERM", "engine", "finishing"),
    Cell("KILL", "supervisor", "decode"),
    Cell("MemoryError", "client", "draining"),
    Cell("KILL", "standby", "decode"),
    Cell("SEGV", "http", "decode"),
)


@pytest.mark.parametrize("cell", CHOICE, ids=str)
def test_a_choice_of_cells(cell: Cell, tmp_path: Path) -> None:
    run_cell(cell, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("cell", [cell for cell in all_cells() if cell not in CHOICE], ids=str)
def test_every_other_cell(cell: Cell, tmp_path: Path) -> None:
    run_cell(cell, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    "cell",
    [cell for cell in all_cells() if cell.victim in ("engine", "standby") and cell.moment != "starting"],
    ids=str,
)
def test_every_cell_over_http(cell: Cell, tmp_path: Path) -> None:
    """Where the engine or its standby is struck: callers over HTTP see a pause, too."""
    run_cell(cell, tmp_path, is_over_http=True)


def test_the_matrix_is_whole() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells)) == 80 - 3 + 70 + 80 - 24 + 56 + 80
    assert {cell.fault for cell in cells} == set(FAULTS)
    assert {cell.moment for cell in cells} == set(MOMENTS)
    assert {cell.victim for cell in cells} == set(VICTIMS)
    assert set(CHOICE) <= set(cells)
    assert sum(promise(cell) == "exact" for cell in cells) > 0.75 * len(cells), "a promise that is worth something"
