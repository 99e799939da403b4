"""Stores of KV blocks beyond the host's memory: the options that name them, and the key of the blocks' names.

kv_transfer_config has vLLM's keys. Connectors that are options of their own become these options.
"""

import os
import stat
from typing import Any, Literal, cast, get_args

import msgspec

from ipc.errors import ConfigError
from ipc.options.option import json_object

#: Options that name one.
STORE_OPTIONS = ("kv_dir", "kv_listen", "kv_peers", "kv_transfer_config")
#: The options of an engine without stores: a replay's, since its requests to stores are not carried out.
NO_STORE: dict[str, None] = dict.fromkeys((*STORE_OPTIONS, "kv_key_file"))
KEY_BYTES = 32
#: The entry-point group of connectors, and the names of those that are options of their own.
KV_CONNECTORS = "engine_core.kv_connectors"
BUILT_IN_CONNECTORS = ("folder", "peers")
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
_MAX_NAME = 128
_MAX_EXTRA_BYTES = 1 << 16

#: vLLM's connector -> ours.
_OUR_NAMES = {"SharedStorageConnector": "folder", "ExampleConnector": "folder"}
_BY_PEERS = "other engines' KV blocks are those of connector 'peers'"
_IN_ORDER = "kv_dir, kv_peers and one connector go together, and are asked in this order"
#: Connectors of vLLM that this version does not have -> what to use.
_OTHER_CONNECTORS = {
    **dict.fromkeys(
        ("NixlConnector", "P2pNcclConnector", "MooncakeConnector", "MoRIIOConnector", "PyNcclConnector"), _BY_PEERS
    ),
    **dict.fromkeys(("OffloadingConnector", "SimpleCPUOffloadConnector"), "kv_host_bytes keeps blocks on the host"),
    "LMCacheConnectorV1": "kv_host_bytes, kv_dir and kv_peers keep blocks",
    "LMCacheMPConnector": "kv_host_bytes, kv_dir and kv_peers keep blocks",
    "MultiConnector": _IN_ORDER,
}
_BY_NAMES = "engines find blocks by names that depend on the tokens, in any number of engines"
#: Keys of vLLM without effect here, each with the values that describe what is done anyway.
_NEUTRAL_KEYS: dict[str, tuple[object, ...]] = {
    "kv_buffer_device": ("cpu",),
    "kv_rank": (),
    "kv_parallel_size": (1,),
    "kv_ip": ("127.0.0.1",),
    "kv_port": (14_579,),
    "kv_connector_module_path": (),
    "kv_buffer_size": (1e9,),
    "enable_permute_local_kv": (False,),
    "kv_load_failure_policy": ("recompute",),
}
#: Why other values are refused.
_REFUSED_KEYS = {
    "kv_buffer_device": "blocks pass through the host's memory (kv_host_bytes)",
    "kv_buffer_size": "kv_host_bytes is the memory that blocks pass through",
    "kv_rank": _BY_NAMES,
    "kv_parallel_size": _BY_NAMES,
    "kv_ip": "addresses are the connector's own, in kv_connector_extra_config",
    "kv_port": "addresses are the connector's own, in kv_connector_extra_config",
    "kv_connector_module_path": f"a connector is an installed package with an entry in the group {KV_CONNECTORS}",
    "enable_permute_local_kv": "blocks are kept as they are in the cache",
    "kv_load_failure_policy": "what cannot be loaded is computed",
}
#: Options of the built-in connectors: a key of kv_connector_extra_config -> option.
_FOLDER_OPTIONS = {"kv_dir": "kv_dir", "kv_dir_bytes": "kv_dir_bytes", "shared_storage_path": "kv_dir"}
#: The option of peers that each role needs, and those that it may have.
_PEER_ROLES: dict[str, tuple[str, ...]] = {
    "kv_producer": ("kv_listen",),
    "kv_consumer": ("kv_peers",),
    "kv_both": ("kv_listen", "kv_peers"),
}


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option kv_transfer_config, with vLLM's keys: an installed connector, and which ways blocks go."""

    kv_connector: str
    kv_role: KVRole = "kv_both"
    kv_connector_extra_config: dict[str, Any] = msgspec.field(default_factory=dict)  # the connector's own options

    @property
    def loads(self) -> bool:
        """Return whether requests may find blocks in it."""
        return self.kv_role != "kv_producer"

    @property
    def stores(self) -> bool:
        """Return whether it is given blocks."""
        return self.kv_role != "kv_consumer"


