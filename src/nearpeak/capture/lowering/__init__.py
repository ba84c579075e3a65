"""Ops as the CUDA build of torch runs them, for tensors that are on the CPU."""
