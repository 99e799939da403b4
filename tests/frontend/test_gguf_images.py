"""Images with GGUF files: the vision encoder in a file beside the model's gives the bits of the folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.executors.local import LocalExecutor
from core.model_files.model_config import read_model_config
from frontend.llm import LLM
from ipc.errors import ConfigError, ModelFileError
from ipc.files.model_files import model_fingerprint, read_tokenizer_files
from ipc.files.projector import projector_of
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.core.models import (
    gemma3_checkpoint,
    idefics3_checkpoint,
    internvl_checkpoint,
    lfm2_vl_checkpoint,
    mistral3_checkpoint,
)
from tests.core.models.idefics3_checkpoint import LONGEST, noise
from tests.core.models.projector_gguf import write_internvl, write_lfm2_vl, write_projector, write_text
from tools.commands.replay.__main__ import EXIT_OTHER_MODEL
from tools.commands.replay.__main__ import main as replay

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: llama.cpp's name of the projector -> checkpoints, name of the text's model, a token that no prompt has, sizes.
KINDS: dict[str, tuple[Any, str, str, dict[str, int]]] = {
    "gemma3": (gemma3_checkpoint, "gemma3", "<end_of_turn>", {"projector__scale_factor": 3}),
    "idefics3": (idefics3_checkpoint, "llama", "<end>", {"projector__scale_factor": 2, "preproc_image_size": LONGEST}),
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 500, "max_num_seqs": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


def answers(path: Path, mark: str, **options: Any) -> tuple[list[Any], str]:
    """Tokens and log probabilities of two questions on images; the model's fingerprint."""
    images = [noise(100, 150, 1), noise(64, 64, 2)]
    prompts: Any = [{"prompt": f"What is {mark} this?", "multi_modal_data": {"image": image}} for image in images]
    with LLM(str(path), **OPTIONS, **options) as llm:
        outputs, identity = llm.generate(prompts, PARAMS, use_tqdm=False), llm.client.welcome.model_fingerprint
    found = []
    for output in outputs:
        columns = output.outputs[0].logprobs or []
        numbers = [{token: one.logprob for token, one in each.items()} for each in columns]
        found.append((output.prompt_token_ids, list(output.outputs[0].token_ids), numbers))
    return found, identity


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_the_folder(kind: str, tmp_path: Path) -> None:
    checkpoint, architecture, unused, sizes = KINDS[kind]
    folder, files, model = tmp_path / "folder", tmp_path / "files", checkpoint.tiny_model()
    checkpoint.write_checkpoint(folder)
    files.mkdir()
    path = write_text(files / "tiny.gguf", model, architecture, checkpoint.tiny_tokenizer(), unused)
    assert read_model_config(path).vision is None
    projector = write_projector(files / "mmproj-tiny.gguf", model, kind, swapped=kind == "gemma3", **sizes)
    mark = "<start_of_image>" if kind == "gemma3" else "<image>"
    (found, identity), (expected, _) = answers(path, mark), answers(folder, mark)
    assert found == expected
    assert found[0][1] != found[1][1]
    assert model_fingerprint(path) not in identity
    assert projector_of(path, None) == projector
    named = projector.rename(tmp_path / "vision.gguf")
    assert projector_of(path, None) is None
    assert answers(path, mark, mmproj=str(named)) == (expected, identity)


#: Names of checkpoints, of which the files are written as llama.cpp's converter does it -> architecture of the text,
#: the mark of an image, a token that no prompt has, and settings of the processor that files do not have.
OTHERS: dict[str, tuple[Any, str, str, str, dict[str, Any]]] = {
    "internvl3": (internvl_checkpoint, "qwen2", "<IMG_CONTEXT>", "<|im_end|>", {}),
    "internvl3.5": (internvl_checkpoint, "qwen3", "<IMG_CONTEXT>", "<|im_end|>", {}),
    "internvl3-6b": (internvl_checkpoint, "qwen2", "<IMG_CONTEXT>", "<|im_end|>", {}),
    "lfm2-vl": (lfm2_vl_checkpoint, "lfm2", "<image>", "<|im_end|>", {"encoder_patch_size": 4, "downsample_factor": 2}),
    "lfm2.5-vl": (lfm2_vl_checkpoint, "lfm2", "<image>", "<|im_end|>", {"encoder_patch_size": 4}),
    "pixtral": (mistral3_checkpoint, "llama", "[IMG]", "[INST]", {}),
}
WRITERS: dict[Any, Callable[[Path, Any], Path]] = {
    internvl_checkpoint: write_internvl,
    lfm2_vl_checkpoint: write_lfm2_vl,
    mistral3_checkpoint: lambda path, _: mistral3_checkpoint.write_pixtral_projector(path, "pixtral"),
}


