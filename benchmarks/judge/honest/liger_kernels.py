"""The kernels of Liger, where it is installed."""

import importlib

INPUTS = ("inputs", "float16", "bfloat16")
"""It has no kernels in float64."""


def _liger(module, name):
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def softmax__liger(x):
    return _liger("softmax", "LigerSoftmaxFunction").apply(x)


def rms_norm__liger(x, weight):
    return _liger("rms_norm", "LigerRMSNormFunction").apply(x, weight, 1e-6, 0.0, "llama", False)


def layer_norm__liger(x, weight, bias):
    return _liger("layer_norm", "LigerLayerNormFunction").apply(x, weight, bias, 1e-5)


def swiglu__liger(gate, up):
    return _liger("swiglu", "LigerSiLUMulFunction").apply(gate, up)
