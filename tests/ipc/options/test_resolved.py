"""ResolvedConfig: it has every size, and says so to whoever reads one."""

import msgspec
import pytest

from ipc.errors import ConfigError
from ipc.options.config import OPTIONS, EngineConfig
from ipc.options.resolved import DECIDED, ResolvedConfig
from tests.resolved import resolved_config

CONFIG = resolved_config(100, 200)


def test_it_has_the_same_options_and_decides_those_that_have_no_value_by_default() -> None:
    assert set(ResolvedConfig.__struct_fields__) == set(EngineConfig.__struct_fields__) == set(OPTIONS)
    usual = EngineConfig()
    assert [name for name in DECIDED if getattr(usual, name) is not None] == []


@pytest.mark.parametrize("name", DECIDED)
def test_every_size_is_there(name: str) -> None:
    with pytest.raises(AssertionError, match=f"^not resolved: {name}$"):
        msgspec.structs.replace(CONFIG, **{name: None})
    encoded = msgspec.to_builtins(CONFIG)
    del encoded[name]
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert(encoded, ResolvedConfig)


def test_it_is_checked_like_any_config_and_stays_one_when_it_is_changed() -> None:
    with pytest.raises(ConfigError, match=r"^threads must be an integer from 1 to 1024; got 0$"):
        msgspec.structs.replace(CONFIG, threads=0)
    changed = msgspec.structs.replace(CONFIG, max_num_seqs=3)
    assert type(changed) is ResolvedConfig
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=ResolvedConfig) == changed
