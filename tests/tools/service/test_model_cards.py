"""What a model of `serve --models` takes in memory, in each form of its weights."""

from pathlib import Path
from typing import Any

import pytest

from core.model_files.inspection import inspect_model
from core.models.operations.weight_form import WeightForm
from frontend.http.many.catalog import entry_of
from ipc.files.model_files import resolve_model
from tools.lab.bench.tiny_model import write_tiny_model
from tools.service import model_cards
from tools.service.model_cards import card_of


@pytest.mark.parametrize(
    ("options", "form", "num_stored", "num_dense"),
    [
        ({}, WeightForm.STORED, 1, 0),
        ({}, WeightForm.DENSE, 0, 1),
        ({}, WeightForm.BOTH, 1, 1),
        ({"cpu_kernels": "torch"}, WeightForm.BOTH, 0, 1),
        ({"quantization": "stored"}, WeightForm.BOTH, 1, 0),
        ({"quantization": "none"}, WeightForm.BOTH, 0, 1),
        ({"quantization": "int8"}, WeightForm.BOTH, 1, 0),
        ({"dtype": "float32"}, WeightForm.STORED, 0, 2),
        ({"reserve_weights": True}, WeightForm.STORED, 1, 0),
    ],
)
def test_the_weights_count_in_the_forms_that_an_engine_keeps(
    options: dict[str, Any], form: WeightForm, num_stored: int, num_dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cards, "best_form", lambda *_, **__: form)
    needs = inspect_model(resolve_model(None)).needs
    assert needs is not None
    assert needs.weights_as_stored is not None
    card = card_of(entry_of("one", {"model": str(resolve_model(None)), **options}), 8 << 30)
    stored = needs.weights_quantized if form is WeightForm.BOTH and num_dense else needs.weights_as_stored
    assert 0.99 < needs.weights_quantized / needs.weights_as_stored < 1
    assert card.weight_bytes == num_stored * stored + num_dense * needs.weights_dequantized


def test_memory_for_an_update_counts_and_is_not_the_models_size() -> None:
    plain, reserving = (
        card_of(entry_of("one", {"model": str(resolve_model(None)), "reserve_weights": reserves}), 8 << 30)
        for reserves in (False, True)
    )
    assert plain.num_bytes is not None
    assert reserving.weight_bytes == plain.weight_bytes
    assert reserving.num_bytes == plain.num_bytes + plain.weight_bytes


def test_plain_weights_and_those_of_a_model_that_pools_have_one_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(*_: object, has_few_rows: bool) -> WeightForm:
        return WeightForm.BOTH if has_few_rows else WeightForm.DENSE

    monkeypatch.setattr(model_cards, "best_form", both)
    write_tiny_model(tmp_path)
    for model, options in ((tmp_path, {}), (resolve_model(None), {"runner": "pooling"})):
        needs = inspect_model(model).needs
        assert needs is not None
        card = card_of(entry_of("one", {"model": str(model), **options}), 8 << 30)
        assert card.weight_bytes == needs.weights_dequantized
