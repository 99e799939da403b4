"""Replay seeds of the simulator and say what happened: `python -m tests.simulation SEED [SEED ...]`."""

import sys

import msgspec

from tests.simulation.scenario import Scenario, draw
from tests.simulation.simulation import simulate


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        print(f"seed {seed}\n{describe(draw(seed))}")
        world = simulate(seed, verbose=True)  # a failure brings the log with it
        print("\n".join(world.log or []))
        print(f"seed {seed} is right: {dict(sorted(world.census.items()))}\n")


def describe(scenario: Scenario) -> str:
    """Return one line for each decision; structs are shown by the fields that differ from their defaults."""
    lines = []
    for name, value in scenario._asdict().items():
        if name == "config":
            lines.append(f"config: {changed(value)}")
        elif name == "plans":
            for plan in value:
                lines.append(f"{plan._replace(asks=[], actions=[])}")
                lines += [
                    f"  {index}: {ask._replace(params=changed(ask.params))}" for index, ask in enumerate(plan.asks)
                ]
        elif name != "faults":
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def changed(struct: msgspec.Struct) -> dict[str, object]:
    """Return the fields whose values differ from their defaults."""
    default = type(struct)()
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value != getattr(default, name)}


if __name__ == "__main__":
    main()
