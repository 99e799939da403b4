"""Fixtures of the tests of workers: folders of made-up models, and the answers of one process."""

import json
from typing import Any

import pytest

from tests.core.workers.part_answers import HYBRID, MODEL, answers, config_of


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


@pytest.fixture(scope="package")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("deep")
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 4}))
    return str(folder)


@pytest.fixture(scope="package")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid")
    (folder / "config.json").write_text(json.dumps(HYBRID))
    return str(folder)


@pytest.fixture(scope="package")
def alone(folder: str) -> list[Any]:
    return answers(config_of(folder, 1))
