"""One op, or several, for each row of docs/costs.md: `test_costs_page.py` holds their costs against the page.

Ops are made by hand with the names of torch's own schemas, so that operators of libraries that are not here can be
asked too. A row is named by its first cell.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module  # noqa: F401  # for who makes steps
from pkgutil import iter_modules  # noqa: F401  # for who makes steps
from types import SimpleNamespace
from typing import Any

import torch

from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

SIZES: dict[str, float] = {
    name: float(size) if "." in size else int(size)
    for name, size in re.findall(
        r"(\w+)=([\d.]+)",
        """
        w=2 e=48 l=3            bytes of an element, elements, the length of lists
        m=6 k=10 n=14 b=2       matrices
        t=12 x=4                tokens and experts
        r=5 c=8                 rows and columns
        h=4 g=2 q=7 s=9 d=16 v=8 p=63 u=9       attention
        i=3 o=4 y=8 z=8 f=3 a=22 fast=4.0       convolution
        """,
    )
}
z = SimpleNamespace(**SIZES)

_storages = itertools.count()


def tensor(*shape: int, dtype: str = "bfloat16") -> Tensor:
    """A contiguous tensor with memory of its own."""
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return Tensor(shape=shape, strides=strides, dtype=dtype, storage=next(_storages))


def f32(*shape: int) -> Tensor:
    return tensor(*shape, dtype="float32")


def i64(*shape: int) -> Tensor:
    return tensor(*shape, dtype="int64")


def i32(*shape: int) -> Tensor:
    return tensor(*shape, dtype="int32")


def mask(*shape: int) -> Tensor:
    return tensor(*shape, dtype="bool")


def fp8(*shape: int) -> Tensor:
    return tensor(*shape, dtype="float8_e4m3fn")


def op(name: str, *outputs: Tensor, **arguments: Any) -> Op:
    """An op of this operator; what is not given has its default, or is None. A name that torch does not know fails.

    `input_` is the argument `input`. Another torch than the one that the rows are written for may lack an operator.
    """
    given = {"input" if argument == "input_" else argument: value for argument, value in arguments.items()}
    schema = _schema(name, set(given))
    packet = ".".join(name.split(".")[:2])
    if schema is None:
        return Op(name=f"{packet}.default", arguments=given, outputs=outputs)
    defaults = {one.name: one.default_value if one.has_default_value() else None for one in schema.arguments}
    mutated = tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    overload = schema.overload_name or "default"
    return Op(name=f"{packet}.{overload}", arguments={**defaults, **given}, outputs=outputs, mutated=mutated)


def _schema(name: str, asked: set[str]) -> Any:
    namespace, operator, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is not None:
        names = overload or sorted(packet.overloads(), key=lambda one: (one != "default", "out" in one))
        for one in names:
            schema = getattr(packet, one)._schema
            if asked <= {argument.name for argument in schema.arguments}:
                return schema
    assert not torch.__version__.startswith("2.13"), f"{name} has no overload with the arguments {sorted(asked)}"
    return None


def register_operators() -> None:
    """Imports what defines the operators that torch does not have from the start."""
    import torch.ao.quantization.fx._decomposed
    import torch.distributed._functional_collectives  # noqa: F401

    import nearpeak.kernels  # noqa: F401  (fills FAMILIES)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The ops of a row, and sizes that are others than usual in it."""

    ops: tuple[Op, ...]
    sizes: dict[str, float] = field(default_factory=dict)


def rows() -> Iterator[tuple[str, Row]]:
    """All rows by their first cells, without the backticks. A row may come with several sizes."""
    register_operators()
    for part in (
        *(products, attention, layers, convolutions, norms, pointwise, reductions, losses, indexing, scattering),
        *(movement, creation, pooling, fourier, linear_algebra, sorting, random, recurrent, optimizers, quantization),
        *(collectives, own_streaming, own_products, own_attention),
    ):
        for name, *given in part():
            sizes = given[0] if isinstance(given[0], dict) else {}
            yield name, Row(ops=tuple(one for one in given if isinstance(one, Op)), sizes=sizes)


Rows = Iterator[tuple[Any, ...]]


