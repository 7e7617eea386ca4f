"""`tileweave bench kernels`: our kernels beside every library that a browser offers."""

from backend.bench.kernels.bench import Plan, kernels

__all__ = ["Plan", "kernels"]
