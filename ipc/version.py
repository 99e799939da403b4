"""The engine's name and its version. pyproject.toml reads the version from here."""

NAME = "engine-core"
VERSION = "0.1.0"
