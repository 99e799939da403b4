"""Replay seeds of the fleet's simulator: `python -m tests.simulation.fleet SEED [SEED ...]`."""

import sys

from tests.simulation.fleet.simulation import simulate_fleet


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        world = simulate_fleet(seed, verbose=True)
        print("\n".join(world.log or []))
        print(f"seed {seed} is right: {dict(sorted(world.census.items()))}\n")


if __name__ == "__main__":
    main()
