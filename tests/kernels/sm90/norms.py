"""Launches of the norms to compile."""

import torch

from nearpeak.kernels.norms import triton as norms_triton

BF16 = torch.bfloat16


def backward(x, weight, statistics, *, centered, adds, last=False):
    """The launches of a backward pass but for the last, which adds up partial sums, or the last alone."""
    wants = [True, False, True, centered]
    bias, sum_gradient = weight if centered else None, x if adds else None
    launch = norms_triton.launch

    def some(kernel, *args, **settings):
        if (kernel is norms_triton.add_partials) == last:
            launch(kernel, *args, **settings)

    norms_triton.launch = some
    try:
        norms_triton.norm_backward(x, x, sum_gradient, statistics, weight, bias, 0.0, centered, wants)
    finally:
        norms_triton.launch = launch


def launches():
    kinds = [{"centered": centered, "adds": adds} for centered in (False, True) for adds in (False, True)]
    rms, added, centered, both = kinds
    for columns, dtype, also in (
        (128, BF16, []),
        (616, torch.float16, [both]),
        (1024, BF16, []),
        (1536, BF16, [both]),
        (4096, BF16, [added, centered, both]),
        (4096, torch.float32, []),
        (16384, BF16, [added, centered, both]),
        (65536, BF16, [added, centered, both]),
        (262144, BF16, [added, centered, both]),
    ):
        rows = 2**26 // columns  # many: a few rows would be spread over more threads
        x, weight, statistics = (
            torch.empty(rows, columns, dtype=dtype),
            torch.empty(columns, dtype=dtype),
            torch.empty(2, rows),
        )
        name = f"{columns}, {str(dtype).removeprefix('torch.')}"
        if columns < 262144:
            yield f"RMSNorm, {name}", lambda x=x, weight=weight: norms_triton.rms_norm(x, weight, None, 1e-6, 0.0)
            if also:
                yield (
                    f"add, LayerNorm, {name}",
                    lambda x=x, weight=weight: norms_triton.add_layer_norm(x, x, weight, weight, 1e-5),
                )
        for kind in (rms, *also):
            yield (
                f"backward, {name}, {kind}",
                lambda x=x, weight=weight, statistics=statistics, kind=kind: backward(x, weight, statistics, **kind),
            )
    short = torch.empty(1493, 640, dtype=BF16)
    yield "LayerNorm, few rows", lambda: norms_triton.layer_norm(short, short[0], short[0], 1e-5)
    for rows, columns, dtype in ((41, 6096, BF16), (20, 4096, torch.float32), (259, 8192, BF16), (200, 512, BF16)):
        few, statistics_of_few = torch.empty(rows, columns, dtype=dtype), torch.empty(2, rows)
        for kind in (rms, both):
            yield (
                f"backward, {rows} x {columns}, {dtype}, {kind}{', small result' * (columns == 512)}",
                lambda few=few, statistics=statistics_of_few, kind=kind: backward(few, few[0], statistics, **kind),
            )
    # a thread has one of the few numbers that are left
    yield "narrow: the sum of partial sums", lambda: backward(x, weight, statistics, **rms, last=True)
