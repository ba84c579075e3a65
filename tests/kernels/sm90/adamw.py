"""Launches of `adamw_step` to compile."""

import torch

from nearpeak.kernels.optimizer import triton as optimizer_triton

FLOATS = (1.0, 1e-3, 0.9, 0.999, 1e-8, 0.01, False)


def launches():
    def step(param, state, *, master=False, tensors=False, shift=0):
        def call():
            size = 2**22
            one = [torch.empty(size + shift, dtype=param)[shift:]]
            scalar = torch.ones((), dtype=torch.float32)
            moment = [torch.empty(size, dtype=state)]
            masters = [torch.empty(size)] if master else []
            extra = (scalar, scalar, scalar) if tensors else (None, None, None)
            optimizer_triton.adamw_step(one, one, moment, moment, masters, [scalar] if tensors else [], *extra, *FLOATS)

        return call

    yield "bfloat16, states in float32, master weights", step(torch.bfloat16, torch.float32, master=True)
    yield (
        "bfloat16, states in float32, master weights, all on the device",
        step(torch.bfloat16, torch.float32, master=True, tensors=True),
    )
    yield "bfloat16, states in bfloat16", step(torch.bfloat16, torch.bfloat16)
    yield "float32", step(torch.float32, torch.float32)
    yield "float32, not aligned, narrow", step(torch.float32, torch.float32, shift=1)
    yield "table, narrow", lambda: optimizer_triton.write_table(torch.empty(20, dtype=torch.int64), list(range(20)))
