"""Packages of the extra `dev` that need torch or are of use only with it: torch alone is gigabytes for each Python."""

LEFT_OUT = frozenset({"accelerate", "torch", "transformers", "triton"})
