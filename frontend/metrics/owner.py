"""OwnerCollector: what the owner of an engine can report without asking it: its restarts, and the age of its step."""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.engine.death import Cause
from frontend.engine.signs import step_age_s
from frontend.engine.standby_plan import StandbyState
from frontend.engine.supervised_engine import SupervisedEngine


class OwnerCollector(Collector):
    """The metrics of a supervised engine, also while it hangs or is being restarted. They have no model name."""

    def __init__(self, engine: SupervisedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the restarts by cause, the age of the step that runs, and whether there is a standby."""
        restarts = CounterMetricFamily("engine_core_restarts", "Restarts of a dead engine.", labels=("cause",))
        counts = self._engine.supervisor.restarts
        for cause in Cause:
            if cause is not Cause.ENDED:
                restarts.add_metric([cause.name.lower()], counts[cause])
        yield restarts
        age = GaugeMetricFamily(
            "engine_core_step_age_seconds", "Time that the present step has taken; 0 between steps."
        )
        process = self._engine.process
        has_started = process.epoch >= 0  # no black box exists before
        age.add_metric([], step_age_s(process.black_box.read(), time.monotonic_ns()) if has_started else 0.0)
        yield age
        standby = GaugeMetricFamily("engine_core_standby_prepared", "1 while a standby waits to take over.")
        standby.add_metric([], float(self._engine.supervisor.standby.state is StandbyState.PREPARED))
        yield standby
