"""Every function on tensors without data, meta and fake, with and without autocast: results as of real tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest
import torch
from torch.utils import _pytree as pytree

from nearpeak import fake, kernels

TOKENS, WIDTH, HEADS, SIZE = 16, 32, 2, 16


def floats(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()


def integers(*shape, below):
    return (torch.arange(torch.Size(shape).numel()) % below).view(shape)


def heads():
    return [floats(1, TOKENS, HEADS, SIZE) for _ in range(3)]


def tables():
    return floats(TOKENS, SIZE // 2).detach(), floats(TOKENS, SIZE // 2).detach()


def caches():
    return torch.zeros(2, HEADS, TOKENS, SIZE), torch.zeros(2, HEADS, TOKENS, SIZE)


def decoded():
    return floats(2, HEADS, 1, SIZE).detach()


LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
STARTS = torch.tensor([0, 7, TOKENS], dtype=torch.int32)
COUNTS = torch.tensor([4, 6, 2, 4], dtype=torch.int32)

CALLS = {
    "adamw_step": lambda: (
        tuple([floats(WIDTH).detach()] for _ in range(4)),
        {"step": 1, "lr": 1e-3},
    ),
    "add": lambda: ((floats(TOKENS), floats(TOKENS)), {}),
    "add_layer_norm": lambda: ((floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH)), {}),
    "add_rms_norm": lambda: ((floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(WIDTH)), {}),
    "append": lambda: ((*caches(), decoded(), decoded(), LENGTHS), {}),
    "attention": lambda: (heads(), {"causal": True, "return_lse": True}),
    "attention_fp8": lambda: ([tensor.detach() for tensor in heads()], {"causal": True, "return_lse": True}),
    "attention_packed": lambda: (
        (*(tensor[0].detach().requires_grad_() for tensor in heads()), STARTS, STARTS, 9, 9),
        {"causal": True},
    ),
    "bias_gelu": lambda: ((floats(TOKENS, WIDTH), floats(WIDTH)), {}),
    "bias_relu_squared": lambda: ((floats(TOKENS, WIDTH), floats(WIDTH)), {}),
    "bias_silu": lambda: ((floats(TOKENS, WIDTH), floats(WIDTH)), {}),
    "cross_entropy": lambda: ((floats(TOKENS, WIDTH), integers(TOKENS, below=WIDTH)), {"return_lse": True}),
    "decode_attention": lambda: ((decoded(), *caches(), LENGTHS), {}),
    "dequantize": lambda: (
        (floats(TOKENS, 128).detach().to(torch.float8_e4m3fn), floats(TOKENS, 1).detach()),
        {"block": (1, 128)},
    ),
    "dropout_add": lambda: ((floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), 0.5), {"seed": 3}),
    "geglu": lambda: ((floats(TOKENS, WIDTH), floats(TOKENS, WIDTH)), {}),
    "geglu_packed": lambda: ((floats(TOKENS, WIDTH),), {}),
    "gemm": lambda: ((floats(TOKENS, WIDTH), floats(SIZE, WIDTH)), {"bias": floats(SIZE), "activation": "gelu"}),
    "grouped_gemm": lambda: ((floats(TOKENS, WIDTH), floats(4, SIZE, WIDTH), COUNTS), {}),
    "layer_norm": lambda: ((floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH)), {}),
    "linear_attention": lambda: (heads(), {}),
    "linear_cross_entropy": lambda: (
        (floats(TOKENS, WIDTH), floats(SIZE, WIDTH), integers(TOKENS, below=SIZE)),
        {"bias": floats(SIZE), "return_logprobs": True},
    ),
    "log_softmax": lambda: ((floats(TOKENS, WIDTH),), {}),
    "moe": lambda: (
        (
            *(floats(TOKENS, WIDTH), floats(TOKENS, 2), integers(TOKENS, 2, below=4)),
            *(floats(4, 2 * SIZE, WIDTH), floats(4, WIDTH, SIZE)),
        ),
        {},
    ),
    "permute_tokens": lambda: ((floats(TOKENS, WIDTH), integers(TOKENS, 2, below=4)), {"number_of_experts": 4}),
    "quantize": lambda: ((floats(TOKENS, 128).detach(),), {"block": (1, 128)}),
    "rms_norm": lambda: ((floats(TOKENS, WIDTH), floats(WIDTH)), {}),
    "rotary": lambda: ((heads()[0], *tables()), {}),
    "rotary_pair": lambda: ((*heads()[:2], *tables()), {}),
    "route": lambda: ((floats(TOKENS, 4), 2), {}),
    "row_groups": lambda: ((COUNTS,), {"rows": TOKENS}),
    "scaled_dot_product_attention": lambda: ([floats(1, HEADS, TOKENS, SIZE) for _ in range(3)], {"is_causal": True}),
    "softmax": lambda: ((floats(TOKENS, WIDTH),), {}),
    "sort_tokens": lambda: ((integers(TOKENS, 2, below=4),), {"number_of_experts": 4}),
    "swiglu": lambda: ((floats(TOKENS, WIDTH), floats(TOKENS, WIDTH)), {}),
    "swiglu_packed": lambda: ((floats(TOKENS, WIDTH),), {}),
    "transpose_copy": lambda: ((floats(TOKENS, WIDTH).detach(),), {}),
    "unpermute_tokens": lambda: (
        (floats(2 * TOKENS, WIDTH), integers(TOKENS, 2, below=2 * TOKENS), floats(TOKENS, 2)),
        {},
    ),
}


NOT_CAST = {"attention", "attention_fp8", "attention_packed", "linear_attention", "scaled_dot_product_attention"}
"""Functions whose kernel takes its arguments as they are, also inside autocast."""


def test_every_public_function_is_called():
    functions = {name for name in kernels.__all__ if hasattr(getattr(kernels, name), "why_not")}
    assert functions <= set(CALLS)
    assert {name for name in CALLS if not inspect.isfunction(getattr(kernels, name))} == set()


def run(name, convert, autocast):
    """Shapes and dtypes of the results and of the gradients of a call, on arguments that `convert` has changed."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, convert, CALLS[name]())
    leaves = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    with autocast():
        results = getattr(kernels, name)(*args, **kwargs)
    tensors = [value for value in pytree.tree_leaves(results) if isinstance(value, torch.Tensor)]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(tensor) for tensor in trained])
    return [
        *((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors),
        *(None if leaf.grad is None else (tuple(leaf.grad.shape), leaf.grad.dtype) for leaf in leaves),
    ]


def on_meta(tensor):
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def as_fake(tensor):
    with fake():
        return torch.empty(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def autocast_on(device, dtype):
    """`torch.autocast`, which does nothing for CUDA where there is none."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


AUTOCASTS = {
    "none": contextlib.nullcontext,
    **{
        f"{device} {str(dtype).removeprefix('torch.')}": functools.partial(autocast_on, device, dtype)
        for device in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float16)
    },
}


def copy(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@functools.cache
def results_of_torch(name, autocast):
    with kernels.using("off"):
        return run(name, copy, AUTOCASTS[autocast])


@pytest.mark.parametrize("autocast", ["none", "cpu bfloat16", "cuda float16"])
@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_the_results_of_real_ones(name, autocast):
    assert run(name, on_meta, AUTOCASTS[autocast]) == results_of_torch(name, "none")  # autocast leaves them alone


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("autocast", ["none", "cpu bfloat16", "cuda bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_the_results_of_real_ones(name, autocast, mode):
    with kernels.using(mode):
        results = run(name, as_fake, AUTOCASTS[autocast])
    uncast = autocast.startswith("cuda") or (mode == "auto" and name in NOT_CAST)
    assert results == results_of_torch(name, "none" if uncast else autocast)
