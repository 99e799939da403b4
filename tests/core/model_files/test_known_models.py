"""The models that `engine-core list --known` prints: all of the registry, each with published names."""

import json

import pytest

from core.model_files.known_models import PUBLISHED, known_models
from core.model_files.settings.text_part import TEXT_PARTS
from core.models.architectures.by_name import ARCHITECTURES
from core.models.architectures.encoder_architectures import ENCODERS
from core.models.architectures.vision_architectures import VISION_ARCHITECTURES
from tests.make_known import PAGE, made
from tools.commands.list import main


def test_every_name_of_the_registry_has_published_models() -> None:
    names = {*ARCHITECTURES, *TEXT_PARTS, *VISION_ARCHITECTURES, *(row.stem for row in ENCODERS)}
    assert PUBLISHED.keys() == names
    assert len({one.architecture for one in known_models()}) == len(known_models()) == len(names)


def test_what_runs_follows_from_the_rows() -> None:
    known = {one.architecture: one for one in known_models()}
    plain, hybrid = known["Qwen3ForCausalLM"], known["NemotronHForCausalLM"]
    assert (plain.files, plain.adapters) == ("safetensors, GGUF qwen3, qwen3vl", "all")
    assert (hybrid.adapters, hybrid.level) == ("not experts", "L2")
    assert known["MixtralForCausalLM"].files == "safetensors, GGUF llama with experts"
    assert known["Qwen3_5ForCausalLM"].mtp
    assert known["Gemma3ForConditionalGeneration"].images
    assert "3.6-27B, 3.8-27B" in known["Qwen3_5ForConditionalGeneration"].models


@pytest.mark.checkout  # docs/
def test_the_page_is_the_registry() -> None:
    """docs/known_models.md: `make map` makes it."""
    assert PAGE.read_text() == made()


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--known"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODELS", "ARCHITECTURE", "FILES", "IMAGES", "ADAPTERS", "MTP", "LEVEL"]
    assert len(rows) == len(known_models())
    assert main(["--known", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["architecture"] for one in objects] == [one.architecture for one in known_models()]
