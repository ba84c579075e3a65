"""`python -m benchmarks.kernels` runs `benchmarks.kernels.run`."""

from __future__ import annotations

from benchmarks.kernels.run import main

if __name__ == "__main__":
    raise SystemExit(main())