#: Has the image encoder of another case and the text model of other tests.
REPEATED = "internvl3.5"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name == REPEATED else []) for name in OTHERS]
)
def test_other_projectors_give_the_answers_of_their_folders(name: str, tmp_path: Path) -> None:
    checkpoint, architecture, mark, unused, settings = OTHERS[name]
    model = checkpoint.tiny_model(name)
    folder = checkpoint.write_checkpoint(name, tmp_path / "folder")
    if settings:
        kind = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
        written = {"image_processor_type": kind, "resample": 2, **settings}
        (folder / "preprocessor_config.json").write_text(json.dumps(written))
    path = write_text(tmp_path / "tiny.gguf", model, architecture, checkpoint.tiny_tokenizer(), unused)
    projector = WRITERS[checkpoint](tmp_path / "mmproj-tiny.gguf", model)
    assert projector_of(path, None) == projector
    (found, _), (expected, _) = answers(path, mark), answers(folder, mark)
    assert found == expected
    assert found[0][1] != found[1][1]


def test_a_replay_finds_the_files_where_they_are_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, architecture, unused, sizes = KINDS["gemma3"]
    model = checkpoint.tiny_model()
    path = write_text(tmp_path / "tiny.gguf", model, architecture, checkpoint.tiny_tokenizer(), unused)
    projector = write_projector(tmp_path / "vision.gguf", model, architecture, **sizes)
    capture = tmp_path / "run.cap"
    with LLM(str(path), mmproj=str(projector), capture=str(capture), **OPTIONS) as llm:
        llm.generate("What is this?", PARAMS, use_tqdm=False)
    moved = [str(file.rename(tmp_path / f"moved-{file.name}")) for file in (path, projector)]
    arguments = [str(capture), "--mode", "full", "--model", moved[0]]
    assert replay(arguments) == EXIT_OTHER_MODEL
    assert "mmproj: there is no .gguf file" in capsys.readouterr().err
    assert replay([*arguments, "--mmproj", moved[1]]) == 0
    with pytest.raises(SystemExit):
        replay([str(capture), "--mmproj", moved[1]])


def test_a_file_without_a_projector_takes_no_images(tmp_path: Path) -> None:
    checkpoint, architecture, unused, _ = KINDS["gemma3"]
    path = write_text(tmp_path / "a.gguf", checkpoint.tiny_model(), architecture, checkpoint.tiny_tokenizer(), unused)
    features = LocalExecutor(EngineConfig(model=str(path), threads=1, max_model_len=100)).features
    limits = None if features is None else features.limits
    assert limits is None or not limits.image_size
    assert len(read_tokenizer_files(path)) == 1


def test_a_projector_of_another_model_is_left_alone(tmp_path: Path) -> None:
    checkpoint, architecture, unused, sizes = KINDS["gemma3"]
    model = checkpoint.tiny_model()
    path = write_text(tmp_path / "tiny.gguf", model, architecture, checkpoint.tiny_tokenizer(), unused)
    other = write_projector(tmp_path / "mmproj.gguf", model, "gemma3", projection_dim=12, **sizes)
    assert read_model_config(path).vision is None
    assert len(read_tokenizer_files(path)) == 1
    other.unlink()
    write_projector(tmp_path / "a-mmproj.gguf", idefics3_checkpoint.tiny_model(), "idefics3", **KINDS["idefics3"][3])
    assert read_model_config(path).vision is None


def test_a_named_file_that_is_no_projector_of_the_model_is_refused(tmp_path: Path) -> None:
    checkpoint, architecture, unused, sizes = KINDS["gemma3"]
    model = checkpoint.tiny_model()
    path = write_text(tmp_path / "tiny.gguf", model, architecture, checkpoint.tiny_tokenizer(), unused)
    others = {
        "narrow": write_projector(tmp_path / "narrow.gguf", model, "gemma3", projection_dim=12, **sizes),
        "idefics3": write_projector(
            tmp_path / "b.gguf", idefics3_checkpoint.tiny_model(), "idefics3", **KINDS["idefics3"][3]
        ),
        "unknown": write_projector(tmp_path / "c.gguf", model, "gemma3", projector_type=7, **sizes),
    }
    for file, text in (
        (tmp_path / "none.gguf", r"mmproj: there is no \.gguf file .*none\.gguf"),
        (path, r"is not a projector: its general\.architecture is 'gemma3', not 'clip'"),
        (others["narrow"], "belongs to another model: its rows have 12 numbers"),
        (others["idefics3"], "is for models of the architecture 'llama', and .* has 'gemma3'"),
        (others["unknown"], "has a projector of type '7'; supported are gemma3, idefics3"),
    ):
        with pytest.raises(ModelFileError, match=text):
            LocalExecutor(EngineConfig(model=str(path), mmproj=str(file), threads=1, max_model_len=100))
        with pytest.raises(ModelFileError, match=text):
            read_tokenizer_files(path, mmproj=str(file))
    folder = tmp_path / "folder"
    checkpoint.write_checkpoint(folder)
    with pytest.raises(ConfigError, match=r"mmproj is for models in \.gguf files, and .*folder is not one"):
        LocalExecutor(EngineConfig(model=str(folder), mmproj=str(others["narrow"]), threads=1, max_model_len=100))
    with pytest.raises(ConfigError, match="mmproj must be the path of"):
        EngineConfig(mmproj="")
