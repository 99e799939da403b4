"""Prompts as embeddings over HTTP: every form of a matrix, wrong ones, and the tokens that the ids would give."""

import base64
import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import torch

from frontend.http.openai.prompt_embeds import read_prompt_embeds
from ipc.errors import InvalidRequestError
from tests.core.models.checkpoints import build
from tests.core.models.encoder_checkpoints import add_tokenizer
from tests.frontend.http.caller import Caller, serving

ROWS = np.random.default_rng(1).normal(0, 1, (5, 8)).astype(np.float32)
MOST = 1 << 16


def of_numpy(rows: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def of_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def of_safetensors(**rows: Any) -> bytes:
    return safetensors.numpy.save(rows, {"note": "x"})


def read(data: bytes, most: int = MOST) -> npt.NDArray[np.float32]:
    return read_prompt_embeds(base64.b64encode(data).decode(), most)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_each_form_and_type(dtype: Any) -> None:
    rows = ROWS.astype(dtype)
    wanted = rows.astype(np.float32)
    turned = torch.from_numpy(np.ascontiguousarray(rows.T)).T
    forms = [
        of_numpy(rows),
        of_numpy(np.asfortranarray(rows)),
        of_numpy(rows.astype(rows.dtype.newbyteorder(">"))),
        of_safetensors(x=rows),
        of_torch(torch.from_numpy(rows)),
        of_torch(turned),
        of_torch(torch.from_numpy(np.concatenate([rows, rows]))[5:]),
        of_torch(torch.from_numpy(rows).requires_grad_()),
    ]
    for data in forms:
        found = read(data)
        assert (found.dtype, found.flags.c_contiguous) == (np.float32, True)
        assert np.array_equal(found, wanted)


def test_bfloat16() -> None:
    rows = torch.from_numpy(ROWS).bfloat16()
    from safetensors.torch import save

    for data in (of_torch(rows), save({"x": rows})):
        assert np.array_equal(read(data), rows.float().numpy())


class Named:
    """What a pickle may name and must not get: nothing here is called."""

    def __reduce__(self) -> Any:
        return (print, ("called",))


def zipped(pickled: bytes, data: bytes = bytes(160), compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", data)
    return file.getvalue()


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


PICKLED = zipfile.ZipFile(io.BytesIO(of_torch(torch.from_numpy(ROWS)))).read("archive/data.pkl")
HEADER = of_numpy(ROWS)
TENSORS = of_safetensors(x=ROWS)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "another format"),
        (pickle.dumps(ROWS), "another format"),
        (of_numpy(np.array([[Named()]], object)), "another header"),
        (of_numpy(ROWS[0]), "another header"),
        (of_numpy(ROWS.astype(np.int32)), "another header"),
        (changed(HEADER, b"(5, 8)", b"(9, 9)"), "says that it is of 9 x 9 numbers, and has 40"),
        (changed(HEADER, b"(5, 8), }           ", b"(999999, 999999), } "), "is of 999999 x 999999"),
        (changed(HEADER, b"(5, 8)", b"(0, 8)"), "is of 0 x 8"),
        (HEADER[:60], "another header"),
        (of_safetensors(x=ROWS, y=ROWS), "for something else"),
        (of_safetensors(x=ROWS.astype(np.int32)), "for something else"),
        (of_safetensors(x=ROWS[0]), "for something else"),
        (changed(TENSORS, b"[0,160]", b"[0,999]"), "no data where"),
        (changed(TENSORS, b"[5,8]", b"[9,9]"), "says that it is of 9 x 9"),
        ((1 << 40).to_bytes(8, "little") + TENSORS[8:], "too long"),
        (of_torch(torch.from_numpy(ROWS[0])), "another pickle"),
        (of_torch({"x": torch.from_numpy(ROWS)}), "another pickle"),
        (of_torch(torch.from_numpy(ROWS.astype(np.int32))), "another type"),
        (of_torch(torch.nn.Parameter(torch.from_numpy(ROWS))), "another pickle"),
        (zipped(pickle.dumps(Named(), 2)), "another pickle"),
        (zipped(b"no pickle"), "no pickle of a tensor"),
        (zipped(changed(PICKLED, b"_rebuild_tensor_v2", b"_another_function_")), "another pickle"),
        (zipped(changed(PICKLED, b"FloatStorage", b"OtherStorage")), "another type"),
        (zipped(PICKLED, bytes(80)), "says that it is of 5 x 8 numbers, and has 20"),
        (zipped(PICKLED, compression=zipfile.ZIP_DEFLATED), "compressed"),
        (of_torch(torch.from_numpy(ROWS))[:300], "no file of torch"),
        (of_torch(torch.zeros(1, 8).expand(1 << 20, 8)), "is of 1048576 x 8"),
    ],
)
def test_what_is_something_else_is_refused(data: bytes, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        read(data)
    assert "called" not in capsys.readouterr().out


def test_nothing_is_imported_opened_or_run_for_a_file() -> None:
    """Whatever a file names: an audit hook sees each such event of the interpreter."""
    seen: list[str] = []
    is_on = [True]

    def hook(event: str, arguments: Any) -> None:
        if is_on[0] and event in ("import", "open", "exec", "compile", "pickle.find_class", "os.system"):
            seen.append(event)

    data = [of_torch(torch.from_numpy(ROWS)), HEADER, TENSORS, zipped(pickle.dumps(Named(), 2))]
    for one in data[:3]:
        read(one)  # imports of the first time
    sys.addaudithook(hook)
    try:
        for one in data:
            with pytest.raises(InvalidRequestError) if one is data[-1] else pytest.MonkeyPatch.context():
                read(one)
    finally:
        is_on[0] = False
    assert seen == []


def test_bounds_come_before_work() -> None:
    with pytest.raises(InvalidRequestError, match="has 300000 characters"):
        read_prompt_embeds("!" * 300_000, MOST)
    with pytest.raises(InvalidRequestError, match="not base64"):
        read_prompt_embeds("!", MOST)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(70):
            archive.writestr(f"a/{number}", b"")
    with pytest.raises(InvalidRequestError, match="more entries"):
        read(file.getvalue())


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray[np.float32]]:
    folder = tmp_path_factory.mktemp("model")
    model = build("llama3")
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder, model.get_input_embeddings().weight.detach().numpy()


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
def test_the_answer_is_that_of_the_tokens(table: tuple[Path, npt.NDArray[np.float32]]) -> None:
    folder, rows = table
    flags = ("-m", str(folder), "--dtype", "float32", "--max-model-len", "1000")
    prompts = [[5, 9, 77, 8], [250, 3, 4]]
    fields = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with serving(*flags, "--enable-prompt-embeds") as caller:
        wanted = [one["token_ids"] for one in caller.complete(prompts, **fields).json["choices"]]
        embeds = [base64.b64encode(of_torch(torch.from_numpy(rows[prompt]))).decode() for prompt in prompts]
        both = caller.complete(None, prompt_embeds=embeds, **fields).json
        assert [one["token_ids"] for one in both["choices"]] == wanted
        assert both["usage"]["prompt_tokens"] == 7
        mixed = caller.complete(prompts[1], prompt_embeds=embeds[0], **fields).json["choices"]
        assert [one["token_ids"] for one in mixed] == wanted
        narrow = caller.complete("", prompt_embeds=base64.b64encode(HEADER).decode())
        assert (narrow.status, "[tokens, 48]" in narrow.json["error"]["message"]) == (400, True)
        echo = caller.complete("", prompt_embeds=embeds[0], echo=True)
        assert (echo.status, "echo" in echo.json["error"]["message"]) == (400, True)


def test_without_the_option_and_without_an_engine_for_it(served: Caller) -> None:
    answer = served.complete("", prompt_embeds="x")
    assert (answer.status, "--enable-prompt-embeds" in answer.json["error"]["message"]) == (400, True)
    chat = served.chat(prompt_embeds="x")
    assert (chat.status, "prompt_embeds is not supported" in chat.json["error"]["message"]) == (400, True)
