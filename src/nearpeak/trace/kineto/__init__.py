"""Trace files of torch.profiler (Kineto) as a `Trace` and its measured kernels."""
