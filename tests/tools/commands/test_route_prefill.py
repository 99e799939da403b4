"""Prefill and decode apart, as processes: the blocks come from the other engine, and no token or bit changes."""

from pathlib import Path
from typing import Any

import pytest

from engine_core import LLM
from ipc.options.block_stores import make_key_file
from ipc.options.config import EngineConfig
from tests.core.process.tiny_lfm2 import lfm2_folder
from tests.frontend.test_kv_dir import SIZES, answers
from tests.tools.commands.test_route import Router
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("is_recurrent", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_prompt_that_another_engine_has_computed_gives_the_same_bits(tmp_path: Path, *, is_recurrent: bool) -> None:
    """With recurrent layers, the state after the prompt's last whole block comes too."""
    write_tiny_model(tmp_path / "model")
    sizes = SIZES | ({"load_format": "dummy", "max_num_seqs": 4} if is_recurrent else {})
    if is_recurrent:
        lfm2_folder(tmp_path / "model")
    make_key_file(str(tmp_path / "key"))
    own = {name: value for name, value in sizes.items() if name != "skip_tokenizer_init"}
    common: dict[str, Any] = {"model": str(tmp_path / "model"), **own, "kv_key_file": str(tmp_path / "key")}
    with LLM(str(tmp_path / "model"), **sizes) as alone:
        due = answers(alone)[0]
    kv, site = f"ipc://{tmp_path}/kv", Router(tmp_path)
    try:
        site.start_engines("prefill", config=EngineConfig(**common, kv_listen=kv))
        site.start_engines("decode", config=EngineConfig(**common, kv_peers=kv))
        site.start("decode", options=["--prefill", site.at("prefill"), "--prefill-min-tokens", "64"])
        with LLM(connect=site.address, skip_tokenizer_init=True) as llm:
            assert answers(llm)[0] == due
        with LLM(connect=site.at("decode"), skip_tokenizer_init=True) as decode:
            counted = decode.statistics()
        assert counted.num_fetched_blocks >= 60, "blocks that came from the other engine"
        assert counted.num_generation_tokens == 4 * 7, "the first token of each is the other engine's"
        site.kill_engine("prefill")
        with LLM(connect=site.address, skip_tokenizer_init=True) as llm:
            assert answers(llm)[0] == due
    finally:
        site.close()
