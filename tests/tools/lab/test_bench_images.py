"""The benchmark of images, on a tiny model: every case, and a prompt of as many tokens as an image's."""

import pytest

from tools.lab.bench.images import SMOLVLM_256M, measure_images


def test_every_case_is_measured() -> None:
    pytest.importorskip("PIL.Image")
    text = {**SMOLVLM_256M.text, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"vocab_size": 400, "num_attention_heads": 3, "max_position_embeddings": 1024}
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3}
    vision |= {"image_size": 64, "patch_size": 4}
    shape = SMOLVLM_256M._replace(text=text, vision=vision, longest_edge=128, height=96, width=128)
    options = {"dtype": "float32", "max_model_len": 1024}
    records = list(measure_images(options, rounds=1, shape=shape))
    assert [record["case"] for record in records] == ["first", "second", "second, blocks lost", "text"]
    assert records[-1]["ratio"] == 1
    assert all(record["ttft_ms"] > 0 for record in records)
    assert records[0]["num_prompt_tokens"] > 5 * 16
