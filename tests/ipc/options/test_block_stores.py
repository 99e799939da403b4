"""kv_transfer_config: as a dict or JSON, with vLLM's keys; what is not supported is refused by name."""

from typing import Any

import msgspec
import pytest

from ipc.errors import ConfigError
from ipc.options.block_stores import KVTransferConfig, parse_kv_transfer_config, redacted_stores
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options

HOST: dict[str, Any] = {"kv_host_bytes": 2**20, "kv_key_file": "key"}


def given(settings: object, **options: Any) -> EngineConfig:
    return config_from_options(**{**HOST, **options}, kv_transfer_config=settings)


@pytest.mark.parametrize("settings", [{"kv_connector": "valkey"}, '{"kv_connector": "valkey", "kv_role": "kv_both"}'])
def test_an_installed_connector_is_named(settings: object) -> None:
    config = given(settings)
    assert config.kv_transfer_config == KVTransferConfig(kv_connector="valkey")
    assert config.kv_stores == ["kv_transfer_config"]
    assert config.asks_kv_store
    assert msgspec.convert(msgspec.to_builtins(config), EngineConfig) == config


@pytest.mark.parametrize(
    ("role", "loads", "stores"), [("kv_producer", False, True), ("kv_consumer", True, False), ("kv_both", True, True)]
)
def test_a_role_says_which_way_blocks_go(role: str, loads: bool, stores: bool) -> None:
    config = given({"kv_connector": "valkey", "kv_role": role})
    settings = config.kv_transfer_config
    assert settings is not None
    assert (settings.loads, settings.stores, config.asks_kv_store) == (loads, stores, loads)