def products() -> Rows:
    left, right = tensor(z.m, z.k), tensor(z.k, z.n)
    lefts, rights = tensor(z.b, z.m, z.k), tensor(z.b, z.k, z.n)
    out, outs = tensor(z.m, z.n), tensor(z.b, z.m, z.n)
    yield (
        "aten.mm, aten.matmul",
        op("aten.mm", out, self=left, mat2=right),
        op("aten.matmul", out, self=left, other=right),
    )
    yield "aten.bmm", op("aten.bmm", outs, self=lefts, mat2=rights)
    yield "aten.linear", op("aten.linear", out, input_=left, weight=tensor(z.n, z.k), bias=tensor(z.n))
    yield "aten.addmm", op("aten.addmm", out, self=tensor(z.n), mat1=left, mat2=right)
    yield "aten.addmm with beta=0", op("aten.addmm", out, self=tensor(z.n), mat1=left, mat2=right, beta=0)
    yield "aten._addmm_activation", op("aten._addmm_activation", out, self=tensor(z.n), mat1=left, mat2=right)
    yield "aten.baddbmm", op("aten.baddbmm", outs, self=outs, batch1=lefts, batch2=rights)
    yield "aten.addbmm", op("aten.addbmm", out, self=tensor(z.m, z.n), batch1=lefts, batch2=rights)
    yield "aten.mv", op("aten.mv", tensor(z.m), self=left, vec=tensor(z.k))
    yield "aten.addmv", op("aten.addmv", tensor(z.m), self=tensor(z.m), mat=left, vec=tensor(z.k))
    ends = tensor(z.k), tensor(z.k)
    yield (
        "aten.dot, aten.vdot",
        op("aten.dot", tensor(), self=ends[0], tensor=ends[1]),
        op("aten.vdot", tensor(), self=ends[0], other=ends[1]),
    )
    yield "aten.addr", op("aten.addr", out, self=tensor(z.m, z.n), vec1=tensor(z.m), vec2=tensor(z.n))
    eight = fp8(z.m, z.k), fp8(z.k, z.n)
    yield "aten._scaled_mm", op("aten._scaled_mm", out, self=eight[0], mat2=eight[1], scale_a=f32(1), scale_b=f32(1))
    tokens, experts, ends_of = tensor(z.t, z.k), tensor(z.x, z.k, z.n), i32(z.x)
    yield "aten._grouped_mm", op("aten._grouped_mm", tensor(z.t, z.n), self=tokens, mat2=experts, offs=ends_of)
    lists = [tuple(tensor(*shape) for _ in range(z.l)) for shape in ((z.m, z.k), (z.k, z.n), (z.m, z.n))]
    yield "aten._foreach_mm", op("aten._foreach_mm", *lists[2], self=lists[0], mat2=lists[1])
    three = {name: tensor(z.e) for name in ("i1", "i2", "i3")}
    yield "aten._trilinear", op("aten._trilinear", tensor(z.e), **three)
    half, places = tensor(z.m, z.k // 2), tensor(z.e, dtype="int16")
    compressed = op("aten._cslt_sparse_mm", out, compressed_A=tensor(z.e), dense_B=right)
    yield "aten._cslt_sparse_mm", compressed
    in_parts = op("aten._sparse_semi_structured_mm", out, mat1=half, mat1_meta=places, mat2=right)
    yield "aten._sparse_semi_structured_mm", in_parts
    sparse = {"weight": tensor(z.n, z.k // 2), "meta": places}
    yield "aten._sparse_semi_structured_linear", op("aten._sparse_semi_structured_linear", out, input_=left, **sparse)
    yield "aten._cslt_compress", op("aten._cslt_compress", tensor(z.e), input_=left)


def attention() -> Rows:
    full = {"p": z.q * z.s, "u": z.s}
    top_left = {"p": z.q * (z.q + 1) // 2, "u": z.q}
    bottom_right = {"p": z.q * (z.s - z.q) + z.q * (z.q + 1) // 2, "u": z.s}

    def given(heads_first: bool) -> dict[str, Tensor]:
        shapes = {"query": (z.h, z.q, z.d), "key": (z.g, z.s, z.d), "value": (z.g, z.s, z.v)}
        ordered = {name: (shape if heads_first else (shape[1], shape[0], shape[2])) for name, shape in shapes.items()}
        return {name: tensor(z.b, *shape) for name, shape in ordered.items()}

    def made(name: str, *, heads_first: bool = True, **options: Any) -> Op:
        result = tensor(z.b, *((z.h, z.q) if heads_first else (z.q, z.h)), z.v)
        rest = (i64(1),) * 2
        return op(f"aten.{name}", result, f32(z.b, z.h, z.q), *rest, **given(heads_first), **options)

    def back(name: str, *, heads_first: bool = True, grad: str = "grad_out", **options: Any) -> Op:
        tensors = given(heads_first)
        result = tensor(z.b, *((z.h, z.q) if heads_first else (z.q, z.h)), z.v)
        tensors |= {grad: tensor(*result.shape), "out": result, "logsumexp": f32(z.b, z.h, z.q)}
        gradients = [tensor(*tensors[one].shape) for one in ("query", "key", "value")]
        return op(f"aten.{name}", *gradients, **tensors, **options)

    for causal, sizes in ((False, full), (True, top_left)):
        yield (
            "aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention, "
            "aten._cudnn_attention_forward",
            sizes,
            made("_scaled_dot_product_flash_attention", is_causal=causal),
            made("_scaled_dot_product_efficient_attention", is_causal=causal, compute_log_sumexp=True),
            made("_cudnn_attention_forward", is_causal=causal, compute_log_sumexp=True),
        )
        wanted = (True, True, True, False)
        yield (
            "aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_efficient_attention_backward, "
            "aten._scaled_dot_product_fused_attention_overrideable_backward, aten._cudnn_attention_backward",
            sizes,
            back("_scaled_dot_product_flash_attention_backward", is_causal=causal),
            back(
                "_scaled_dot_product_efficient_attention_backward",
                grad="grad_out_",
                is_causal=causal,
                grad_input_mask=wanted,
            ),
            back("_scaled_dot_product_fused_attention_overrideable_backward", is_causal=causal, grad_input_mask=wanted),
            back("_cudnn_attention_backward", is_causal=causal),
        )
        inputs = given(True)
        whole = op("aten.scaled_dot_product_attention", tensor(z.b, z.h, z.q, z.v), **inputs, is_causal=causal)
        yield "aten.scaled_dot_product_attention", sizes, whole
    for causal, sizes in ((False, full), (True, bottom_right)):
        kind = {"custom_mask_type": 2 if causal else 0}
        yield (
            "aten._flash_attention_forward, aten._efficient_attention_forward",
            sizes,
            made("_flash_attention_forward", heads_first=False, is_causal=causal),
            made("_efficient_attention_forward", heads_first=False, compute_log_sumexp=True, **kind),
        )
        kind["bias_requires_grad"] = False
        yield (
            "aten._flash_attention_backward, aten._efficient_attention_backward",
            sizes,
            back("_flash_attention_backward", heads_first=False, is_causal=causal),
            back("_efficient_attention_backward", grad="grad_out_", heads_first=False, **kind),
        )
    arguments = {str(place): one for place, one in enumerate(given(True).values())}
    flex = "higher_order.flex_attention"
    result, statistics = tensor(z.b, z.h, z.q, z.v), f32(z.b, z.h, z.q)
    yield flex, Op(name=f"{flex}.default", arguments=arguments, outputs=(result, statistics))
    backward = [*given(True).values(), result, statistics, tensor(z.b, z.h, z.q, z.v)]
    gradients = tuple(tensor(*one.shape) for one in backward[:3])
    places = {str(place): one for place, one in enumerate(backward)}
    yield f"{flex}_backward", Op(name=f"{flex}_backward.default", arguments=places, outputs=gradients)


def layers() -> Rows:
    tokens = tensor(z.b, z.q, z.d)
    own = {
        "qkv_weight": tensor(3 * z.d, z.d),
        "qkv_bias": tensor(3 * z.d),
        "proj_weight": tensor(z.d, z.d),
        "proj_bias": tensor(z.d),
    }
    yield (
        "aten._native_multi_head_attention",
        op(
            "aten._native_multi_head_attention",
            tensor(z.b, z.q, z.d),
            tensor(z.b, z.q, z.q),
            **{"query": tokens, "key": tokens, "value": tokens, "embed_dim": z.d, "num_head": z.h, **own},
            need_weights=False,
        ),
    )
    norms = {f"norm_{part}_{number}": tensor(z.d) for part in ("weight", "bias") for number in (1, 2)}
    wide = {
        "ffn_weight_1": tensor(z.n, z.d),
        "ffn_bias_1": tensor(z.n),
        "ffn_weight_2": tensor(z.d, z.n),
        "ffn_bias_2": tensor(z.d),
    }
    yield (
        "aten._transformer_encoder_layer_fwd",
        op(
            "aten._transformer_encoder_layer_fwd",
            tensor(z.b, z.q, z.d),
            **{"src": tokens, "embed_dim": z.d, "num_heads": z.h, **own, **norms, **wide},
        ),
    )


def convolutions() -> Rows:
    image, weight, bias = tensor(z.b, z.i, z.y, z.y), tensor(z.o, z.i, z.f, z.f), tensor(z.o)
    out = tensor(z.b, z.o, z.z, z.z)
    how = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    whole = {"input_": image, "weight": weight, "bias": bias, **how}
    library = {"self": image, "weight": weight, **how, "groups": 1}
    yield (
        "aten.convolution, aten.conv2d",
        op("aten.convolution", out, transposed=False, groups=1, **whole),
        op("aten.conv2d", out, **whole),
    )
    other = {**whole, "weight": tensor(z.i, z.o, z.f, z.f)}
    transposed = {**library, "weight": tensor(z.i, z.o, z.f, z.f)}
    yield "aten.cudnn_convolution", op("aten.cudnn_convolution", out, **library, allow_tf32=True)
    yield "aten.conv_transpose2d", op("aten.conv_transpose2d.input", out, **other)
    yield (
        "aten.cudnn_convolution_transpose",
        op("aten.cudnn_convolution_transpose", out, **transposed, allow_tf32=True),
    )
    yield "aten.cudnn_convolution_relu", op("aten.cudnn_convolution_relu", out, **library, bias=bias)
    added = {"z": tensor(*out.shape), "bias": bias}
    yield "aten.cudnn_convolution_add_relu", op("aten.cudnn_convolution_add_relu", out, **library, **added)
    line = {"self": tensor(z.y, z.b, z.i), "weight": tensor(z.f, z.i, z.o), "bias": bias, "pad": 1}
    yield "aten.conv_tbc", {"fast": 1.0}, op("aten.conv_tbc", tensor(z.z, z.b, z.o), **line)
    gradient = tensor(*out.shape)
    gradients = tensor(*image.shape), tensor(*weight.shape), tensor(*bias.shape)
    backward = {"grad_output": gradient, "weight": weight, "output_mask": (True, True, True), **how}
    slow = {"grad_output": gradient, "self": image, "weight": weight, "output_mask": (True, True, True)}
    yield (
        "aten.convolution_backward, aten._slow_conv2d_backward",
        op("aten.convolution_backward", *gradients, input_=image, transposed=False, groups=1, **backward),
        op("aten._slow_conv2d_backward.output_mask", *gradients, **slow, stride=(1, 1), padding=(1, 1)),
    )


def norms() -> Rows:
    x, y, weight, bias = tensor(z.r, z.c), tensor(z.r, z.c), tensor(z.c), tensor(z.c)
    yield "aten._softmax, aten._log_softmax", op("aten._softmax", tensor(z.r, z.c), self=x, dim=1)
    yield "aten._softmax_backward_data", op("aten._softmax_backward_data", tensor(z.r, z.c), grad_output=x, output=y)
    mean, deviation = f32(z.r, 1), f32(z.r, 1)
    yield (
        "aten.native_layer_norm",
        op("aten.native_layer_norm", tensor(z.r, z.c), mean, deviation, input_=x, weight=weight, bias=bias),
    )
    yield "aten._fused_rms_norm", op("aten._fused_rms_norm", tensor(z.r, z.c), deviation, input_=x, weight=weight)
    everything = {"output_mask": (True, True, True)}
    given = {"grad_out": y, "input_": x, "mean": mean, "rstd": deviation, "weight": weight, "bias": bias}
    gradients = tensor(z.r, z.c), tensor(z.c), tensor(z.c)
    yield (
        "aten.native_layer_norm_backward",
        op("aten.native_layer_norm_backward", *gradients, **given, **everything),
    )
    learnt = {"weight": f32(z.c), "bias": f32(z.c)}
    running = {"running_mean": f32(z.c), "running_var": f32(z.c)}
    saved = f32(z.c), f32(z.c)
    trained = op("aten.native_batch_norm", tensor(z.r, z.c), *saved, input_=x, **learnt, **running, training=True)
    yield "aten.native_batch_norm, training", trained
    yield (
        "aten.native_batch_norm, inference",
        op("aten.native_batch_norm", tensor(z.r, z.c), f32(0), f32(0), input_=x, **learnt, **running, training=False),
    )
    statistics = {"save_mean": saved[0], "save_invstd": saved[1]}
    gradients = tensor(z.r, z.c), f32(z.c), f32(z.c)
    backward = {"input_": x, "weight": learnt["weight"], **running}
    yield (
        "aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward",
        op(
            "aten.native_batch_norm_backward",
            *gradients,
            grad_out=y,
            **backward,
            **statistics,
            train=True,
            **everything,
        ),
        op(
            "aten.cudnn_batch_norm_backward",
            *gradients,
            grad_output=y,
            **backward,
            save_mean=saved[0],
            save_var=saved[1],
        ),
    )
    yield "aten.batch_norm_stats", op("aten.batch_norm_stats", *saved, input_=x)
    yield "aten.batch_norm_update_stats", op("aten.batch_norm_update_stats", *saved, input_=x, **running)
    ranks = {"mean": f32(z.l, z.c), "invstd": f32(z.l, z.c)}
    yield "aten.batch_norm_gather_stats", op("aten.batch_norm_gather_stats", *saved, input_=x, **ranks, **running)
    found = {"mean": saved[0], "invstd": saved[1]}
    yield "aten.batch_norm_elemt", op("aten.batch_norm_elemt", tensor(z.r, z.c), input_=x, **learnt, **found)
    sums = tuple(f32(z.c) for _ in range(4))
    given = {"grad_out": y, "input_": x, **found, "weight": learnt["weight"]}
    yield "aten.batch_norm_backward_reduce", op("aten.batch_norm_backward_reduce", *sums, **given)
    elements = {**given, "sum_dy": sums[0], "sum_dy_xmu": sums[1], "count": i32(z.l)}
    yield "aten.batch_norm_backward_elemt", op("aten.batch_norm_backward_elemt", tensor(z.r, z.c), **elements)
    yield "aten.renorm", op("aten.renorm", tensor(z.r, z.c), self=x, p=2, dim=0, maxnorm=1)
    size, lengths = tensor(z.r, 1), f32(z.r, 1)
    yield "aten._weight_norm_interface", op("aten._weight_norm_interface", tensor(z.r, z.c), lengths, v=x, g=size)
    backward = {"grad_w": y, "saved_v": x, "saved_g": size, "saved_norms": lengths}
    yield (
        "aten._weight_norm_interface_backward",
        op("aten._weight_norm_interface_backward", tensor(z.r, z.c), tensor(z.r, 1), **backward),
    )


def pointwise() -> Rows:
    x, y = tensor(z.e), tensor(z.e)
    yield "aten.exp, aten.gelu, aten.silu and others of one tensor", op("aten.exp", tensor(z.e), self=x)
    yield "aten.add, aten.mul, aten.div and others of two", op("aten.add", tensor(z.e), self=x, other=y)
    yield "aten.add_ and others in place", op("aten.add_", x, self=x, other=y)
    table, row = tensor(z.r, z.c), tensor(z.c)
    yield "aten.mul by a row", op("aten.mul", tensor(z.r, z.c), self=table, other=row)
    yield "aten.abs, aten.neg and others without arithmetic", op("aten.abs", tensor(z.e), self=x)
    yield "aten.clamp_, aten.nan_to_num_", op("aten.clamp_", x, self=x)
    yield "aten.where", op("aten.where", tensor(z.e), condition=mask(z.e), self=x, other=y)
    yield "aten.masked_fill", op("aten.masked_fill", tensor(z.e), self=x, mask=mask(z.e), value=0.0)
    yield "aten.masked_fill_", op("aten.masked_fill_", x, self=x, mask=mask(z.e), value=0.0)


def reductions() -> Rows:
    x = tensor(z.r, z.c)
    yield "aten.sum, aten.mean, aten.amax by row", op("aten.sum.dim_IntList", tensor(z.r), self=x, dim=(1,))
    yield "aten.max.dim", op("aten.max.dim", tensor(z.r), i64(z.r), self=x, dim=1)
    yield "aten.argmax", op("aten.argmax", i64(z.r), self=x, dim=1)
    yield "aten.var_mean", op("aten.var_mean.correction", tensor(z.r), tensor(z.r), self=x, dim=(1,))
    yield "aten.trace", op("aten.trace", tensor(), self=tensor(z.m, z.n))
    many = tuple(tensor(z.e) for _ in range(z.l))
    yield "aten._foreach_norm", op("aten._foreach_norm", *(tensor() for _ in many), self=many, ord=2)
    data, lengths = tensor(z.e), i64(z.b)
    yield "aten.segment_reduce", op("aten.segment_reduce", tensor(z.b), data=data, lengths=lengths)
    given = {"grad": tensor(z.b), "output": tensor(z.b), "data": data, "lengths": lengths}
    yield "aten._segment_reduce_backward", op("aten._segment_reduce_backward", tensor(z.e), **given)


def losses() -> Rows:
    x, y = tensor(z.e), tensor(z.e)
    yield "aten.mse_loss, aten.huber_loss, aten.kl_div", op("aten.mse_loss", tensor(), self=x, target=y)
    yield (
        "aten.mse_loss_backward",
        op("aten.mse_loss_backward", tensor(z.e), grad_output=tensor(), self=x, target=y),
    )
    scores, target = tensor(z.r, z.c), i64(z.r)
    yield "aten.nll_loss_forward", op("aten.nll_loss_forward", tensor(), tensor(), self=scores, target=target)
    yield (
        "aten.nll_loss_backward",
        op("aten.nll_loss_backward", tensor(z.r, z.c), grad_output=tensor(), self=scores, target=target),
    )
    yield "aten.cross_entropy_loss", op("aten.cross_entropy_loss", tensor(), self=scores, target=target)
    yield "aten.multi_margin_loss", op("aten.multi_margin_loss", tensor(), self=scores, target=target)
    marks = tensor(z.r, z.c)
    labels = {"self": scores, "target": i64(z.r, z.c)}
    yield "aten.multilabel_margin_loss_forward", op("aten.multilabel_margin_loss_forward", tensor(), marks, **labels)
    lengths = {"input_lengths": (z.q,) * z.b, "target_lengths": (z.s,) * z.b}
    table = tensor(z.b, z.q, 2 * z.s + 1)
    given = {"log_probs": tensor(z.q, z.b, z.c), "targets": i64(z.b, z.s), **lengths}
    yield "aten._ctc_loss", op("aten._ctc_loss", tensor(z.b), table, **given)


def indexing() -> Rows:
    table, indices, out = tensor(z.n, z.c), i64(z.t), tensor(z.t, z.c)
    yield "aten.embedding", op("aten.embedding", out, weight=table, indices=indices)
    dense = {"grad_output": out, "indices": indices, "num_weights": z.n, "padding_idx": -1}
    yield "aten.embedding_dense_backward", op("aten.embedding_dense_backward", tensor(z.n, z.c), **dense)
    yield "aten.embedding_renorm_", op("aten.embedding_renorm_", table, self=table, indices=indices)
    yield "aten.embedding_renorm", op("aten.embedding_renorm", tensor(z.n, z.c), self=table, indices=indices)
    bags, offsets = tensor(z.b, z.c), i64(z.b)
    rest = i64(z.t), i64(z.b), i64(z.b)
    yield "aten._embedding_bag", op("aten._embedding_bag", bags, *rest, weight=table, indices=indices, offsets=offsets)
    yield (
        "aten._embedding_bag_dense_backward",
        op("aten._embedding_bag_dense_backward", tensor(z.n, z.c), grad=bags, indices=indices, num_weights=z.n),
    )
    yield "aten.index_select", op("aten.index_select", out, self=table, dim=0, index=indices)
    places = i64(z.r, z.l)
    yield "aten.gather along a row", op("aten.gather", tensor(z.r, z.l), self=tensor(z.r, z.c), dim=1, index=places)
    yield "aten.take", op("aten.take", tensor(z.t), self=table, index=indices)
    yield "aten.index by numbers", op("aten.index.Tensor", out, self=table, indices=(indices,))
    yield "aten.index by a mask", op("aten.index.Tensor", out, self=table, indices=(mask(z.n),))
    x, chosen = tensor(z.e), mask(z.e)
    yield "aten._unsafe_masked_index", op("aten._unsafe_masked_index", tensor(z.e), self=x, mask=chosen)
    yield "aten.masked_select", op("aten.masked_select", tensor(z.t), self=x, mask=chosen)
    yield "aten.nonzero", op("aten.nonzero", i64(z.t, 1), self=x)


def scattering() -> Rows:
    x, places, values = tensor(z.r, z.c), i64(z.r, z.l), tensor(z.r, z.l)
    yield "aten.scatter_add_ along a row", op("aten.scatter_add_", x, self=x, dim=1, index=places, src=values)
    yield "aten.scatter along a row", op("aten.scatter.src", tensor(z.r, z.c), self=x, dim=1, index=places, src=values)
    table, indices, new = tensor(z.n, z.c), i64(z.t), tensor(z.t, z.c)
    given = {"self": table, "dim": 0, "index": indices}
    yield "aten.index_add_", op("aten.index_add_", table, **given, source=new)
    yield "aten.index_copy_", op("aten.index_copy_", table, **given, source=new)
    yield "aten.index_fill_", op("aten.index_fill_.int_Scalar", table, **given, value=0)
    put = {"self": table, "indices": (indices,), "values": new}
    yield "aten.index_put_", op("aten.index_put_", table, **put, accumulate=False)
    yield "aten.index_put_ with accumulate=True", op("aten.index_put_", table, **put, accumulate=True)
    yield "aten.put_", op("aten.put_", table, self=table, index=indices, source=tensor(z.t))
    flat, chosen = tensor(z.e), mask(z.e)
    name = "aten._unsafe_masked_index_put_accumulate"
    yield name, op(name, tensor(z.e), self=flat, mask=chosen, values=tensor(z.e))
    yield "aten.masked_scatter", op("aten.masked_scatter", tensor(z.e), self=flat, mask=chosen, source=tensor(z.e))
    yield "aten.masked_scatter_", op("aten.masked_scatter_", flat, self=flat, mask=chosen, source=tensor(z.e))
    gradient = op("aten.masked_scatter_backward", tensor(z.t), grad_output=flat, mask=chosen, sizes=(z.t,))
    yield "aten.masked_scatter_backward", gradient
    yield "aten.slice_scatter, aten.select_scatter", op("aten.slice_scatter", tensor(z.n, z.c), self=table, src=new)


def movement() -> Rows:
    x = tensor(z.e)
    yield "aten.clone, aten.flip, aten.permute_copy", op("aten.clone", tensor(z.e), self=x)
    yield "aten._to_copy to float32", op("aten._to_copy", f32(z.e), self=x)
    yield "aten.copy_", op("aten.copy_", x, self=x, src=tensor(z.e))
    yield "aten._copy_from", op("aten._copy_from", x, self=tensor(z.e), dst=x)
    narrow = {"self": x, "size": (z.r,), "stride": (2,)}
    yield "aten.as_strided_copy", op("aten.as_strided_copy", tensor(z.r), **narrow)
    windows = {"self": x, "dimension": 0, "size": z.f, "step": 1}
    yield "aten.unfold_copy", op("aten.unfold_copy", tensor(z.e - z.f + 1, z.f), **windows)
    yield (
        "aten.unfold_backward",
        op("aten.unfold_backward", tensor(z.e), grad_in=tensor(z.e - z.f + 1, z.f), input_sizes=(z.e,)),
    )
    many = tuple(tensor(z.e) for _ in range(z.l))
    yield "aten.cat, aten.stack", op("aten.cat", tensor(z.l * z.e), tensors=many)
    yield "aten.repeat_interleave", op("aten.repeat_interleave.self_int", tensor(z.l * z.e), self=x, repeats=z.l)
    counts = op("aten.repeat_interleave.Tensor", i64(z.t), repeats=i64(z.r))
    yield "aten.repeat_interleave.Tensor", counts
    yield "aten.constant_pad_nd, aten.reflection_pad1d", op("aten.constant_pad_nd", tensor(z.e + 2), self=x, pad=(1, 1))
    table, part = tensor(z.n, z.c), tensor(z.t, z.c)
    yield "aten.slice_backward, aten.select_backward", op("aten.slice_backward", table, grad_output=part)
    square = tensor(z.n, z.n)
    yield "aten.tril, aten.triu", op("aten.tril", tensor(z.n, z.n), self=square)
    yield "aten.tril_", op("aten.tril_", square, self=square)
    image, columns = tensor(z.b, z.i, z.y, z.y), tensor(z.b, z.i * z.f * z.f, (z.y - z.f + 1) ** 2)
    how = {"kernel_size": (z.f, z.f), "dilation": (1, 1), "padding": (0, 0), "stride": (1, 1)}
    yield "aten.im2col without padding", op("aten.im2col", columns, self=image, **how)
    yield "aten.col2im without padding", op("aten.col2im", image, self=columns, output_size=(z.y, z.y), **how)
    yield "aten.item, aten._local_scalar_dense", op("aten.item", self=tensor())
    yield "aten._pack_padded_sequence", op("aten._pack_padded_sequence", part, i64(z.r), input_=tensor(z.r, z.n, z.c))
    yield (
        "aten.equal, aten.allclose",
        op("aten.equal", self=x, other=tensor(z.e)),
        op("aten.allclose", self=x, other=tensor(z.e)),
    )
    jagged = {"values": part, "offsets": (i64(z.r),), "max_lengths": (z.n,)}
    name = "aten._jagged_to_padded_dense_forward"
    yield name, op(name, tensor(z.r, z.n, z.c), **jagged)
    yield "aten.contiguous, aten.reshape, aten.to where they copy", op("aten.contiguous", tensor(z.e), self=x)
    view = op("aten.view", Tensor(shape=(z.e,), strides=(1,), dtype=x.dtype, storage=x.storage), self=x, size=(z.e,))
    yield "aten.view, aten.transpose, aten.expand, aten.slice, aten.detach", view


def creation() -> Rows:
    yield "aten.empty, aten.empty_like", op("aten.empty.memory_format", tensor(z.e), size=(z.e,))
    yield "aten.zeros, aten.ones_like, aten.arange, aten.zero_", op("aten.zeros", tensor(z.e), size=(z.e,))
    x, matrix = tensor(z.e), tensor(z.m, z.n)
    yield "aten.fill_", op("aten.fill_.Scalar", x, self=x, value=1.0)
    yield "aten.fill_diagonal_", op("aten.fill_diagonal_", matrix, self=matrix, fill_value=1.0)


def pooling() -> Rows:
    half = z.y // 2
    image, small = tensor(z.b, z.i, z.y, z.y), tensor(z.b, z.i, half, half)
    places, size = i64(*small.shape), {"output_size": (half, half)}
    sizes = {"z": half}
    window = {"self": image, "kernel_size": (2, 2), "stride": (2, 2)}
    yield "aten.max_pool2d_with_indices", sizes, op("aten.max_pool2d_with_indices", small, places, **window)
    yield "aten.avg_pool2d", sizes, op("aten.avg_pool2d", small, **window)
    yield "aten._adaptive_avg_pool2d", sizes, op("aten._adaptive_avg_pool2d", small, self=image, **size)
    back = {"grad_output": small, "self": image, "indices": places}
    yield (
        "aten.max_pool2d_with_indices_backward",
        sizes,
        op("aten.max_pool2d_with_indices_backward", tensor(*image.shape), **back, kernel_size=(2, 2)),
    )
    samples = {"random_samples": f32(z.b, z.i, 2), "kernel_size": (2, 2), **size}
    yield "aten.fractional_max_pool2d", sizes, op("aten.fractional_max_pool2d", small, places, self=image, **samples)
    yield "aten.max_unpool2d", sizes, op("aten.max_unpool2d", image, self=small, indices=places)
    large = {"output_size": (z.y, z.y)}
    yield "aten.upsample_nearest2d to a larger image", sizes, op("aten.upsample_nearest2d", image, self=small, **large)
    yield "aten.upsample_nearest2d to a smaller image", sizes, op("aten.upsample_nearest2d", small, self=image, **size)
    yield "aten.upsample_bilinear2d", sizes, op("aten.upsample_bilinear2d", image, self=small, **large)
    yield "aten._upsample_bilinear2d_aa", sizes, op("aten._upsample_bilinear2d_aa", small, self=image, **size)
    yield (
        "aten.upsample_nearest2d_backward",
        sizes,
        op("aten.upsample_nearest2d_backward", small, grad_output=image, **large),
    )
    grid = tensor(z.b, half, half, 2)
    yield "aten.affine_grid_generator", sizes, op("aten.affine_grid_generator", grid, theta=tensor(z.b, 2, 3))
    yield "aten.grid_sampler_2d", sizes, op("aten.grid_sampler_2d", small, input_=image, grid=grid)
    gradients = tensor(*image.shape), tensor(*grid.shape)
    sampled = {"grad_output": small, "input_": image, "grid": grid, "output_mask": (True, True)}
    yield "aten.grid_sampler_2d_backward", sizes, op("aten.grid_sampler_2d_backward", *gradients, **sampled)


def fourier() -> Rows:
    signal, full = f32(z.b, z.e), tensor(z.b, z.e, dtype="complex64")
    half = tensor(z.b, z.e // 2 + 1, dtype="complex64")
    other = tensor(z.b, z.e, dtype="complex64")
    yield "aten._fft_c2c, complex64", op("aten._fft_c2c", other, self=full, dim=(1,))
    yield "aten._fft_r2c, float32", op("aten._fft_r2c", half, self=signal, dim=(1,), onesided=True)
    yield "aten._fft_c2r, float32", op("aten._fft_c2r", signal, self=half, dim=(1,), last_dim_size=z.e)


def linear_algebra() -> Rows:
    square, tall, right = tensor(z.n, z.n), tensor(z.n, z.k), tensor(z.n, z.r)
    out = tensor(z.n, z.n)
    info = i32()
    yield "aten.linalg_cholesky_ex", op("aten.linalg_cholesky_ex", out, info, self=square)
    yield "aten.cholesky_inverse", op("aten.cholesky_inverse", out, self=square)
    solved = tensor(z.n, z.r)
    yield "aten.cholesky_solve", op("aten.cholesky_solve", solved, self=right, input2=square)
    pivots = i32(z.n)
    yield "aten.linalg_lu_factor_ex", op("aten.linalg_lu_factor_ex", out, pivots, info, A=square)
    yield "aten.linalg_lu_solve", op("aten.linalg_lu_solve", solved, LU=square, pivots=pivots, B=right)
    solve = tensor(z.n, z.r), tensor(z.n, z.n), i32(z.n), info
    yield "aten._linalg_solve_ex", op("aten._linalg_solve_ex", *solve, A=square, B=right)
    yield "aten.linalg_inv_ex", op("aten.linalg_inv_ex", out, info, A=square)
    yield (
        "aten.linalg_solve_triangular",
        op("aten.linalg_solve_triangular", solved, self=square, B=right, upper=True),
    )
    factors = tensor(z.n, z.k), tensor(z.k, z.k)
    yield "aten.linalg_qr of n by k", op("aten.linalg_qr", *factors, A=tall)
    parts = tensor(z.n, z.k), tensor(z.k), tensor(z.k, z.k)
    yield "aten._linalg_svd of n by k", op("aten._linalg_svd", *parts, A=tall)
    yield "aten._linalg_eigh", op("aten._linalg_eigh", tensor(z.n), tensor(z.n, z.n), A=square)
    yield "aten.linalg_matrix_exp", op("aten.linalg_matrix_exp", out, self=square)
    three = tensor(z.n, z.n), tensor(z.n, z.n), tensor(z.n, z.n)
    yield "aten.lu_unpack", op("aten.lu_unpack", *three, LU_data=square, LU_pivots=pivots)
    yield "aten._linalg_check_errors", op("aten._linalg_check_errors", info=i32(z.b))
    points = {"x1": tensor(z.m, z.k), "x2": tensor(z.n, z.k), "p": 2.0}
    yield "aten._cdist_forward", op("aten._cdist_forward", tensor(z.m, z.n), **points)
    yield (
        "aten._cdist_backward",
        op("aten._cdist_backward", tensor(z.m, z.k), grad=tensor(z.m, z.n), **points, cdist=tensor(z.m, z.n)),
    )
    pairs = z.n * (z.n - 1) // 2
    yield "aten._pdist_forward", op("aten._pdist_forward", tensor(pairs), self=tall)
    yield (
        "aten._pdist_backward",
        op("aten._pdist_backward", tensor(z.n, z.k), grad=tensor(pairs), self=tall, p=2.0, pdist=tensor(pairs)),
    )


def sorting() -> Rows:
    x = tensor(z.r, z.c)
    yield "aten.sort", op("aten.sort", tensor(z.r, z.c), i64(z.r, z.c), self=x)
    yield "aten.topk", op("aten.topk", tensor(z.r, z.l), i64(z.r, z.l), self=x, k=z.l)
    yield "aten.cumsum, aten.cumprod", op("aten.cumsum", tensor(z.r, z.c), self=x, dim=1)
    values, inverse, counts = tensor(z.t), i64(z.r, z.c), i64(z.t)
    unique = op("aten._unique2", values, inverse, counts, self=x, return_inverse=True)
    yield "aten._unique2 with return_inverse=True", unique
    row, wanted = tensor(z.n), tensor(z.t)
    yield (
        "aten.searchsorted, aten.bucketize",
        op("aten.searchsorted.Tensor", i64(z.t), sorted_sequence=row, self=wanted),
        op("aten.bucketize.Tensor", i64(z.t), self=wanted, boundaries=row),
    )
    yield "aten.bincount", op("aten.bincount", i64(z.n), self=i64(z.t))
    yield "aten.isin", op("aten.isin.Tensor_Tensor", mask(z.t), elements=wanted, test_elements=row)


def random() -> Rows:
    x, rate = tensor(z.e), 0.5
    yield "aten.randn, aten.uniform_, aten.randint, aten.bernoulli_.float", op("aten.randn", tensor(z.e), size=(z.e,))
    yield "aten.bernoulli.Tensor", op("aten.bernoulli.Tensor", tensor(z.e), self=x, p=tensor(z.e))
    yield (
        "aten.multinomial, aten.poisson, aten.bernoulli.default",
        op("aten.poisson", tensor(z.e), self=x),
    )
    yield (
        "aten.native_dropout",
        {"p": rate},
        op("aten.native_dropout", tensor(z.e), mask(z.e), input_=x, p=rate, train=True),
    )
    given = {"grad_output": x, "mask": mask(z.e), "scale": 1 / (1 - rate)}
    yield "aten.native_dropout_backward", {"p": rate}, op("aten.native_dropout_backward", tensor(z.e), **given)
    noise = tensor(z.e)
    yield (
        "aten.rrelu_with_noise, training",
        op("aten.rrelu_with_noise", tensor(z.e), self=x, noise=noise, training=True),
    )


def recurrent() -> Rows:
    gates = 4 * z.d
    data, state, cell = tensor(z.q, z.b, z.k), tensor(1, z.b, z.d), tensor(1, z.b, z.d)
    matrices, biases = (tensor(gates, z.k), tensor(gates, z.d)), (tensor(gates), tensor(gates))
    out, last = tensor(z.q, z.b, z.d), (tensor(1, z.b, z.d), tensor(1, z.b, z.d))
    parameters = (*matrices, *biases)
    weights = {"weight": parameters, "weight_stride0": 4, "hx": state, "cx": cell, "bidirectional": False}
    space = tensor(z.e, dtype="uint8")
    yield "aten._cudnn_rnn", op("aten._cudnn_rnn", out, *last, space, tensor(z.e), input_=data, **weights)
    grads = {"grad_output": tensor(z.q, z.b, z.d), "output": out, "output_mask": (True, True, True, True)}
    results = tensor(*data.shape), *last, *(tensor(*one.shape) for one in parameters)
    yield "aten._cudnn_rnn_backward", op("aten._cudnn_rnn_backward", *results, input_=data, **weights, **grads)
    one = {"weight0": matrices[0], "weight1": matrices[1], "weight2": biases[0], "weight3": biases[1]}
    layer = op("aten.mkldnn_rnn_layer", out, *last, space, input_=data, **one, hx_=state, cx_=cell)
    yield "aten.mkldnn_rnn_layer", layer
    given = {
        "weight1": matrices[0],
        "weight2": matrices[1],
        "hx_": state,
        "output": out,
        "grad_output": tensor(*out.shape),
    }
    yield "aten.mkldnn_rnn_layer_backward", op("aten.mkldnn_rnn_layer_backward", *results, input_=data, **given)
    flat = tensor(2 * gates * (z.k + z.d + 2))
    flatten = op("aten._cudnn_rnn_flatten_weight", flat, weight_arr=parameters)
    yield "aten._cudnn_rnn_flatten_weight", flatten
    wide = tensor(z.b, gates), tensor(z.b, gates)
    states = tensor(z.b, z.d), tensor(z.b, z.d), tensor(z.b, gates)
    cells = {"input_gates": wide[0], "hidden_gates": wide[1], "cx": tensor(z.b, z.d)}
    yield "aten._thnn_fused_lstm_cell", op("aten._thnn_fused_lstm_cell", *states, **cells)
    three = tensor(z.b, 3 * z.d), tensor(z.b, 3 * z.d)
    kept = tensor(z.b, z.d), tensor(z.b, 5 * z.d)
    gru = {"input_gates": three[0], "hidden_gates": three[1], "hx": tensor(z.b, z.d)}
    yield "aten._thnn_fused_gru_cell", op("aten._thnn_fused_gru_cell", *kept, **gru)
    back = {"grad_hy": tensor(z.b, z.d), "grad_cy": tensor(z.b, z.d), "cx": tensor(z.b, z.d), "cy": tensor(z.b, z.d)}
    results = tensor(z.b, gates), tensor(z.b, z.d), tensor(gates)
    name = "aten._thnn_fused_lstm_cell_backward_impl"
    yield name, op(name, *results, **back, workspace=tensor(z.b, gates), has_bias=True)


def optimizers() -> Rows:
    def many(dtype: str = "bfloat16") -> tuple[Tensor, ...]:
        return tuple(tensor(z.e, dtype=dtype) for _ in range(z.l))

    adam = {"self": many(), "grads": many(), "exp_avgs": many(), "exp_avg_sqs": many(), "max_exp_avg_sqs": ()}
    yield "aten._fused_adam_, aten._fused_adamw_", op("aten._fused_adamw_", **adam, weight_decay=0.0, amsgrad=False)
    yield "aten._fused_adamw_ with weight decay", op("aten._fused_adamw_", **adam, weight_decay=0.1, amsgrad=False)
    sgd = {"self": many(), "grads": many(), "weight_decay": 0.0}
    yield "aten._fused_sgd_", op("aten._fused_sgd_", **sgd, momentum_buffer_list=(), momentum=0.0)
    buffers = {"momentum_buffer_list": many(), "momentum": 0.9, "is_first_step": False}
    yield "aten._fused_sgd_ with momentum", op("aten._fused_sgd_", **sgd, **buffers)
    yield "aten._fused_adagrad_", op("aten._fused_adagrad_", **sgd, state_sums=many())
    first = many()
    yield "aten._foreach_add_ and others of two lists", op("aten._foreach_add_.List", self=first, other=many())
    yield "aten._foreach_sqrt", op("aten._foreach_sqrt", *many(), self=first)
    yield "aten._foreach_zero_", op("aten._foreach_zero_", self=first)
    yield "aten._foreach_copy_", op("aten._foreach_copy_", self=first, src=many())
    name = "aten._amp_foreach_non_finite_check_and_unscale_"
    yield name, op(name, self=first, found_inf=f32(), inv_scale=f32())
    scale = f32()
    yield "aten._amp_update_scale_", op("aten._amp_update_scale_", scale, self=scale, growth_tracker=i32())


def quantization() -> Rows:
    x, codes = tensor(z.e), tensor(z.e, dtype="int8")
    yield (
        "quantized_decomposed.quantize_per_tensor",
        op("quantized_decomposed.quantize_per_tensor", codes, input_=x),
    )
    yield (
        "quantized_decomposed.dequantize_per_tensor",
        op("quantized_decomposed.dequantize_per_tensor", tensor(z.e), input_=codes),
    )
    name = "aten.fake_quantize_per_tensor_affine_cachemask"
    yield name, op(name, tensor(z.e), mask(z.e), self=x)
    name = "aten._fake_quantize_learnable_per_tensor_affine_backward"
    given = {"grad": tensor(z.e), "self": x, "scale": f32(1), "zero_point": f32(1)}
    yield name, op(name, tensor(z.e), f32(1), f32(1), **given)
    name = "aten._fused_moving_avg_obs_fq_helper"
    yield name, op(name, tensor(z.e), mask(z.e), self=x)
    left, out = tensor(z.m, z.k), tensor(z.m, z.n)
    packed = tensor(z.n, z.k, dtype="int8")
    yield "aten._weight_int8pack_mm", op("aten._weight_int8pack_mm", out, self=left, mat2=packed, scales=tensor(z.n))
    name = "aten._weight_int4pack_mm_with_scales_and_zeros"
    four = tensor(z.n, z.k // 2, dtype="uint8")
    yield name, op(name, out, self=left, mat2=four, qScale=tensor(z.n), qZeros=tensor(z.n))
    name = "aten._dyn_quant_matmul_4bit"
    yield name, op(name, out, inp=left, packed_weights=four)
    mixed = op("aten._mixed_dtypes_linear", out, input_=left, weight=tensor(z.k, z.n, dtype="int8"), scale=tensor(z.n))
    yield "aten._mixed_dtypes_linear", mixed


def collectives() -> Rows:
    x, other, large = tensor(z.e), tensor(z.e), tensor(z.l * z.e)
    functional = "_c10d_functional"
    yield (
        f"{functional}.all_reduce, c10d.allreduce_, symm_mem.one_shot_all_reduce",
        op(f"{functional}.all_reduce", other, input_=x),
        op("c10d.allreduce_", x, tensors=(x,)),
        op("symm_mem.one_shot_all_reduce", other, input_=x),
    )
    yield (
        f"{functional}.all_gather_into_tensor, c10d._allgather_base_",
        op(f"{functional}.all_gather_into_tensor", large, input_=x),
        op("c10d._allgather_base_", large, output_tensor=large, input_tensor=x),
    )
    yield f"{functional}.reduce_scatter_tensor", op(f"{functional}.reduce_scatter_tensor", x, input_=large)
    yield f"{functional}.all_to_all_single", op(f"{functional}.all_to_all_single", other, input_=x)
    yield (
        f"{functional}.broadcast, c10d.recv_",
        op(f"{functional}.broadcast", other, input_=x),
        op("c10d.recv_", tensors=(x,)),
    )
    yield "c10d.send, c10d.reduce_", op("c10d.send", tensors=(x,))
    both = op(f"{functional}.batch_p2p_ops", op_list=("isend", "irecv"), tensors=(x, other))
    yield f"{functional}.batch_p2p_ops of one each way", both
    yield f"{functional}.wait_tensor, c10d.barrier", op(f"{functional}.wait_tensor", x, tensor=x)


def own_streaming() -> Rows:
    x, y, weight, bias = tensor(z.r, z.c), tensor(z.r, z.c), tensor(z.c), tensor(z.c)
    out = tensor(z.r, z.c)
    yield "nearpeak.softmax, nearpeak.log_softmax", op("nearpeak.softmax", out, x=x, causal=False)
    yield "nearpeak.softmax_backward", op("nearpeak.softmax_backward", out, gradient=x, result=y, causal=False)
    row = f32(z.r)
    yield "nearpeak.rms_norm", op("nearpeak.rms_norm", out, row, x=x, weight=weight)
    statistics = f32(2, z.r)
    yield "nearpeak.layer_norm", op("nearpeak.layer_norm", out, statistics, x=x, weight=weight, bias=bias)
    added = {"x": x, "residual": y, "weight": weight}
    yield "nearpeak.add_rms_norm", op("nearpeak.add_rms_norm", out, tensor(z.r, z.c), row, **added)
    given = {"gradient": y, "x": x, "statistics": row, "weight": weight, "wants": (True, False, True, False)}
    yield "nearpeak.norm_backward", op("nearpeak.norm_backward", out, tensor(z.c), **given)
    yield "nearpeak.add", op("nearpeak.add", out, x=x, y=y)
    yield "nearpeak.activation with a bias", op("nearpeak.activation", out, x=x, bias=bias)
    yield "nearpeak.gated", op("nearpeak.gated", out, gate=x, up=y)
    both = tensor(z.r, z.c), tensor(z.r, z.c)
    yield "nearpeak.gated_backward", op("nearpeak.gated_backward", *both, gradient=tensor(z.r, z.c), gate=x, up=y)
    heads, turned = tensor(z.b, z.q, z.h, z.d), tensor(z.b, z.q, z.h, z.d)
    tables = {"cos": tensor(z.q, z.d // 2), "sin": tensor(z.q, z.d // 2), "heads_first": False, "rotary_dim": z.d}
    yield "nearpeak.rotary", op("nearpeak.rotary", turned, x=heads, **tables)
    rate = 0.5
    flat = tensor(z.e)
    dropped = op("nearpeak.dropout_add", tensor(z.e), x=flat, residual=tensor(z.e), p=rate)
    yield "nearpeak.dropout_add", {"p": rate}, dropped
    back = op("nearpeak.dropout_add_backward", tensor(z.e), gradient=flat, p=rate)
    yield "nearpeak.dropout_add_backward", {"p": rate}, back
    yield "nearpeak.transpose_copy", op("nearpeak.transpose_copy", tensor(z.c, z.r), x=x)
    lists = {
        **{name: tuple(tensor(z.e) for _ in range(z.l)) for name in ("params", "grads")},
        **{name: tuple(f32(z.e) for _ in range(z.l)) for name in ("exp_avgs", "exp_avg_sqs", "master_params")},
    }
    yield "nearpeak.adamw_step with float32 masters", op("nearpeak.adamw_step", **lists, weight_decay=0.0)
    codes, scales = fp8(z.r, z.c), f32(z.r, 1)
    yield "nearpeak.quantize by row", op("nearpeak.quantize", codes, scales, x=x)
    yield "nearpeak.dequantize by row", op("nearpeak.dequantize", out, values=codes, scales=scales)
    chosen, row_map, counts = i64(z.t, z.l), i32(z.t, z.l), i32(z.x)
    yield "nearpeak.sort_tokens", op("nearpeak.sort_tokens", counts, row_map, i32(z.t * z.l), experts=chosen)
    tokens, spread = tensor(z.t, z.c), tensor(z.l * z.t, z.c)
    yield "nearpeak.permute_rows", op("nearpeak.permute_rows", spread, x=tokens, row_map=row_map)
    weights = tensor(z.t, z.l)
    back_together = op("nearpeak.unpermute_rows", tokens, rows=spread, row_map=row_map, weights=weights)
    yield "nearpeak.unpermute_rows", back_together
    logits, target = tensor(z.r, z.c), i64(z.r)
    yield (
        "nearpeak.cross_entropy with its gradient",
        op("nearpeak.cross_entropy", f32(), tensor(z.r, z.c), f32(2, z.r), f32(128), logits=logits, target=target),
    )
    gradient = tensor(z.r, z.c)
    yield "nearpeak.scale_gradient_", op("nearpeak.scale_gradient_", gradient=gradient, factor=f32())
    routed = op("nearpeak.route", f32(z.t, z.l), i32(z.t, z.l), logits=tensor(z.t, z.x))
    yield "nearpeak.route", routed


def own_products() -> Rows:
    x, weight, bias, residual = tensor(z.m, z.k), tensor(z.n, z.k), tensor(z.n), tensor(z.m, z.n)
    out = tensor(z.m, z.n)
    plain = {"x": x, "weight": weight, "activation": "", "gated": False}
    yield "nearpeak.gemm", op("nearpeak.gemm", out, **plain)
    full = {"x": x, "weight": weight, "bias": bias, "residual": residual, "activation": "gelu", "gated": False}
    yield "nearpeak.gemm with bias, activation and residual", op("nearpeak.gemm", out, **full)
    back = {"gradient": tensor(z.m, z.n), **plain, "for_x": True, "for_weight": True, "for_bias": False}
    yield "nearpeak.gemm_backward", op("nearpeak.gemm_backward", tensor(z.m, z.k), tensor(z.n, z.k), **back)
    counts, groups = i32(z.x), i32(z.e)
    yield "nearpeak.group_rows", op("nearpeak.group_rows", groups, counts=counts, rows=z.t)
    rows, matrices = tensor(z.t, z.k), tensor(z.x, z.n, z.k)
    given = {"rows": rows, "weight": matrices, "groups": groups}
    yield "nearpeak.grouped_gemm", op("nearpeak.grouped_gemm", tensor(z.t, z.n), **given)
    gradient = {"gradient": tensor(z.t, z.n), "rows": rows, "groups": groups, "experts": z.x}
    name = "nearpeak.grouped_weight_gradient"
    yield name, op(name, tensor(z.x, z.n, z.k), **gradient)
    yield from own_experts()
    target = i64(z.m)
    loss = {"hidden": x, "weight": weight, "target": target, "for_bias": False}
    kept = f32(z.m), f32(), f32(2, z.m)
    forward = op("nearpeak.linear_cross_entropy", *kept, **loss, for_hidden=False, for_weight=False)
    yield "nearpeak.linear_cross_entropy", forward
    both = tensor(z.m, z.k), tensor(z.n, z.k)
    name = "nearpeak.linear_cross_entropy_backward"
    yield name, op(name, *both, **loss, statistics=f32(z.m), for_hidden=True, for_weight=True)


def own_experts() -> Rows:
    number = z.t * z.l
    groups, sources, row_map, weights = i32(z.e), i32(number), i32(z.t, z.l), tensor(z.t, z.l)
    tokens, matrices = tensor(z.t, z.k), tensor(z.x, z.n, z.k)
    name = "nearpeak.gathered_gemm"
    yield name, op(name, tensor(number, z.n), tokens=tokens, weight=matrices, groups=groups, sources=sources)
    name = "nearpeak.gathered_weight_gradient"
    given = {"gradient": tensor(number, z.n), "rows": tokens, "groups": groups, "experts": z.x, "sources": sources}
    yield name, op(name, tensor(z.x, z.n, z.k), **given, which="rows")
    name = "nearpeak.moe"
    layer = {"x": tokens, "weights": weights, "gate_up": tensor(z.x, 2 * z.n, z.k), "down": tensor(z.x, z.k, z.n)}
    layer |= {"groups": groups, "row_map": row_map, "sources": sources, "activation": "silu"}
    yield name, op(name, tensor(z.t, z.k), tensor(0), **layer, keep=False)
    factors = tensor(number, 2 * z.n)
    yield f"{name} with a backward pass to come", op(name, tensor(z.t, z.k), factors, **layer, keep=True)
    name = "nearpeak.moe_gate_backward"
    back = {"upstream": tensor(number, z.n), "kept": factors, "weights": weights, "row_map": row_map}
    results = tensor(number, 2 * z.n), tensor(number, z.n), tensor(z.t, z.l)
    yield name, op(name, *results, **back, activation="silu")


def own_attention() -> Rows:
    given = {
        "query": tensor(z.b, z.h, z.q, z.d),
        "key": tensor(z.b, z.g, z.s, z.d),
        "value": tensor(z.b, z.g, z.s, z.v),
    }
    result, statistics = tensor(z.b, z.h, z.q, z.v), f32(z.b, z.h, z.q)
    for right, sizes in ((-1, {"p": z.q * z.s}), (0, {"p": z.q * (z.s - z.q) + z.q * (z.q + 1) // 2})):
        how = {"left": -1, "right": right, "bottom_right": True}
        yield "nearpeak.attention", sizes, op("nearpeak.attention", result, statistics, **given, **how)
        in_8_bits = op("nearpeak.attention_fp8", result, statistics, **given, right=right, bottom_right=True)
        yield "nearpeak.attention_fp8", sizes, in_8_bits
        saved = {"gradient": tensor(*result.shape), "result": result, "lse": statistics}
        wanted = {"for_query": True, "for_keys": True}
        gradients = [tensor(*one.shape) for one in given.values()]
        back = op("nearpeak.attention_backward", *gradients, **saved, **given, **how, **wanted)
        yield "nearpeak.attention_backward", sizes, back
    linear = {
        "query": tensor(z.b, z.h, z.s, z.d),
        "key": tensor(z.b, z.h, z.s, z.d),
        "value": tensor(z.b, z.h, z.s, z.v),
    }
    result, norms = tensor(z.b, z.h, z.s, z.v), f32(z.b, z.h, z.s)
    yield "nearpeak.linear_attention", op("nearpeak.linear_attention", result, norms, **linear, causal=False)
    saved = {"gradient": tensor(*result.shape), "result": result, "norms": norms}
    wanted = {"causal": False, "for_query": True, "for_key": True, "for_value": True}
    gradients = [tensor(*one.shape) for one in linear.values()]
    back = op("nearpeak.linear_attention_backward", *gradients, **saved, **linear, **wanted)
    yield "nearpeak.linear_attention_backward", back
    caches = {"key_cache": tensor(z.b, z.g, z.s, z.d), "value_cache": tensor(z.b, z.g, z.s, z.v), "lengths": i32(z.b)}
    query, out = tensor(z.b, z.h, 1, z.d), tensor(z.b, z.h, 1, z.v)
    one = op("nearpeak.decode_attention", out, f32(z.b, z.h, 1), query=query, **caches, window=-1)
    yield "nearpeak.decode_attention of one new token", one
    new = {"key": tensor(z.b, z.g, 1, z.d), "value": tensor(z.b, z.g, 1, z.v), "rotary_dim": 0}
    yield "nearpeak.append_ of one new token", op("nearpeak.append_", **caches, **new)
