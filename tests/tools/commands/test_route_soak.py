"""10,000 requests through routers and four replicas while replicas, routers and clients are killed: 0 lost, doubled,
different. The default suite plays the same in virtual time (tests/simulation/fleet).

Kept out of `make test` (mark: soak). ENGINE_SOAK_REQUESTS and ENGINE_SOAK_SEED change the counts and the draws. It
prints what it did (pytest -s); tests/tools/soak_route.md has the records.
"""

import os
from pathlib import Path

import pytest

from tests.tools.commands.fleet_site import FleetRun, FleetSite, wait_until

NUM_REQUESTS = int(os.environ.get("ENGINE_SOAK_REQUESTS", "10000"))
SEED = int(os.environ.get("ENGINE_SOAK_SEED", "1"))
_BATCH = 125


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_nothing_is_lost_doubled_or_different(tmp_path: Path) -> None:
    site = FleetSite(tmp_path, 3)
    try:
        run = FleetRun(site, SEED)
        site.restore(with_victim=True)
        while run.num_ended < NUM_REQUESTS:
            run.batch(min(_BATCH, NUM_REQUESTS - run.num_ended))
            print(
                f"{run.num_ended} requests, {run.num_tokens} tokens, killed {run.kills}, wrong {len(run.wrong)}",
                flush=True,
            )
        assert run.wrong == []
        site.kill("client")
        wait_until(lambda: site.num_live() == 0, "the end of what the killed clients have asked")
    finally:
        site.close()
