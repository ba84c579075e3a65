"""Benchmarks, by subject. Run one from the root of a clone: `python -m benchmarks.kernels --help`."""
