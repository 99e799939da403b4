"""`--metrics ADDR`: an engine's measurements for Prometheus."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.supervised_engine import SupervisedEngine
from ipc.errors import ConfigError

_HELLO_S = 1.0  # an engine that does not answer counts as down; the next scrape asks again


def measuring(address: str | None) -> dict[str, Any]:
    """Return the engine options that --metrics and --http set. address: of either; None = neither was given."""
    return {} if address is None else {"request_metrics": True}


@contextlib.contextmanager
def served_metrics(
    address: str | None, engine: Callable[[], str], owned: SupervisedEngine | None = None
) -> Iterator[str]:
    """Serve the metrics of the engine at the address that `engine` returns; yield their URL.

    address: HOST:PORT, :PORT or PORT; None = serve nothing, and yield "". Errors: ConfigError without the library,
    AddressError. `engine` may raise EngineCoreError while there is no engine. owned: the same engine, for its owner's
    metrics.
    """
    if address is None:
        yield ""
        return
    try:
        from frontend.metrics.collector import EngineCollector, registry_of
        from frontend.metrics.owner import OwnerCollector
        from frontend.metrics.server import MetricsServer
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("prometheus_client"):
            raise
        raise ConfigError(
            "--metrics needs prometheus_client, which is not installed: pip install prometheus_client, or engine-core "
            "with its extra [metrics]"
        ) from None
    collector = EngineCollector(
        lambda: EngineClient(ZmqTransport(engine()), name="metrics", hello_timeout=_HELLO_S, call_timeout=_HELLO_S)
    )
    owners = [] if owned is None else [OwnerCollector(owned)]
    server = MetricsServer(address, registry_of(collector, *owners))
    try:
        yield server.url
    finally:
        server.close()
        collector.close()
