"""Engines as Ray actors: `engine_core.ray.deploy(...)` (the extra [ray]); docs/scale_out.md explains it."""

from tools.commands.ray_fleet.fleet import Change, RayFleet, deploy

__all__ = ["Change", "RayFleet", "deploy"]