def test_what_vllm_does_by_default_has_no_effect() -> None:
    plain: dict[str, Any] = {"kv_connector": "valkey", "kv_connector_extra_config": {"address": "host:1"}}
    full = {
        **plain,
        "kv_role": "kv_both",
        "engine_id": "any",
        "kv_buffer_device": "cpu",
        "kv_buffer_size": 1e9,
        "kv_rank": None,
        "kv_parallel_size": 1,
        "kv_ip": "127.0.0.1",
        "kv_port": 14579,
        "kv_connector_module_path": None,
        "enable_permute_local_kv": False,
        "kv_load_failure_policy": "recompute",
    }
    assert parse_kv_transfer_config(full) == parse_kv_transfer_config(plain)
    assert parse_kv_transfer_config(None) is None


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (
            {"kv_connector": "folder", "kv_connector_extra_config": {"kv_dir": "d", "kv_dir_bytes": "2M"}},
            {"kv_dir": "d", "kv_dir_bytes": 2 << 20},
        ),
        (
            {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "d"}},
            {"kv_dir": "d"},
        ),
        (
            {
                "kv_connector": "peers",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"kv_listen": "ipc:///a"},
            },
            {"kv_listen": "ipc:///a"},
        ),
        (
            {"kv_connector": "peers", "kv_role": "kv_consumer", "kv_connector_extra_config": {"kv_peers": "ipc:///a"}},
            {"kv_peers": "ipc:///a"},
        ),
        (
            {
                "kv_connector": "peers",
                "kv_connector_extra_config": {"kv_peers": "ipc:///a", "kv_listen": "ipc:///b"},
            },
            {"kv_peers": "ipc:///a", "kv_listen": "ipc:///b"},
        ),
    ],
)
def test_folder_and_peers_are_the_options_that_they_were(settings: object, options: dict[str, Any]) -> None:
    assert given(settings) == config_from_options(**HOST, **options)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "needs kv_connector: folder, peers, or the name of an installed one"),
        ({"kv_connector": ""}, "needs kv_connector"),
        ("[]", "must be a dict or a JSON object"),
        ("{", "must be a dict or a JSON object"),
        ({"kv_connector": "a", "kv_rolle": "kv_both"}, "unknown key 'kv_rolle'; known are kv_connector, kv_role"),
        ({"kv_connector": "a", "kv_role": "producer"}, "kv_role must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_connector": "a", "kv_role": ["kv_both"]}, "kv_role must be one of"),
        ({"kv_connector": "a", "kv_rank": 0}, "kv_rank=0 is not supported; only None is"),
        ({"kv_connector": "a", "kv_parallel_size": 2}, "kv_parallel_size=2 is not supported; only 1 or None is"),
        ({"kv_connector": "a", "kv_parallel_size": True}, "kv_parallel_size=True"),
        ({"kv_connector": "a", "kv_buffer_device": "cuda"}, "blocks pass through the host's memory"),
        ({"kv_connector": "a", "kv_load_failure_policy": "fail"}, "what cannot be loaded is computed"),
        ({"kv_connector": "a", "kv_connector_module_path": "m"}, "an entry in the group engine_core.kv_connectors"),
        ({"kv_connector": "NixlConnector"}, "'NixlConnector' is not supported: .* connector 'peers'"),
        ({"kv_connector": "OffloadingConnector"}, "kv_host_bytes keeps blocks on the host"),
        ({"kv_connector": "MultiConnector"}, "are asked in this order"),
        ({"kv_connector": "a", "kv_connector_extra_config": []}, "must be a JSON object of up to 64 KiB"),
        ({"kv_connector": "a", "kv_connector_extra_config": {"a": object()}}, "must be a JSON object"),
        ({"kv_connector": "a", "kv_connector_extra_config": {"a": "x" * 2**16}}, "of up to 64 KiB"),
        ({"kv_connector": "folder"}, "'folder' with kv_role 'kv_both' needs kv_dir"),
        ({"kv_connector": "folder", "kv_role": "kv_consumer"}, "of connector 'folder' must be kv_both"),
        ({"kv_connector": "folder", "kv_connector_extra_config": {"path": "x"}}, "has no option 'path'; it has"),
        (
            {"kv_connector": "peers", "kv_role": "kv_consumer", "kv_connector_extra_config": {"kv_listen": "ipc:///a"}},
            "has no option 'kv_listen'; it has kv_key_file, kv_peers",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        given(settings)
    assert "kv_transfer_config" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_key_file": None}, "kv_transfer_config needs kv_key_file"),
        ({"kv_host_bytes": 0}, "also give kv_host_bytes"),
        ({"executor": "npu"}, "is for executor='local'; got 'npu'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        given({"kv_connector": "valkey"}, **options)


def test_blocks_have_k_and_v_of_layers_for_multi_token_prediction_and_of_no_other_model() -> None:
    drafts: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    assert given(None, kv_dir="d", speculative_config=drafts).kv_stores == ["kv_dir"]
    assert given(None, kv_dir="d", speculative_config={**drafts, "model": "an assistant"}).kv_stores == ["kv_dir"]
    for method in ("eagle3", "draft_model"):
        with pytest.raises(ConfigError, match="kv_dir does not support the blocks of another model that drafts"):
            given(None, kv_dir="d", speculative_config={**drafts, "method": method, "model": "head"})


def test_an_option_that_is_given_twice_is_refused() -> None:
    settings = {"kv_connector": "folder", "kv_connector_extra_config": {"kv_dir": "a"}}
    with pytest.raises(ConfigError, match="kv_dir is given twice"):
        given(settings, kv_dir="b")


def test_a_redacted_engine_has_the_same_kinds_of_stores() -> None:
    extra = {"address": "host:1", "password_file": "secret"}
    config = given({"kv_connector": "valkey", "kv_role": "kv_producer", "kv_connector_extra_config": extra}, kv_dir="d")
    redacted = msgspec.structs.replace(config, **redacted_stores(config))
    assert redacted.kv_stores == config.kv_stores
    assert redacted.asks_kv_store == config.asks_kv_store
    assert "secret" not in repr(redacted)
    assert "valkey" not in repr(redacted)
