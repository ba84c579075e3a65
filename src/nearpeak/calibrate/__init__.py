"""Measures a machine: the ceilings that it reaches, and the efficiency of its kernels by kind and size."""
