"""What a model of `serve --models` takes in memory, in each form of its weights."""

from typing import Any

import pytest

from core.model_files.inspection import inspect_model
from core.models.operations.weight_form import WeightForm
from frontend.http.many.catalog import entry_of
from ipc.files.model_files import resolve_model
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
    ],
)
def test_the_weights_count_in_the_forms_that_an_engine_keeps(
    options: dict[str, Any], form: WeightForm, num_stored: int, num_dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cards, "best_form", lambda *_: form)
    needs = inspect_model(resolve_model(None)).needs
    assert needs is not None
    assert needs.weights_as_stored is not None
    card = card_of(entry_of("one", {"model": str(resolve_model(None)), **options}), 8 << 30)
    assert card.weight_bytes == num_stored * needs.weights_as_stored + num_dense * needs.weights_dequantized