def parse_kv_transfer_config(given: object) -> KVTransferConfig | None:
    """Return the config of a dict or of a JSON object; None for None. Errors: ConfigError that names the key."""
    if given is None or isinstance(given, KVTransferConfig):
        return given
    given = json_object("kv_transfer_config", given)
    keys = {key: value for key, value in given.items() if value is not None and key != "engine_id"}
    for key, neutral in _NEUTRAL_KEYS.items():
        if key not in keys:
            continue
        if not any(isinstance(keys[key], bool) == isinstance(value, bool) and keys[key] == value for value in neutral):
            allowed = " or ".join(repr(choice) for choice in (*neutral, None))
            why = f"only {allowed} is: {_REFUSED_KEYS[key]}"
            raise ConfigError(f"kv_transfer_config: {key}={keys[key]!r:.80} is not supported; {why}")
        del keys[key]
    for key in keys:
        if key not in KVTransferConfig.__struct_fields__:
            known = ", ".join(KVTransferConfig.__struct_fields__)
            raise ConfigError(f"kv_transfer_config: unknown key {key!r:.80}; known are {known}")
    return KVTransferConfig(
        kv_connector=_connector_name(keys.get("kv_connector")),
        kv_role=_role(keys.get("kv_role", "kv_both")),
        kv_connector_extra_config=_extra(keys.get("kv_connector_extra_config", {})),
    )


def _connector_name(name: object) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
        raise ConfigError(
            f"kv_transfer_config needs kv_connector: {', '.join(BUILT_IN_CONNECTORS)}, or the name of an installed one "
            f"(docs/scale_out.md); got {name!r:.80}"
        )
    if name in _OTHER_CONNECTORS:
        raise ConfigError(f"kv_transfer_config: kv_connector {name!r} is not supported: {_OTHER_CONNECTORS[name]}")
    return _OUR_NAMES.get(name, name)


def _role(role: object) -> KVRole:
    if role not in get_args(KVRole):
        raise ConfigError(f"kv_transfer_config: kv_role must be one of {', '.join(get_args(KVRole))}; got {role!r:.80}")
    return cast("KVRole", role)


def _extra(extra: object) -> dict[str, Any]:
    try:
        size = len(msgspec.json.encode(extra))
    except (TypeError, ValueError, OverflowError, msgspec.EncodeError, RecursionError):
        size = _MAX_EXTRA_BYTES + 1
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra) or size > _MAX_EXTRA_BYTES:
        raise ConfigError(
            "kv_transfer_config: kv_connector_extra_config must be a JSON object of up to "
            f"{_MAX_EXTRA_BYTES >> 10} KiB; got {extra!r:.80}"
        )
    return extra


def options_of_connector(settings: KVTransferConfig) -> dict[str, Any] | None:
    """Return the options that a built-in connector stands for; None: it is a plug-in's. Errors: ConfigError."""
    if settings.kv_connector not in BUILT_IN_CONNECTORS:
        return None
    role, extra = settings.kv_role, settings.kv_connector_extra_config
    known, needed = {"kv_key_file": "kv_key_file"}, _PEER_ROLES[role]
    if settings.kv_connector == "folder":
        if role != "kv_both":
            raise ConfigError(f"kv_transfer_config: kv_role of connector 'folder' must be kv_both; got {role!r}")
        known, needed = {**known, **_FOLDER_OPTIONS}, ("kv_dir",)
    else:
        known |= {option: option for option in needed}
    if unknown := sorted(extra.keys() - known.keys()):
        raise ConfigError(
            f"kv_transfer_config: connector {settings.kv_connector!r} with kv_role {role!r} has no option "
            f"{unknown[0]!r:.80}; it has {', '.join(known)}"
        )
    options = {known[key]: value for key, value in extra.items() if value is not None}
    if missing := [option for option in needed if option not in options]:
        raise ConfigError(
            f"kv_transfer_config: connector {settings.kv_connector!r} with kv_role {role!r} needs {missing[0]} in "
            "kv_connector_extra_config"
        )
    return options


def redacted_stores(config: Any) -> dict[str, Any]:
    """Return replacements for the options of an EngineConfig that name stores: its decisions stay the same."""
    kept: dict[str, Any] = {name: None if getattr(config, name) is None else "redacted" for name in NO_STORE}
    if (settings := config.kv_transfer_config) is not None:
        kept["kv_transfer_config"] = KVTransferConfig(kv_connector="redacted", kv_role=settings.kv_role)
    return kept


def addresses_of(kv_peers: str) -> list[str]:
    """Return the addresses in the option kv_peers."""
    return [address for part in kv_peers.split(",") if (address := part.strip())]


def make_key_file(path: str) -> None:
    """Write a new key for the names of KV blocks to a new file. Errors: ConfigError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
    except OSError as error:
        raise ConfigError(f"the key cannot be written to {path}: {error.strerror}") from None


def read_key_file(path: str) -> bytes:
    """Return the key in a file of make_key_file(). Errors: ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            found, key = os.fstat(fd), file.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"kv_key_file={path!r} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"kv_key_file={path!r} may be read by other users: chmod 600 {path}")
    if len(key) != KEY_BYTES:
        raise ConfigError(f"kv_key_file={path!r} has no key: make one with `engine-core keys blocks FILE`")
    return key
