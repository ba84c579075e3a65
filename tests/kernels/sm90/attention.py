"""Launches of attention to compile."""

import torch

from nearpeak.kernels.jit import attention_backward, attention_forward


def launches():
    dtype = torch.bfloat16
    for dim in (64, 128):
        for causal in (False, True):
            kind = f"{dim}, {'causal' if causal else 'full'}"
            x = torch.empty(2, 4, 1024, dim, dtype=dtype)
            lse = torch.empty(2, 4, 1024)
            options = (0, 0, -1, 0 if causal else -1, True, dim**-0.5, 0.0, 0.0)
            tensors = (x, x, x, *[None] * 6)
            yield f"forward {kind}", lambda t=tensors, o=options: attention_forward.forward(*t, *o)
            wanted = (True, True, False, False)
            yield (
                f"backward {kind}",
                lambda x=x, lse=lse, t=tensors, o=options, w=wanted: attention_backward.backward(
                    x, None, x, lse, *t, *o, *w
                ),
            )
