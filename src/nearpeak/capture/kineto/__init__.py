"""Trace files of torch.profiler as a `Trace` and its measured kernels."""
