"""Numerical errors of kernels against float64, and loss curves of training with them."""
