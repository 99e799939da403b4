"""LLM with peers: an engine fetches the KV blocks that another has computed, and no token changes."""

import time
from pathlib import Path
from typing import Any

import pytest

from core.tiers.peers import PAUSE_S
from engine_core import LLM
from ipc.errors import AddressError, ConfigError, EngineStartError
from ipc.options.block_stores import make_key_file
from tests.frontend.test_kv_dir import SIZES, answers, tiny_model
from tools.commands.keys import main as keys

pytestmark = pytest.mark.timeout(120)
__all__ = ["tiny_model"]  # the fixture `model`


def test_blocks_come_from_a_peer_while_it_lives_and_are_computed_when_it_is_gone(model: str, tmp_path: Path) -> None:
    key, address = str(tmp_path / "key"), f"ipc://{tmp_path}/kv.sock"
    assert keys(["blocks", key]) == 0
    with LLM(model, **SIZES, kv_listen=address, kv_key_file=key) as giver:
        first = answers(giver)
        assert first[1] == [0] * 4
        assert giver.statistics().num_fetched_blocks == 0
        with LLM(model, **SIZES, kv_peers=address, kv_key_file=key) as taker:
            for _ in range(3):  # on a busy machine a peer may be late, and is not asked for a while then
                second = answers(taker)
                assert second[0] == first[0]
                if second[1][1:] == [160] * 3:
                    break
                time.sleep(PAUSE_S)
                taker.reset_prefix_cache()
            assert second[1][1:] == [160] * 3, "the peer's KV cache has the last of them, and its host those before"
            assert taker.statistics().num_fetched_blocks >= 60
            giver.close()
            taker.reset_prefix_cache()
            assert answers(taker) == first


def test_a_peer_without_the_key_finds_nothing_and_a_bad_key_file_fails_the_start(model: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/kv.sock"
    for name in ("one", "other"):
        make_key_file(str(tmp_path / name))
    with LLM(model, **SIZES, kv_listen=address, kv_key_file=tmp_path / "one") as giver:
        first = answers(giver)
        with LLM(model, **SIZES, kv_peers=address, kv_key_file=tmp_path / "other") as taker:
            assert answers(taker) == first
    (tmp_path / "one").write_bytes(b"short")
    with pytest.raises(ConfigError, match="keys blocks FILE"):
        LLM(model, **SIZES, kv_listen=address, kv_key_file=tmp_path / "one")
    (tmp_path / "other").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        LLM(model, **SIZES, kv_listen=address, kv_key_file=tmp_path / "other")
    with pytest.raises(ConfigError, match="File exists"):
        make_key_file(str(tmp_path / "one"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_host_blocks": 0}, "also give kv_host_bytes"),
        ({"kv_key_file": None}, "keys blocks FILE"),
        ({"kv_peers": " , "}, "must be an address"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, EngineStartError), match=message):
        LLM(**{**SIZES, "kv_peers": "ipc:///tmp/kv.sock", "kv_key_file": "key", **options})


def test_a_network_without_keys_is_refused(model: str, tmp_path: Path) -> None:
    make_key_file(str(tmp_path / "key"))
    for name in ("kv_peers", "kv_listen"):
        with pytest.raises(AddressError, match="needs keys"):
            LLM(model, **SIZES, kv_key_file=tmp_path / "key", **{name: "tcp://10.0.0.1:5555"})
