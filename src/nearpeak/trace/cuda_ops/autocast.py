"""`torch.autocast("cuda")` for CPU tensors that stand for CUDA tensors.

The lists say what autocast does to which operator, as of torch's aten/src/ATen/autocast_mode.h. The operators are
those of torch 2.13; a release that has no rule for one of them is not given one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from nearpeak.trace.cuda_ops.registry import (
    DispatcherKernel,
    current_target,
    enter_for_trace,
    overload_of,
    register_kernels,
)
from nearpeak.trace.patches.shared_patch import SharedPatch

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
    cudnn_convolution_transpose
""".split()
"""Inputs are cast to the dtype of the autocast."""

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
"""Inputs are cast to float32."""

FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
"""The result is float32 unless the call says otherwise; inputs are not cast."""

FLOAT32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The overload with a dtype is called instead, with float32."""

WIDEST_INPUT = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
"""Inputs are cast to the widest dtype among them."""

UNSAFE = {
    "binary_cross_entropy": "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
    "Use binary_cross_entropy_with_logits or BCEWithLogitsLoss on the values before the sigmoid.",
}
"""Operators that raise, and what they say."""

_Rule = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_AUTOCAST_KEY = "AutocastCPU"
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class _CastCache(threading.local):
    """Casts of parameters, made once per autocast region, with the parameter to keep its id unique."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


_cast_cache = _CastCache()


def use_cuda_autocast_rules() -> None:
    """From here to the end of a trace for a GPU, autocast of CPU tensors follows CUDA's rules."""
    if current_target() is not None:
        enter_for_trace(_cuda_autocast_rules)


def clear_cast_cache() -> None:
    """Ends an autocast region: the next one casts parameters again."""
    _cast_cache.known.clear()


@functools.cache
def _autocast_kernels() -> list[DispatcherKernel]:
    """CUDA's rules for the operators that have one in this torch; operators with a rule for the CPU alone have none."""
    rules: dict[str, _Rule] = {}
    for operators, rule in (
        (LOWER_PRECISION, _lower_precision),
        (FLOAT32, _float32),
        (WIDEST_INPUT, _widest_input),
        (FLOAT32_RESULT, _float32_result),
    ):
        rules.update((operator, functools.partial(rule, overload_of(operator))) for operator in operators)
    for operator, appended in FLOAT32_APPENDED.items():
        rules[operator] = functools.partial(_float32_appended, overload_of(operator), overload_of(appended))
    rules.update((operator, functools.partial(_raise_unsafe, reason)) for operator, reason in UNSAFE.items())
    with_rule = {"cpu": registered_operators("AutocastCPU"), "cuda": registered_operators("AutocastCUDA")}
    kernels = []
    for operator in sorted(with_rule["cpu"] | with_rule["cuda"]):
        overload = overload_of(operator)
        if overload is not None:
            ruled = operator in with_rule["cuda"] and operator in rules
            chosen = rules[operator] if ruled else functools.partial(_unchanged, overload)
            kernels.append(DispatcherKernel(operator, _AUTOCAST_KEY, _autocast_kernel(overload, chosen)))
    return kernels


def registered_operators(key: str) -> set[str]:
    """The operators of aten with a kernel under a key of torch's dispatcher."""
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


_cuda_autocast_rules = SharedPatch(lambda: register_kernels(_autocast_kernels))


def _autocast_kernel(overload: torch._ops.OpOverload, rule: _Rule) -> Callable[..., Any]:
    """The rule on threads that trace for a GPU; torch's own kernel on others."""
    native = _own_kernel(overload) or rule

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return (native if current_target() is None else rule)(args, kwargs)

    return kernel


def _own_kernel(overload: torch._ops.OpOverload) -> _Rule | None:
    """Torch's autocast kernel of an operator on the CPU; None in releases before 2.9, which do not expose it."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), _AUTOCAST_KEY):
        return functools.partial(_unchanged, overload)
    read = getattr(torch.library, "get_kernel", None)
    kernel = None if read is None else read(overload.name(), _AUTOCAST_KEY)
    return None if kernel is None else lambda args, kwargs: kernel.call_boxed(_AUTOCAST_KEYS, *args, **kwargs)


def _is_castable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype) if _is_castable(value) and value.dtype is not dtype else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, dtype) for item in value])
    return value


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A differentiable cast; a parameter is cast once per region."""
    cacheable = (
        dtype is torch.get_autocast_dtype("cpu")
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not cacheable:
        return tensor.to(dtype)
    if id(tensor) not in _cast_cache.known:
        _cast_cache.known[id(tensor)] = (tensor, tensor.to(dtype))
    return _cast_cache.known[id(tensor)][1]


def _call_with_dtype(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    return function(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _lower_precision(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call_with_dtype(function, args, kwargs, torch.get_autocast_dtype("cpu"))


def _float32(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call_with_dtype(function, args, kwargs, torch.float32)


def _widest_input(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [item for value in (*args, *kwargs.values()) for item in _as_list(value) if _is_castable(item)]
    wide = any(value.dtype is torch.float32 for value in values)
    return _call_with_dtype(function, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cpu"))


def _float32_result(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in function._schema.arguments]
    place = names.index("dtype")
    dtype = args[place] if place < len(args) else kwargs.get("dtype")
    if not _is_castable(args[0]) or dtype is not None:
        return function(*args, **kwargs)
    if place < len(args):
        return function(*args[:place], torch.float32, *args[place + 1 :], **kwargs)
    return function(*args, **{**kwargs, "dtype": torch.float32})


def _float32_appended(called: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    left_out = [argument.default_value for argument in called._schema.arguments[len(args) :]]
    return function(*args, *left_out, dtype=torch.float32 if _is_castable(tensor) else tensor.dtype)


def _raise_unsafe(reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(reason)


def _unchanged(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
