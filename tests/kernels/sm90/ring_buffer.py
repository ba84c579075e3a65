"""Launches of the kernels over parts of rows in shared memory to compile."""

from dataclasses import replace

import torch

from nearpeak.kernels._runtime.gluon import runs_on
from nearpeak.kernels._runtime.ring_buffer import RingConfig
from nearpeak.kernels.norms import triton as norms_triton
from nearpeak.kernels.softmax import triton as softmax_triton

BF16 = torch.bfloat16
LONG = RingConfig(width=32768, warps=16)
TWO = RingConfig(width=16384, warps=8, programs=2, where="shared")


def backward(x, weight, statistics, *, centered, adds, config):
    """The launches of a backward pass but for the last, which adds up partial sums."""
    launch = norms_triton.launch

    def all_but_last(kernel, *args, **settings):
        if kernel is not norms_triton.add_partials:
            launch(kernel, *args, **settings)

    norms_triton.launch = all_but_last
    try:
        wants = [True, False, True, centered]
        bias, sum_gradient = weight if centered else None, x if adds else None
        norms_triton.norm_backward(x, x, sum_gradient, statistics, weight, bias, 0.0, centered, wants, config=config)
    finally:
        norms_triton.launch = launch


def launches():
    sizes = [(65536, BF16), (65521, BF16), (50008, BF16), (65536, torch.float32)]
    if not runs_on(torch.device("cpu")):  # another version of Triton: what runs instead
        sizes = sizes[:1]
    for columns, dtype in sizes:
        x, weight = torch.empty(512, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
        statistics = torch.empty(2, 512)
        name = f"{columns}, {str(dtype).removeprefix('torch.')}"
        yield (
            f"LayerNorm, {name}",
            lambda x=x, weight=weight: norms_triton.layer_norm(x, weight, weight, 1e-5, config=LONG),
        )
        yield f"softmax, {name}", lambda x=x: softmax_triton.forward(x, None, 1.0, False, x.dtype, config=LONG)
        if columns % 8 == 0:
            yield (
                f"backward of LayerNorm, {name}",
                lambda x=x, weight=weight, statistics=statistics: backward(
                    x, weight, statistics, centered=True, adds=False, config=TWO
                ),
            )
        yield (
            f"backward of softmax, {name}",
            lambda x=x: softmax_triton.backward(x, x, 1.0, False, x.dtype, config=LONG),
        )
    x, weight = torch.empty(512, 65536, dtype=BF16), torch.empty(65536, dtype=BF16)
    yield "add, RMSNorm", lambda: norms_triton.add_rms_norm(x, x, weight, None, 1e-5, 1.0, config=LONG)
    wide = torch.empty(65536)
    yield (
        "RMSNorm, wide weight",
        lambda: norms_triton.rms_norm(x, wide, None, 1e-5, 0.0, config=replace(LONG, where="shared")),
    )
    yield "log-softmax", lambda: softmax_triton.log_forward(x, None, 0.5, False, BF16, config=LONG)
    yield "backward of log-softmax", lambda: softmax_triton.log_backward(x, x, 0.5, False, BF16, config=LONG)
    yield (
        "backward of RMSNorm after an addition",
        lambda: backward(
            x, weight, torch.empty(1, 512), centered=False, adds=True, config=replace(LONG, where="shared")
        ),
    )
