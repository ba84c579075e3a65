"""Collectives measured where a job runs: on torch.distributed, against the link, and in the patterns of training.

`world` joins the ranks and reports one that is missing, `collectives` has each operation with its buffers and the check
of its result, `sweep` times them, `patterns` runs training steps, `fit` turns times into latency and bandwidth by size,
and `result` is what was measured, as plain data. `fit` and `result` need no torch.
"""
