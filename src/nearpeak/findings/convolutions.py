"""Kernels of convolutions: conversions between layouts, and the algorithms that cuDNN tries."""

from __future__ import annotations

import re

from nearpeak.findings.step import Step

_CONVERSION = re.compile(r"nchwTo|ToNchw", re.IGNORECASE)
"""In the names of cuDNN's kernels that convert images or weights from one layout to the other."""
_LEAST_KERNELS = 16
"""Kernels of one convolution. With conversions of layouts, one algorithm has at most ten."""
_LEAST_ALGORITHMS = 3
"""Different kernels of one convolution, conversions not counted."""


def is_conversion(kernel: str) -> bool:
    """Whether a kernel converts images or weights from one layout to the other.

    >>> is_conversion("void cudnn::ops::nchwToNhwcKernel<__half>"), is_conversion("sm90_xmma_fprop_implicit_gemm")
    (True, False)
    """
    return _CONVERSION.search(kernel) is not None


def searched_convolutions(step: Step) -> list[int]:
    """The convolutions that ran several algorithms."""
    names: dict[int, list[str]] = {}
    for kernel in step.profile.timeline:
        if kernel.op is not None and step.costs[kernel.op].family == "convolution" and not is_conversion(kernel.name):
            names.setdefault(kernel.op, []).append(kernel.name)
    return [
        index
        for index, kernels in names.items()
        if step.measured[index].kernels >= _LEAST_KERNELS and len(set(kernels)) >= _LEAST_ALGORITHMS
    ]
