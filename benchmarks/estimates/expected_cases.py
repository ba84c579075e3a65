"""Cases for `expected_s`: ops and small models, drawn by a seed from what models have.

A case is drawn by its seed, its family and its number alone, so that a file with these and a time is all that a fit or
a table needs: the trace is made again on fake tensors. Sizes are log-uniform within the ranges that the functions below
state, and a case whose tensors would take more than `MOST_BYTES` is drawn smaller. Data are standard normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import nearpeak

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES, FLOATS = (BF16, FP16), (BF16, BF16, FP16, FP32, FP32)
MOST_BYTES = 1.5e9
Build = Callable[[], nearpeak.Case]
Drawn = tuple[str, Build]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCase:
    """One case; `build` makes its tensors."""

    family: str
    number: int
    name: str
    build: Build


COUNTS: Mapping[str, int] = {
    "pointwise": 34,
    "cast": 8,
    "reduction": 30,
    "normalization": 36,
    "loss": 20,
    "indexing": 28,
    "scan": 14,
    "sorting": 14,
    "movement": 30,
    "creation": 14,
    "matrix": 46,
    "attention": 26,
    "convolution": 44,
    "pooling": 20,
    "recurrent": 20,
    "fourier": 6,
    "optimizer": 10,
    "model": 40,
    "activation": 14,
    "contraction": 16,
    "selection": 22,
    "resizing": 22,
    "factorization": 18,
    "spatial": 18,
    "composite": 26,
    "network": 26,
}
"""How many cases of each family a run has."""


def cases(seed: int, share: float = 1.0) -> Iterator[DrawnCase]:
    """The cases of a seed, the families in turns so that a run that is cut short has some of each."""
    counts = {family: max(1, round(share * count)) for family, count in COUNTS.items()}
    for number in range(max(counts.values())):
        for family, count in counts.items():
            # A family with fewer cases has them spread over the run.
            first, last = (math.ceil(value * count / max(counts.values())) for value in (number, number + 1))
            for place in range(first, last):
                yield draw_case(seed, family, place)


def draw_case(seed: int, family: str, number: int) -> DrawnCase:
    """One case by its seed, family and number."""
    draw = Draw(Random(f"{seed}/{family}/{number}"))
    name, build = FAMILIES[family](draw)
    return DrawnCase(family=family, number=number, name=name, build=build)


class Draw:
    """Draws sizes and choices."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """Log-uniform; three of four are multiples of `multiple`, as the sizes of models are."""
        value = math.exp(self.random.uniform(math.log(low), math.log(high)))
        if multiple > 1 and self.random.random() < 0.75:
            value = max(1, round(value / multiple)) * multiple
        return max(1, round(value))

    def power(self, low: int, high: int) -> int:
        """A power of two."""
        return 2 ** self.random.randint(int(math.log2(low)), int(math.log2(high)))

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def float_dtype(self) -> torch.dtype:
        return self.random.choice(FLOATS)


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def integers(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, device="cuda")


def backward(function: Callable[..., Any], *args: Any) -> nearpeak.Case:
    """The backward pass of a call alone, to all arguments that require gradients."""
    result = function(*args)
    wanted = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
    gradient = torch.randn_like(result)
    return nearpeak.Case(lambda: torch.autograd.grad(result, wanted, gradient, retain_graph=True))


def short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


def shape_text(*shape: int) -> str:
    return "x".join(map(str, shape))


UNARY: Mapping[str, Callable[..., Any]] = {
    "relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu, "tanh": torch.tanh, "exp": torch.exp,
    "sigmoid": torch.sigmoid, "rsqrt": lambda x: torch.rsqrt(x), "times 2": lambda x: x * 2, "pow 2": lambda x: x**2,
    "clamp": lambda x: x.clamp(-1, 1), "neg": torch.neg, "leaky relu": functional.leaky_relu,
    "softplus": functional.softplus, "hardtanh": functional.hardtanh, "gelu tanh":
    lambda x: functional.gelu(x, approximate="tanh"), "in place": lambda x: x.mul_(1.0), "sin": torch.sin,
}  # fmt: skip
BINARY: Mapping[str, Callable[..., Any]] = {
    "add": torch.add, "mul": torch.mul, "sub": torch.sub, "div": torch.div, "maximum": torch.maximum, "lt": torch.lt,
    "add in place": lambda x, y: x.add_(y),
}  # fmt: skip


def pointwise(draw: Draw) -> Drawn:
    """2**10 to 2**28 elements: one operand, two, three, broadcast, transposed, of two dtypes, backward."""
    dtype, elements = draw.float_dtype(), draw.size(2**10, 2**28, 64)
    form = draw.one("unary", "unary", "binary", "binary", "three", "row", "column", "transposed", "mixed", "backward")
    width = draw.power(64, 8192)
    rows = max(1, min(elements, 2**27) // width)
    label = f"{short(dtype)} {shape_text(rows, width)}"
    if form == "unary":
        name = draw.one(*UNARY)
        return f"{name} {short(dtype)} {elements}", lambda: nearpeak.Case(UNARY[name], tensor(elements, dtype=dtype))
    if form == "backward":
        name = draw.one("gelu", "silu", "relu", "tanh", "sigmoid")
        return (
            f"{name} backward {short(dtype)} {elements // 2}",
            lambda: backward(UNARY[name], tensor(elements // 2, dtype=dtype, grad=True)),
        )
    name = draw.one("add", "mul", "sub", "div") if form != "binary" else draw.one(*BINARY)
    function = BINARY[name]
    if form == "binary":
        return (
            f"{name} {short(dtype)} {elements}",
            lambda: nearpeak.Case(function, *(tensor(elements, dtype=dtype) for _ in range(2))),
        )
    if form == "three":
        which = draw.one("where", "addcmul", "masked fill", "lerp")
        if which == "where":
            return f"where {label}", lambda: nearpeak.Case(
                lambda c, x, y: torch.where(c, x, y),
                tensor(rows, width) > 0, *(tensor(rows, width, dtype=dtype) for _ in range(2)),
            )  # fmt: skip
        if which == "masked fill":
            return f"masked fill {label}", lambda: nearpeak.Case(
                lambda x, c: x.masked_fill(c, 0.0), tensor(rows, width, dtype=dtype), tensor(rows, width) > 0
            )
        if which == "lerp":
            return f"lerp {label}", lambda: nearpeak.Case(
                lambda x, y: torch.lerp(x, y, 0.1), *(tensor(rows, width, dtype=dtype) for _ in range(2))
            )
        return f"addcmul {label}", lambda: nearpeak.Case(
            torch.addcmul, *(tensor(rows, width, dtype=dtype) for _ in range(3))
        )
    other: dict[str, Callable[[], torch.Tensor]] = {
        "row": lambda: tensor(1, width, dtype=dtype),
        "column": lambda: tensor(rows, 1, dtype=dtype),
        "transposed": lambda: tensor(width, rows, dtype=dtype).t(),
        "mixed": lambda: tensor(rows, width, dtype=FP32 if dtype is not FP32 else BF16),
    }
    return (
        f"{name} with {form} {label}",
        lambda: nearpeak.Case(function, tensor(rows, width, dtype=dtype), other[form]()),
    )


def cast(draw: Draw) -> Drawn:
    """2**10 to 2**28 elements, up, down and between 16-bit types."""
    source, target = draw.one((BF16, FP32), (FP32, BF16), (FP16, FP32), (FP32, FP16), (BF16, FP16))
    elements = draw.size(2**10, 2**28, 64)
    return (
        f"{short(source)} to {short(target)} {elements}",
        lambda: nearpeak.Case(lambda x: x.to(target), tensor(elements, dtype=source)),
    )


REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "var": torch.var,
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim), "argmax": torch.argmax,
    "max": lambda x, dim: torch.max(x, dim), "prod": torch.prod, "logsumexp": torch.logsumexp,
}  # fmt: skip


def reduction(draw: Draw) -> Drawn:
    """2**10 to 2**28 elements over the last, the first, a middle or all dimensions; 1 to 2**20 results."""
    dtype, name = draw.float_dtype(), draw.one("sum", "sum", "mean", "mean", *REDUCTIONS)
    elements = draw.size(2**10, 2**28)
    axis = draw.one("last", "last", "first", "middle", "all")
    if axis == "all":
        name = draw.one("sum", "mean", "norm")
        everything = {"sum": torch.sum, "mean": torch.mean, "norm": lambda x: torch.linalg.vector_norm(x)}[name]
        return (
            f"{name} of all {short(dtype)} {elements}",
            lambda: nearpeak.Case(everything, tensor(elements, dtype=dtype)),
        )
    if axis == "middle":
        outer, width = draw.power(1, 256), draw.power(8, 4096)
        middle = max(2, min(elements // (outer * width), 2**14))
        shape: tuple[int, ...] = (outer, middle, width)
    else:
        width = draw.size(8, min(elements, 2**17), 8)
        shape = (max(1, elements // width), width)
    dim = {"last": -1, "first": 0, "middle": 1}[axis]
    return (
        f"{name} over {axis} {short(dtype)} {shape_text(*shape)}",
        lambda: nearpeak.Case(lambda x: REDUCTIONS[name](x, dim=dim), tensor(*shape, dtype=dtype)),
    )


def normalization(draw: Draw) -> Drawn:
    """Rows 1 to 2**17 of 16 to 2**17 elements; images of batch 1 to 64; forward and backward."""
    dtype, grad = draw.float_dtype(), draw.chance(0.3)
    name = draw.one("softmax", "softmax", "log softmax", "layer norm", "layer norm", "rms norm", "group norm",
                    "batch norm", "batch norm", "softmax over first", "instance norm", "batch norm eval")  # fmt: skip
    label = " backward" * grad
    if name in ("group norm", "batch norm", "instance norm", "batch norm eval"):
        batch, channels, edge = draw.power(1, 64), draw.power(32, 1024), draw.one(7, 14, 28, 32, 56, 64, 112)
        while batch * channels * edge**2 > 2**27:
            batch, channels = max(1, batch // 2), max(32, channels // 2)
        shape = (batch, channels, edge, edge)
        last = name.startswith("batch") and draw.chance(0.4)

        def images() -> nearpeak.Case:
            x = tensor(*shape, dtype=dtype)
            if last:
                x = x.to(memory_format=torch.channels_last)
            x.requires_grad_(grad)
            weight, bias = (tensor(channels, dtype=FP32 if "batch" in name else dtype, grad=grad) for _ in range(2))
            mean, variance = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")

            def call(x: Any, weight: Any, bias: Any) -> Any:
                if name == "group norm":
                    return functional.group_norm(x, 32, weight, bias)
                if name == "instance norm":
                    return functional.instance_norm(x)
                return functional.batch_norm(x, mean, variance, weight, bias, training="eval" not in name)

            return (
                backward(call, x, weight, bias)
                if grad and name != "instance norm"
                else nearpeak.Case(call, x.detach(), weight.detach(), bias.detach())
            )

        return f"{name}{label} {short(dtype)} {shape_text(*shape)}{' last' * last}", images
    width = draw.size(16, 2**17, 16) if "softmax" in name else draw.size(64, 16384, 64)
    rows = draw.size(1, 2**17)
    while rows * width > 2**27:
        rows = max(1, rows // 2)

    def build() -> nearpeak.Case:
        x = tensor(rows, width, dtype=dtype, grad=grad)
        weight, bias = (tensor(width, dtype=dtype, grad=grad) for _ in range(2))
        calls: dict[str, tuple[Any, ...]] = {
            "softmax": (lambda x: torch.softmax(x, -1), x),
            "softmax over first": (lambda x: torch.softmax(x, 0), x),
            "log softmax": (lambda x: torch.log_softmax(x, -1), x),
            "layer norm": (lambda x, w, b: functional.layer_norm(x, (width,), w, b), x, weight, bias),
            "rms norm": (lambda x, w: functional.rms_norm(x, (width,), w), x, weight),
        }
        function, *args = calls[name]
        if grad and name == "rms norm":
            # Its forward decides which backward follows, so that a trace needs both.
            return nearpeak.Case(lambda *args: torch.autograd.grad(function(*args).sum(), args), *args)
        if grad:
            return backward(function, *args)
        return nearpeak.Case(function, *(value.detach() for value in args))

    label = " and backward" if grad and name == "rms norm" else label
    return f"{name}{label} {short(dtype)} {shape_text(rows, width)}", build


def loss(draw: Draw) -> Drawn:
    """Classes 10 to 2**17 of 1 to 2**15 rows; elementwise losses of 2**10 to 2**26 elements; forward and backward."""
    dtype, grad = draw.float_dtype(), draw.chance(0.3)
    name = draw.one("cross entropy", "cross entropy", "nll", "mse", "l1", "smooth l1", "bce logits", "kl", "hinge")
    label = f"{name}{' backward' * grad} {short(dtype)}"
    if name in ("cross entropy", "nll"):
        classes, rows = draw.size(10, 2**17, 8), draw.size(1, 2**15)
        while rows * classes > 2**27:
            rows = max(1, rows // 2)
        function = functional.cross_entropy if name == "cross entropy" else functional.nll_loss

        def by_rows() -> nearpeak.Case:
            target = integers(classes, rows)
            x = tensor(rows, classes, dtype=dtype, grad=grad)
            call = lambda x: function(x, target)  # noqa: E731
            return backward(call, x) if grad else nearpeak.Case(call, x)

        return f"{label} {shape_text(rows, classes)}", by_rows
    elements = draw.size(2**10, 2**26)
    functions: dict[str, Callable[..., Any]] = {
        "mse": functional.mse_loss, "l1": functional.l1_loss, "smooth l1": functional.smooth_l1_loss,
        "bce logits": functional.binary_cross_entropy_with_logits,
        "kl": lambda x, y: functional.kl_div(x, y, log_target=True),
        "hinge": lambda x, y: torch.mean(torch.clamp(1 - x * y, min=0)),
    }  # fmt: skip

    def elementwise() -> nearpeak.Case:
        target = torch.rand(elements, device="cuda").to(dtype)
        x = tensor(elements, dtype=dtype, grad=grad)
        call = lambda x: functions[name](x, target)  # noqa: E731
        return backward(call, x) if grad else nearpeak.Case(call, x)

    return f"{label} {elements}", elementwise


def indexing(draw: Draw) -> Drawn:
    """Tables of 2**8 to 2**17 rows of 16 to 4096 elements, 2**4 to 2**17 rows taken; elements by index."""
    dtype = draw.float_dtype()
    name = draw.one("embedding", "embedding", "embedding backward", "embedding backward", "index select", "index",
                    "gather rows", "gather columns", "take", "index add", "index copy", "scatter add", "index put",
                    "scatter columns")  # fmt: skip
    rows, width, count = draw.size(2**8, 2**17), draw.size(16, 4096, 16), draw.size(2**4, 2**17)
    while rows * width > 2**28:
        rows //= 2
    while count * width > 2**27:
        count //= 2
    label = f"{name} {short(dtype)} {shape_text(rows, width)} by {count}"

    def build() -> nearpeak.Case:
        table, places = tensor(rows, width, dtype=dtype), integers(rows, count)
        if name == "embedding":
            return nearpeak.Case(functional.embedding, places, table)
        if name == "embedding backward":
            return backward(lambda table: functional.embedding(places, table), table.requires_grad_())
        if name == "index select":
            return nearpeak.Case(torch.index_select, table, 0, places)
        if name == "index":
            return nearpeak.Case(lambda t, i: t[i], table, places)
        if name == "gather rows":
            return nearpeak.Case(lambda t, i: t.gather(0, i), table, integers(rows, count, width))
        if name == "gather columns":
            return nearpeak.Case(lambda t, i: t.gather(1, i), table, integers(width, rows, max(1, min(width, 8))))
        if name == "take":
            return nearpeak.Case(torch.take, table, integers(rows * width, count * 16))
        source = tensor(count, width, dtype=dtype)
        if name == "scatter add":
            return nearpeak.Case(lambda t, i, s: t.scatter_add_(0, i, s), table, integers(rows, count, width), source)
        if name == "scatter columns":
            few = max(1, min(width, 8))
            return nearpeak.Case(
                lambda t, i, s: t.scatter(1, i, s), table, integers(width, rows, few), tensor(rows, few, dtype=dtype)
            )
        if name == "index put":
            return nearpeak.Case(lambda t, i, s: t.index_put_((i,), s), table, places, source)
        method = {"index add": "index_add_", "index copy": "index_copy_"}[name]
        return nearpeak.Case(lambda t, i, s: getattr(t, method)(0, i, s), table, places, source)

    return label, build


def scan(draw: Draw) -> Drawn:
    """Cumulative ops over the last or the first dimension: 1 to 2**16 rows of 16 to 2**17 elements."""
    dtype, name = draw.float_dtype(), draw.one("cumsum", "cumsum", "cumprod", "cummax", "logcumsumexp")
    width, rows, dim = draw.size(16, 2**17, 16), draw.size(1, 2**16), draw.one(-1, -1, 0)
    while rows * width > 2**26:
        rows = max(1, rows // 2)
    functions: dict[str, Callable[..., Any]] = {
        "cumsum": torch.cumsum, "cumprod": torch.cumprod, "cummax": torch.cummax, "logcumsumexp": torch.logcumsumexp,
    }  # fmt: skip
    return (
        f"{name} over {'last' if dim else 'first'} {short(dtype)} {shape_text(rows, width)}",
        lambda: nearpeak.Case(lambda x: functions[name](x, dim), tensor(rows, width, dtype=dtype)),
    )


def sorting(draw: Draw) -> Drawn:
    """Sort and top-k of 1 to 2**16 rows of 16 to 2**18 elements."""
    dtype, name = draw.float_dtype(), draw.one("sort", "topk", "topk", "argsort", "sort of one row")
    width, rows = draw.size(16, 2**18, 16), draw.size(1, 2**16)
    if name == "sort of one row":
        rows, width = 1, draw.size(2**10, 2**24)
    while rows * width > 2**25:
        rows = max(1, rows // 2)
    count = min(width, draw.one(1, 2, 8, 50, 100))
    functions: dict[str, Callable[..., Any]] = {
        "sort": torch.sort, "sort of one row": torch.sort, "argsort": torch.argsort, "topk":
        lambda x: torch.topk(x, count),
    }  # fmt: skip
    few = f" of {count}" if name == "topk" else ""
    return (
        f"{name}{few} {short(dtype)} {shape_text(rows, width)}",
        lambda: nearpeak.Case(functions[name], tensor(rows, width, dtype=dtype)),
    )


def movement(draw: Draw) -> Drawn:
    """2**10 to 2**27 elements: copies in another order, parts put together, repeats."""
    dtype, elements = draw.float_dtype(), draw.size(2**10, 2**27)
    name = draw.one("clone", "copy", "transpose", "transpose", "heads first", "heads first", "batch transpose", "cat",
                    "cat rows", "stack", "pad", "roll", "flip", "repeat", "repeat interleave", "lower triangle",
                    "half of columns", "half of rows", "expanded", "channels last", "channels first",
                    "pixel shuffle")  # fmt: skip
    width = draw.power(64, 8192) if draw.chance(0.7) else draw.size(33, 5000)
    rows = max(4, elements // width)
    heads, head = draw.one(8, 16, 32), draw.one(64, 128)
    tokens = max(2, elements // (heads * head))  # one token is a view in the new order too
    edge, channels = draw.one(14, 28, 56, 64), draw.power(16, 512)
    batch = max(1, min(elements // (channels * edge**2), 64))
    functions: dict[str, Callable[..., Any]] = {
        "clone": torch.clone, "copy": lambda x: torch.empty_like(x).copy_(x), "transpose": lambda x: x.t().contiguous(),
        "heads first": lambda x: x.transpose(0, 1).contiguous(),
        "batch transpose": lambda x: x.transpose(1, 2).contiguous(), "cat": lambda x: torch.cat([x, x], -1),
        "cat rows": lambda x: torch.cat([x, x], 0), "stack": lambda x: torch.stack([x, x]),
        "pad": lambda x: functional.pad(x, (1, 1)), "roll": lambda x: torch.roll(x, 1, 0),
        "flip": lambda x: torch.flip(x, (-1,)), "repeat": lambda x: x.repeat(2, 1),
        "repeat interleave": lambda x: x.repeat_interleave(4, 1), "lower triangle": torch.tril,
        "half of columns": lambda x: x[:, : x.shape[1] // 2].contiguous(),
        "half of rows": lambda x: x[::2].contiguous(), "expanded": lambda x: x[:1].expand(x.shape[0], -1).contiguous(),
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "channels first": lambda x: x.contiguous(),
        "pixel shuffle": lambda x: functional.pixel_shuffle(x, 2),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "heads first": (tokens, heads, head),
        "batch transpose": (batch, channels, edge**2),
        **dict.fromkeys(("channels last", "channels first", "pixel shuffle"), (batch, channels, edge, edge)),
    }
    shape = shapes.get(name, (rows, width))

    def build() -> nearpeak.Case:
        x = tensor(*shape, dtype=dtype)
        return nearpeak.Case(
            functions[name], x.to(memory_format=torch.channels_last) if name == "channels first" else x
        )

    return f"{name} {short(dtype)} {shape_text(*shape)}", build


def creation(draw: Draw) -> Drawn:
    """Fills and random numbers of 2**10 to 2**28 elements, and dropout of half as many."""
    dtype, elements = draw.float_dtype(), draw.size(2**10, 2**28)
    name = draw.one("zeros", "zero in place", "full", "fill in place", "arange", "rand", "randn", "dropout", "dropout",
                    "bernoulli", "one hot")  # fmt: skip
    functions: dict[str, Callable[..., Any]] = {
        "zeros": lambda: torch.zeros(elements, device="cuda", dtype=dtype),
        "full": lambda: torch.full((elements,), 2.0, device="cuda", dtype=dtype),
        "arange": lambda: torch.arange(elements, device="cuda", dtype=FP32),
        "rand": lambda: torch.rand(elements, device="cuda", dtype=dtype),
        "randn": lambda: torch.randn(elements, device="cuda", dtype=dtype),
    }
    inputs: dict[str, Callable[..., Any]] = {
        "zero in place": lambda x: x.zero_(), "fill in place": lambda x: x.fill_(3.0),
        "dropout": lambda x: functional.dropout(x, 0.1), "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.5),
    }  # fmt: skip
    if name == "one hot":
        classes, count = draw.power(8, 4096), draw.size(16, 2**16)
        return (
            f"one hot {count} of {classes}",
            lambda: nearpeak.Case(
                lambda i: torch.zeros(count, classes, device="cuda").scatter_(1, i, 1.0), integers(classes, count, 1)
            ),
        )
    if name in functions:
        return f"{name} {short(dtype)} {elements}", lambda: nearpeak.Case(functions[name])
    elements //= 2 if name == "dropout" else 1
    return f"{name} {short(dtype)} {elements}", lambda: nearpeak.Case(inputs[name], tensor(elements, dtype=dtype))


def matrix(draw: Draw) -> Drawn:
    """m, n and k from 16 to 16384, few rows (1 to 64) in a quarter, batches of 2 to 512, all orders of the factors."""
    dtype = draw.one(BF16, BF16, BF16, FP16, FP32, FP32)
    m, n, k = (draw.size(16, 16384, 64) for _ in range(3))
    form = draw.one("linear", "linear", "mm", "few rows", "few rows", "mm", "batch", "batch", "addmm", "tf32", "mv")
    if form == "few rows":
        m, n, k = draw.one(1, 1, 2, 4, 8, 16, 32, 64), draw.size(256, 32768, 64), draw.size(256, 16384, 64)
    most = 2e12 if dtype is not FP32 else 2e11
    while 2 * m * n * k > most:
        m, n, k = max(m // 2, 16), max(n // 2, 16), max(k // 2, 16)
    if form == "mv":
        return (
            f"mv {short(dtype)} {shape_text(n, k)}",
            lambda: nearpeak.Case(torch.mv, tensor(n, k, dtype=dtype), tensor(k, dtype=dtype)),
        )
    if form == "batch":
        batch, m, n, k = draw.power(2, 512), *(draw.size(16, 2048, 16) for _ in range(3))
        while 2 * batch * m * n * k > most or batch * max(m * n, m * k, n * k) > 2**28:
            batch, m, n, k = max(2, batch // 2), max(m // 2, 16), max(n // 2, 16), max(k // 2, 16)
        turned = draw.chance(0.5)

        def batched() -> nearpeak.Case:
            b = tensor(batch, n, k, dtype=dtype).transpose(1, 2) if turned else tensor(batch, k, n, dtype=dtype)
            return nearpeak.Case(torch.bmm, tensor(batch, m, k, dtype=dtype), b)

        return f"bmm {short(dtype)} {shape_text(batch, m, k, n)}{' turned' * turned}", batched
    if form == "tf32":

        def in_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return torch.mm(a, b)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        return (
            f"mm tf32 {shape_text(m, k, n)}",
            lambda: nearpeak.Case(in_tf32, tensor(m, k, dtype=FP32), tensor(k, n, dtype=FP32)),
        )
    bias = form == "addmm" or (form == "linear" and draw.chance(0.5))
    order = draw.one("nn", "nt", "tn") if form == "mm" else "nt"

    def build() -> nearpeak.Case:
        a = tensor(k, m, dtype=dtype).t() if order == "tn" else tensor(m, k, dtype=dtype)
        b = tensor(n, k, dtype=dtype).t() if order == "nt" else tensor(k, n, dtype=dtype)
        if bias:
            return nearpeak.Case(torch.addmm, tensor(n, dtype=dtype), a, b)
        return nearpeak.Case(torch.mm, a, b)

    return f"mm {order}{' with bias' * bias} {short(dtype)} {shape_text(m, k, n)}", build


def attention(draw: Draw) -> Drawn:
    """Batches of 1 to 32, 4 to 64 heads of 32 to 256, 64 to 8192 tokens; causal, grouped, decoding, masked."""
    form = draw.one("plain", "causal", "causal", "and backward", "causal and backward", "grouped", "decode", "float32",
                    "mask", "efficient")  # fmt: skip
    dtype = FP32 if form == "float32" else draw.one(*HALVES)
    batch, heads, length = draw.power(1, 32), draw.one(4, 8, 12, 16, 32, 64), draw.size(64, 8192, 64)
    width = draw.one(32, 64, 64, 128, 128, 96, 256)
    while batch * heads * length**2 * width > (2**39 if dtype is not FP32 else 2**36):
        batch, length = max(1, batch // 2), max(64, length // 2)
    keys = max(1, heads // 4) if form == "grouped" else heads
    queries = 1 if form == "decode" else length
    grad, causal = "backward" in form, "causal" in form or form == "grouped"

    def build() -> nearpeak.Case:
        q = tensor(batch, heads, queries, width, dtype=dtype, grad=grad)
        k, v = (tensor(batch, keys, length, width, dtype=dtype, grad=grad) for _ in range(2))
        mask = tensor(1, 1, length, length, dtype=dtype) if form == "mask" else None
        efficient = [torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]

        def call(q: Any, k: Any, v: Any) -> Any:
            options: dict[str, Any] = {"enable_gqa": True} if keys != heads else {}
            if form == "efficient":
                with torch.nn.attention.sdpa_kernel(efficient):
                    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)

        def both(q: Any, k: Any, v: Any) -> Any:
            result = call(q, k, v)
            return torch.autograd.grad(result, (q, k, v), torch.ones_like(result))

        return nearpeak.Case(both if grad else call, q, k, v)

    return f"{form} {short(dtype)} {shape_text(batch, heads, queries, length, width)}", build


def convolution(draw: Draw) -> Drawn:
    """7 to 224 pixels, 3 to 1024 channels, kernels 1 to 32; strided, depthwise, grouped, transposed, 1-d and 3-d."""
    dtype, last, grad = draw.one(BF16, FP16, FP32, FP32), draw.chance(0.5), draw.chance(0.25)
    form = draw.one("2-d", "2-d", "2-d", "2-d", "2-d", "strided", "first", "depthwise", "depthwise", "grouped",
                    "transposed", "dilated", "1-d", "3-d", "patches")  # fmt: skip
    batch, edge = draw.power(1, 64), draw.one(7, 14, 28, 32, 56, 64, 112, 128, 224)
    inner, outer = (draw.one(16, 32, 64, 64, 96, 128, 128, 256, 256, 512, 1024) for _ in range(2))
    kernel, stride, groups, dilation, dimensions = draw.one(1, 1, 3, 3, 3, 5, 7), 1, 1, 1, 2
    if form == "strided":
        stride = 2
    elif form == "first":
        inner, outer, kernel, stride, edge = 3, draw.one(32, 64), draw.one(3, 7), 2, 224
    elif form == "depthwise":
        outer = groups = inner
        kernel, stride = draw.one(3, 3, 5, 7), draw.one(1, 1, 2)
    elif form == "grouped":
        groups, kernel = draw.one(4, 8, 32), 3
        inner, outer = max(inner, 64) // groups * groups, max(outer, 64) // groups * groups
    elif form == "transposed":
        kernel, stride = draw.one((2, 2), (3, 1), (4, 2))
    elif form == "dilated":
        kernel, dilation = 3, 2
    elif form == "patches":
        inner, outer, edge = 3, draw.one(384, 768, 1024), 224
        kernel = stride = draw.one(14, 16, 32)
    elif form == "1-d":
        dimensions, edge, kernel = 1, draw.size(128, 8192, 64), draw.one(1, 3, 4, 5, 9)
    elif form == "3-d":
        dimensions, edge, kernel = 3, draw.one(8, 16, 28, 32), draw.one(1, 3)

    def work() -> float:
        return (
            batch
            * (edge // (1 if form == "transposed" else stride)) ** dimensions
            * inner
            * outer
            / groups
            * (kernel**dimensions)
        )

    while work() > 2e11 or batch * edge**dimensions * max(inner, outer) > 2**28:
        batch //= 2
        if not batch:
            batch, edge = 1, edge // 2
    padding = 0 if form in ("transposed", "patches") else dilation * (kernel // 2)
    names = {1: "conv1d", 2: "conv2d", 3: "conv3d"}
    function = functional.conv_transpose2d if form == "transposed" else getattr(functional, names[dimensions])
    weights = (inner, outer) if form == "transposed" else (outer, inner // groups)
    last = last and dimensions == 2

    def build() -> nearpeak.Case:
        order = torch.channels_last if last else torch.contiguous_format
        x = tensor(batch, inner, *(edge,) * dimensions, dtype=dtype)
        weight = tensor(*weights, *(kernel,) * dimensions, dtype=dtype)
        x, weight = (value.to(memory_format=order).requires_grad_(grad) for value in (x, weight))
        options: dict[str, Any] = {"stride": stride, "padding": padding, "groups": groups, "dilation": dilation}

        def call(x: Any, weight: Any) -> Any:
            return function(x, weight, **options)

        return backward(call, x, weight) if grad else nearpeak.Case(call, x, weight)

    sizes = f"{shape_text(batch, inner, *(edge,) * dimensions)} to {outer} by {kernel}"
    return f"{form}{' backward' * grad} {short(dtype)} {sizes}/{stride}{' last' * last} groups {groups}", build


def pooling(draw: Draw) -> Drawn:
    """Images of 14 to 224 pixels, 16 to 512 channels: windows, global averages, resizing; forward and backward."""
    dtype, grad, last = draw.float_dtype(), draw.chance(0.25), draw.chance(0.25)
    name = draw.one("max 2", "max 3/2", "average 2", "average 3/2", "global average", "adaptive 7", "nearest",
                    "bilinear", "max 1-d", "max 3-d", "average 3-d")  # fmt: skip
    batch, channels, edge = draw.power(1, 64), draw.power(16, 512), draw.one(14, 28, 32, 56, 64, 112, 224)
    dimensions = 1 if "1-d" in name else 3 if "3-d" in name else 2
    edge = edge**2 if dimensions == 1 else min(edge, 32) if dimensions == 3 else edge
    while batch * channels * edge**dimensions > 2**26:
        batch, channels = max(1, batch // 2), max(16, channels // 2)
        if batch * channels == 16 and edge > 7:
            edge //= 2
    functions: dict[str, Callable[..., Any]] = {
        "max 2": lambda x: functional.max_pool2d(x, 2), "max 3/2": lambda x: functional.max_pool2d(x, 3, 2, 1),
        "average 2": lambda x: functional.avg_pool2d(x, 2),
        "average 3/2": lambda x: functional.avg_pool2d(x, 3, 2, 1),
        "global average": lambda x: functional.adaptive_avg_pool2d(x, 1),
        "adaptive 7": lambda x: functional.adaptive_avg_pool2d(x, 7),
        "nearest": lambda x: functional.interpolate(x, scale_factor=2),
        "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        "max 1-d": lambda x: functional.max_pool1d(x, 4), "max 3-d": lambda x: functional.max_pool3d(x, 2),
        "average 3-d": lambda x: functional.avg_pool3d(x, 2),
    }  # fmt: skip
    last = last and dimensions == 2

    def build() -> nearpeak.Case:
        x = tensor(batch, channels, *(edge,) * dimensions, dtype=dtype)
        x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_(grad)
        return backward(functions[name], x) if grad else nearpeak.Case(functions[name], x)

    shape = shape_text(batch, channels, *(edge,) * dimensions)
    return f"{name}{' backward' * grad} {short(dtype)} {shape}{' last' * last}", build


def recurrent(draw: Draw) -> Drawn:
    """RNN, LSTM and GRU of 1 to 4 layers of 32 to 2048 units over 8 to 1024 steps of 1 to 128 sequences."""
    name, dtype = draw.one("LSTM", "LSTM", "GRU", "GRU", "RNN"), draw.one(FP32, FP32, BF16, FP16)
    layers, both, grad = draw.one(1, 1, 2, 3, 4), draw.chance(0.25), draw.chance(0.3)
    hidden, inner = draw.power(32, 2048), draw.power(32, 2048)
    steps, batch, first = draw.size(8, 1024), draw.power(1, 128), draw.chance(0.5)
    while steps * layers * hidden * max(hidden, inner) * batch > 2**36:
        steps, hidden, inner = max(8, steps // 2), max(32, hidden // 2), max(32, inner // 2)

    def build() -> nearpeak.Case:
        module = getattr(nn, name)(inner, hidden, layers, batch_first=first, bidirectional=both)
        module = module.to("cuda", dtype)
        x = tensor(*((batch, steps, inner) if first else (steps, batch, inner)), dtype=dtype, grad=grad)
        if not grad:

            def infer(x: torch.Tensor) -> Any:
                with torch.no_grad():
                    return module(x)[0]

            return nearpeak.Case(infer, x)
        wanted = [x, *module.parameters()]

        def train(x: torch.Tensor) -> Any:
            result = module(x)[0]
            return torch.autograd.grad(result, wanted, torch.ones_like(result))

        return nearpeak.Case(train, x)

    label = f"{layers} layers {shape_text(steps, batch, inner)} to {hidden}{' both ways' * both}"
    return f"{name}{' and backward' * grad} {short(dtype)} {label}", build


def fourier(draw: Draw) -> Drawn:
    """Transforms of 1 to 2**14 rows of 2**5 to 2**16 elements."""
    name = draw.one("fft", "rfft", "irfft", "fft2")
    width, rows = draw.power(2**5, 2**16), draw.size(1, 2**14)
    if name == "fft2":
        width = min(width, 1024)
        rows = max(1, min(rows, 2**25 // width**2))
        shape: tuple[int, ...] = (rows, width, width)
    else:
        while rows * width > 2**26:
            rows = max(1, rows // 2)
        shape = (rows, width)
    function = getattr(torch.fft, name)

    def build() -> nearpeak.Case:
        x = tensor(*shape, dtype=FP32)
        return nearpeak.Case(function, x if name == "rfft" else torch.complex(x, x))

    return f"{name} {shape_text(*shape)}", build


def optimizer(draw: Draw) -> Drawn:
    """4 to 64 parameters of 2**10 to 2**24 elements in all forms of AdamW, Adam and SGD."""
    name, form, dtype = draw.one("AdamW", "AdamW", "Adam", "SGD"), draw.one("fused", "foreach"), draw.one(BF16, FP32)
    count, elements = draw.power(4, 64), draw.size(2**10, 2**24)
    while count * elements > 2**27:
        elements //= 2

    def build() -> nearpeak.Case:
        parameters = [nn.Parameter(tensor(elements, dtype=dtype)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        options: dict[str, Any] = {form: True, "lr": 1e-3, **({"momentum": 0.9} if name == "SGD" else {})}
        step = getattr(torch.optim, name)(parameters, **options)
        step.step()
        return nearpeak.Case(step.step)

    return f"{name} {form} {short(dtype)} {count} of {elements}", build


class WrittenOut(nn.Module):
    """Attention as two products and a softmax."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.project(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        if self.causal:
            mask = torch.ones(tokens, tokens, device=x.device, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, float("-inf"))
        weights = torch.softmax(scores, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class GatedLayer(nn.Module):
    """A decoder layer with rotary positions, RMS norm and a gated MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        head = width // self.heads
        angles = torch.outer(
            torch.arange(tokens, device=x.device), 1e4 ** (-torch.arange(0, head, 2, device=x.device) / head)
        )
        cos, sin = (f(angles).repeat(1, 2).to(x.dtype) for f in (torch.cos, torch.sin))

        def turned(y: torch.Tensor) -> torch.Tensor:
            low, high = y.chunk(2, -1)
            return y * cos + torch.cat((-high, low), -1) * sin

        parts = self.project(self.first(x)).view(batch, tokens, 3, self.heads, head).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        y = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Residual(nn.Module):
    """A bottleneck of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


class Pool(nn.Module):
    """A recurrent network and a classifier on its last state."""

    def __init__(self, inner: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(inner, hidden, layers, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


def model(draw: Draw) -> Drawn:
    """Small models, forward alone, forward and backward, and whole training steps.

    1 to 32 sequences of 32 to 2048 tokens, widths 128 to 4096; images of 28 to 112 pixels, 64 to 512 channels.
    """
    name = draw.one("MLP", "MLP", "written-out attention", "written-out attention", "encoder layer", "encoder layer",
                    "gated layer", "gated layer", "residual block", "residual block", "convolutional network",
                    "recurrent classifier", "linear, norm, gelu", "chain of small ops",
                    "embedding and head")  # fmt: skip
    dtype, run = draw.one(BF16, BF16, FP16, FP32), draw.one("forward", "forward", "training", "step")
    batch, tokens, width = draw.power(1, 32), draw.power(32, 2048), draw.one(128, 256, 512, 768, 1024, 2048, 4096)
    channels, edge, depth = draw.power(64, 512), draw.one(28, 32, 56, 112), draw.one(1, 2, 4)
    heads, causal, words = width // draw.one(64, 64, 128), draw.chance(0.5), draw.one(1000, 32000, 50304)
    while batch * tokens * width * depth > 2**25 or batch * heads * tokens**2 > 2**28:
        batch, tokens = max(1, batch // 2), max(32, tokens // 2)
    while batch * channels * edge**2 * depth > 2**26:
        batch, channels = max(1, batch // 2), max(64, channels // 2)
        if batch == 1 and channels == 64:
            break

    def module() -> tuple[nn.Module, torch.Tensor]:
        x = lambda *shape: tensor(*shape, dtype=dtype)  # noqa: E731
        if name == "MLP":
            layers: list[nn.Module] = []
            for _ in range(depth):
                layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            return nn.Sequential(*layers), x(batch, tokens, width)
        if name == "written-out attention":
            return WrittenOut(width, heads, causal), x(batch, tokens, width)
        if name == "encoder layer":
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=causal
            )
            return layer, x(batch, tokens, width)
        if name == "gated layer":
            return GatedLayer(width, heads, 64 * round(width / 24)), x(batch, tokens, width)
        if name == "residual block":
            return nn.Sequential(*(Residual(channels) for _ in range(depth))), x(batch, channels, edge, edge)
        if name == "convolutional network":
            layers = [nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(64, 128, 3, 1, 1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(128, 10)]  # fmt: skip
            return nn.Sequential(*layers), x(batch, 3, 2 * edge, 2 * edge)
        if name == "recurrent classifier":
            return Pool(min(width, 1024), min(width, 1024), min(depth, 2)), x(batch, tokens, min(width, 1024))
        if name == "linear, norm, gelu":
            return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()), x(batch, tokens, width)
        if name == "embedding and head":
            small = min(width, 1024)
            layers = [nn.Embedding(words, small), nn.LayerNorm(small), nn.Linear(small, words)]
            return nn.Sequential(*layers), integers(words, min(batch, 4), min(tokens, 512))
        return nn.Sequential(*(m for _ in range(8 * depth) for m in (nn.ReLU(), nn.Tanh(), nn.Softplus()))), x(
            batch, 16, 64
        )

    def build() -> nearpeak.Case:
        network, x = module()
        network = network.to("cuda", dtype)
        if run == "forward":

            def infer(x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    return network(x)

            return nearpeak.Case(infer, x)
        # A chain of small ops has no parameters, and then the input is what is trained.
        parameters = list(network.parameters()) or [x.requires_grad_()]
        update = torch.optim.AdamW(parameters, fused=True) if run == "step" else None

        def train(x: torch.Tensor) -> None:
            network(x).float().square().mean().backward()
            if update is not None:
                update.step()

        def clear() -> None:
            for parameter in parameters:
                parameter.grad = None

        train(x)
        return nearpeak.Case(train, x, reset=clear)

    sizes = (
        shape_text(batch, channels, edge, edge)
        if name in ("residual block", "convolutional network")
        else (f"{shape_text(batch, tokens, width)} heads {heads}")
    )
    return f"{name} {run} {short(dtype)} {sizes} depth {depth}{' causal' * causal}", build


def activation(draw: Draw) -> Drawn:
    """2**12 to 2**27 elements: activations and functions that few models have, of one or two operands."""
    dtype, elements = draw.float_dtype(), draw.size(2**12, 2**27, 64)
    one: dict[str, Callable[..., Any]] = {
        "mish": functional.mish, "hardswish": functional.hardswish, "elu": functional.elu, "selu": functional.selu,
        "softsign": functional.softsign, "log sigmoid": functional.logsigmoid, "prelu": lambda x: functional.prelu(
            x, torch.full((1,), 0.2, device=x.device, dtype=x.dtype)
        ),
        "log1p of abs": lambda x: torch.log1p(x.abs()), "erfinv": lambda x: torch.erfinv(x), "round": torch.round,
        "nan to num": torch.nan_to_num, "by one number": lambda x: x / x.flatten()[0],
    }  # fmt: skip
    two: dict[str, Callable[..., Any]] = {
        "atan2": torch.atan2, "fmod": torch.fmod, "xlogy": torch.xlogy, "hypot": torch.hypot,
        "logical": lambda x, y: (x > 0) & (y > 0), "swish gate": lambda x, y: functional.silu(x) * y,
        "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    }  # fmt: skip
    name = draw.one(*one, *two, "glu", "column by row", "integers", "complex product", "between points")
    if name in one:
        return f"{name} {short(dtype)} {elements}", lambda: nearpeak.Case(one[name], tensor(elements, dtype=dtype))
    if name in two:
        return f"{name} {short(dtype)} {elements}", lambda: nearpeak.Case(
            two[name], *(tensor(elements, dtype=dtype) for _ in range(2))
        )
    width = draw.power(64, 8192)
    rows = max(2, min(elements, 2**26) // width)
    label = f"{name} {short(dtype)} {shape_text(rows, width)}"
    if name == "glu":
        return label, lambda: nearpeak.Case(functional.glu, tensor(rows, width, dtype=dtype))
    if name == "column by row":
        return label, lambda: nearpeak.Case(torch.mul, tensor(rows, 1, dtype=dtype), tensor(1, width, dtype=dtype))
    if name == "integers":
        return label, lambda: nearpeak.Case(lambda x, y: (x + y) & 255, *(integers(1000, rows, width) for _ in "xy"))
    if name == "complex product":
        return label, lambda: nearpeak.Case(
            torch.mul, *(torch.complex(*(tensor(rows, width, dtype=FP32) for _ in "ri")) for _ in "xy")
        )
    few = draw.one(2, 3, 4)
    return f"{name} {short(dtype)} {shape_text(width, width, few)}", lambda: nearpeak.Case(
        lambda x, y: (x[:, None] - y[None]).abs().sum(-1), *(tensor(min(width, 4096), few, dtype=dtype) for _ in "xy")
    )


def contraction(draw: Draw) -> Drawn:
    """Products in the layouts that einsum and broadcasting give: batches of 1 to 64 of 16 to 2048, vectors."""
    dtype = draw.one(BF16, FP16, FP32, FP32)
    name = draw.one("heads last", "heads last", "left turned", "both turned", "broadcast batch", "added", "outer",
                    "matrix by vector", "rows by rows", "with a tensor", "channels mixed", "of three", "dot",
                    "diagonal by matrix", "symmetric", "linear of rank 4")  # fmt: skip
    batch, m, n, k = draw.power(1, 64), *(draw.size(16, 2048, 16) for _ in range(3))
    while batch * max(m * n, m * k, n * k) > 2**27 or batch * m * n * k > (2**37 if dtype is FP32 else 2**40):
        batch, m, n, k = max(1, batch // 2), max(16, m // 2), max(16, n // 2), max(16, k // 2)
    heads, head = draw.one(4, 8, 16), draw.one(32, 64, 128)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "heads last": ((batch, m, heads, head), (batch, n, heads, head)),
        "left turned": ((batch, k, m), (batch, k, n)), "both turned": ((batch, k, m), (batch, n, k)),
        "broadcast batch": ((batch, m, k), (k, n)), "added": ((batch, m, n), (batch, m, k), (batch, k, n)),
        "outer": ((m,), (n,)), "matrix by vector": ((m, k), (k,)), "rows by rows": ((m, k), (m, k)),
        "with a tensor": ((batch, m, 4, k), (k, n)), "channels mixed": ((batch, k, m), (n, k)),
        "of three": ((m, k), (k, n), (n, m)), "dot": ((m * k,), (m * k,)), "diagonal by matrix": ((m,), (m, n)),
        "symmetric": ((m, k),), "linear of rank 4": ((batch, 4, m, k), (n, k)),
    }  # fmt: skip
    functions: dict[str, Callable[..., Any]] = {
        "heads last": lambda x, y: torch.einsum("bqhd,bkhd->bhqk", x, y),
        "left turned": lambda x, y: torch.einsum("bkm,bkn->bmn", x, y),
        "both turned": lambda x, y: torch.einsum("bkm,bnk->bmn", x, y),
        "broadcast batch": torch.matmul, "added": torch.baddbmm, "outer": torch.outer, "matrix by vector": torch.mv,
        "rows by rows": lambda x, y: torch.einsum("mk,mk->m", x, y),
        "with a tensor": lambda x, y: torch.einsum("bmtk,kn->bmtn", x, y),
        "channels mixed": lambda x, y: torch.einsum("bkm,nk->bnm", x, y),
        "of three": lambda x, y, z: x @ y @ z, "dot": torch.dot, "diagonal by matrix": lambda x, y: torch.diag(x) @ y,
        "symmetric": lambda x: x @ x.t(), "linear of rank 4": functional.linear,
    }  # fmt: skip
    if name in ("heads last",):
        n = m
    label = f"{name} {short(dtype)} {' '.join(shape_text(*shape) for shape in shapes[name])}"
    return label, lambda: nearpeak.Case(functions[name], *(tensor(*shape, dtype=dtype) for shape in shapes[name]))


def selection(draw: Draw) -> Drawn:
    """Elements that a mask or an index selects: tables of 2**6 to 2**16 rows of 16 to 2048, 2**4 to 2**16 taken."""
    dtype = draw.float_dtype()
    name = draw.one("nonzero", "masked select", "where by mask", "boolean rows", "index fill", "put", "largest of rows",
                    "mean of rows", "sum by index", "gradient of rows", "bags", "bags", "buckets", "search", "unique",
                    "one of each row", "two indices", "masked scatter", "along a dimension", "histogram")  # fmt: skip
    rows, width, count = draw.size(2**6, 2**16), draw.size(16, 2048, 16), draw.size(2**4, 2**16)
    while rows * width > 2**26:
        rows //= 2
    while count * width > 2**25:
        count //= 2
    label = f"{name} {short(dtype)} {shape_text(rows, width)} by {count}"

    def build() -> nearpeak.Case:
        table, places = tensor(rows, width, dtype=dtype), integers(rows, count)
        source = tensor(count, width, dtype=dtype)
        if name == "nonzero":
            return nearpeak.Case(torch.nonzero, table)
        if name in ("masked select", "where by mask", "boolean rows", "masked scatter"):
            mask = table[:, 0] > 0 if name == "boolean rows" else table > 0
            functions: dict[str, Callable[..., Any]] = {
                "masked select": torch.masked_select, "where by mask": lambda x, c: torch.where(c, x, x * 2),
                "boolean rows": lambda x, c: x[c], "masked scatter": lambda x, c: x.masked_scatter(c, x),
            }  # fmt: skip
            return nearpeak.Case(functions[name], table, mask)
        if name == "index fill":
            return nearpeak.Case(lambda t, i: t.index_fill_(0, i, 0.5), table, places)
        if name == "put":
            return nearpeak.Case(
                lambda t, i, s: t.put_(i, s), table, integers(rows * width, count), tensor(count, dtype=dtype)
            )
        if name == "largest of rows":
            wide = places[:, None].expand(-1, width)
            return nearpeak.Case(lambda t, i, s: t.scatter_reduce(0, i, s, "amax"), table, wide.contiguous(), source)
        if name == "mean of rows":
            return nearpeak.Case(lambda t, i, s: t.index_reduce_(0, i, s, "mean"), table, places, source)
        if name == "sum by index":
            return nearpeak.Case(lambda t, i, s: t.index_put_((i,), s, accumulate=True), table, places, source)
        if name == "gradient of rows":
            return backward(lambda t: t[places], table.requires_grad_())
        if name == "bags":
            return nearpeak.Case(functional.embedding_bag, integers(rows, max(1, count // 16), 16), table)
        if name in ("buckets", "search"):
            points = torch.linspace(-2, 2, min(rows, 4096), device="cuda")
            values = tensor(count * 16, dtype=FP32)
            return nearpeak.Case(torch.searchsorted if name == "search" else lambda p, v: torch.bucketize(v, p),
                                 points, values)  # fmt: skip
        if name == "unique":
            return nearpeak.Case(torch.unique, places)
        if name == "histogram":
            return nearpeak.Case(lambda i: torch.bincount(i, minlength=rows), places)
        if name == "one of each row":
            few = min(rows, 2**14)
            return nearpeak.Case(lambda p: torch.multinomial(p, 1), torch.rand(few, width, device="cuda"))
        if name == "two indices":
            return nearpeak.Case(lambda t, i, j: t[i, j], table, places, integers(width, count))
        return nearpeak.Case(lambda t, i: torch.take_along_dim(t, i, 1), table, integers(width, rows, 4))

    return label, build


def resizing(draw: Draw) -> Drawn:
    """Images of 16 to 128 pixels, 8 to 256 channels: interpolation, padding, windows and pooling that few have."""
    dtype = draw.float_dtype()
    name = draw.one("bicubic", "area", "linear", "trilinear", "nearest 3-d", "nearest exact",
                    "smaller without aliasing", "by a grid", "unfold", "fold", "reflected", "replicated", "around",
                    "pixel unshuffle", "channel shuffle", "adaptive max 5", "root of squares", "average 1-d",
                    "max 1-d with overlap", "unpooled", "max 5/1", "average 7/3", "max 3-d with overlap",
                    "average 3-d with overlap")  # fmt: skip
    batch, channels, edge = draw.power(1, 32), draw.power(8, 256), draw.one(16, 24, 32, 56, 64, 128)
    dimensions = 1 if name in ("linear", "average 1-d", "max 1-d with overlap") else 3 if "3-d" in name else 2
    dimensions = 3 if name == "trilinear" else dimensions
    edge = edge**2 if dimensions == 1 else min(edge, 32) if dimensions == 3 else edge
    while batch * channels * edge**dimensions > 2**24:
        batch, channels = max(1, batch // 2), max(4, channels // 2)
    resize = functional.interpolate
    functions: dict[str, Callable[..., Any]] = {
        "bicubic": lambda x: resize(x, scale_factor=2, mode="bicubic"),
        "area": lambda x: resize(x, size=(8, 8), mode="area"),
        "linear": lambda x: resize(x, scale_factor=2, mode="linear"),
        "trilinear": lambda x: resize(x, scale_factor=2, mode="trilinear"), "nearest 3-d":
        lambda x: resize(x, scale_factor=2), "nearest exact": lambda x: resize(x, scale_factor=2, mode="nearest-exact"),
        "smaller without aliasing": lambda x: resize(x, size=(12, 12), mode="bilinear", antialias=True),
        "unfold": lambda x: functional.unfold(x, 3, padding=1),
        "fold": lambda x: functional.fold(x, (edge, edge), 2, stride=2),
        "reflected": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        "replicated": lambda x: functional.pad(x, (2, 2, 2, 2), mode="replicate"),
        "around": lambda x: functional.pad(x, (1, 1, 1, 1), mode="circular"),
        "pixel unshuffle": lambda x: functional.pixel_unshuffle(x, 2),
        "channel shuffle": lambda x: functional.channel_shuffle(x, 4),
        "adaptive max 5": lambda x: functional.adaptive_max_pool2d(x, 5),
        "root of squares": lambda x: functional.lp_pool2d(x, 2, 2),
        "average 1-d": lambda x: functional.avg_pool1d(x, 4),
        "max 1-d with overlap": lambda x: functional.max_pool1d(x, 8, 4, 2),
        "unpooled": lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2),
        "max 5/1": lambda x: functional.max_pool2d(x, 5, 1, 2), "average 7/3": lambda x: functional.avg_pool2d(x, 7, 3),
        "max 3-d with overlap": lambda x: functional.max_pool3d(x, 3, 2, 1),
        "average 3-d with overlap": lambda x: functional.avg_pool3d(x, 3, 2, 1),
    }  # fmt: skip
    shape = (batch, channels, *(edge,) * dimensions)
    if name == "fold":
        shape = (batch, 4 * channels, (edge // 2) ** 2)

    def build() -> nearpeak.Case:
        x = tensor(*shape, dtype=dtype)
        if name == "by a grid":
            grid = torch.rand(batch, edge, edge, 2, device="cuda", dtype=dtype) * 2 - 1
            return nearpeak.Case(lambda x, g: functional.grid_sample(x, g, align_corners=False), x, grid)
        return nearpeak.Case(functions[name], x)

    return f"{name} {short(dtype)} {shape_text(*shape)}", build


def factorization(draw: Draw) -> Drawn:
    """Matrices of 8 to 1024 in float32, alone or in batches of up to 256, and distances of 2**4 to 2**12 points."""
    name = draw.one("cholesky", "cholesky", "solve", "solve", "inverse", "determinant", "triangular", "qr", "lu",
                    "eigenvalues", "singular values", "distances", "distances by one", "distances within",
                    "cosines", "unit rows", "pairs of rows")  # fmt: skip
    size, batch = draw.size(8, 1024, 8), draw.one(1, 1, draw.power(2, 256))
    if name in ("eigenvalues", "singular values", "qr"):
        size, batch = min(size, 256), min(batch, 8)
    while batch * size**3 > 2**31:
        batch = max(1, batch // 2)
    points, others, width = draw.size(16, 4096), draw.size(16, 4096), draw.size(4, 512)
    if name in ("distances by one", "distances within"):
        points, others = min(points, 2048), min(others, 2048)
    if name in ("distances", "distances by one", "distances within", "cosines", "unit rows", "pairs of rows"):
        functions: dict[str, Callable[..., Any]] = {
            "distances": torch.cdist, "distances by one": lambda x, y: torch.cdist(x, y, p=1.0),
            "distances within": lambda x, y: torch.pdist(x), "cosines": functional.cosine_similarity,
            "unit rows": lambda x, y: functional.normalize(x), "pairs of rows": functional.pairwise_distance,
        }  # fmt: skip
        many = others if name.startswith("distances") else points
        return f"{name} {shape_text(points, width)} {many}", lambda: nearpeak.Case(
            functions[name], tensor(points, width, dtype=FP32), tensor(many, width, dtype=FP32)
        )
    linalg = torch.linalg
    solvers: dict[str, Callable[..., Any]] = {
        "cholesky": lambda a, b: linalg.cholesky(a), "solve": linalg.solve, "inverse": lambda a, b: linalg.inv(a),
        "determinant": lambda a, b: linalg.det(a), "qr": lambda a, b: linalg.qr(a),
        "triangular": lambda a, b: linalg.solve_triangular(a, b, upper=True), "lu": lambda a, b: linalg.lu_factor(a),
        "eigenvalues": lambda a, b: linalg.eigh(a), "singular values": lambda a, b: linalg.svd(a),
    }  # fmt: skip
    shape = (size, size) if batch == 1 else (batch, size, size)

    def build() -> nearpeak.Case:
        a = tensor(*shape, dtype=FP32)
        a = a @ a.mT / size + torch.eye(size, device="cuda")  # positive definite
        return nearpeak.Case(solvers[name], a, tensor(*shape[:-1], 8, dtype=FP32))

    return f"{name} {shape_text(*shape)}", build


def spatial(draw: Draw) -> Drawn:
    """Convolutions that `convolution` does not draw: transposed, depthwise and grouped in 1 and 3 dimensions, kernels
    with two sizes, wide dilation, with a bias."""
    dtype = draw.one(BF16, FP16, FP32, FP32)
    name = draw.one("transposed 1-d", "transposed 3-d", "transposed with groups", "transposed depthwise",
                    "depthwise 1-d", "depthwise 1-d", "depthwise 3-d", "grouped 1-d", "grouped 3-d", "wide and low",
                    "with bias", "with bias", "far apart", "one place with bias", "causal 1-d")  # fmt: skip
    dimensions = 1 if "1-d" in name or name == "far apart" else 3 if "3-d" in name else 2
    batch, inner, outer = draw.power(1, 32), *(draw.one(16, 32, 48, 64, 96, 128, 256) for _ in range(2))
    edge = {1: draw.size(128, 4096, 64), 2: draw.one(14, 28, 32, 56, 112), 3: draw.one(8, 16, 24)}[dimensions]
    kernel: tuple[int, ...] = (draw.one(3, 3, 4, 5, 7),) * dimensions if dimensions < 3 else (3, 3, 3)
    options: dict[str, Any] = {}
    groups = draw.one(2, 4, 8) if "group" in name else 1
    if "depthwise" in name:
        outer = groups = inner
    if "transposed" in name:
        options["stride"] = draw.one(1, 2)
    elif name == "wide and low":
        kernel, options["padding"] = draw.one(((3, 7), (1, 3)), ((1, 9), (0, 4)), ((7, 1), (3, 0)))
    elif name == "far apart":
        options["dilation"] = draw.one(2, 4, 16)
    elif name == "one place with bias":
        kernel = (1, 1)
    elif name == "causal 1-d":
        options["padding"] = kernel[0] - 1
    else:
        options["padding"] = tuple(size // 2 for size in kernel)
    groups = min(groups, inner, outer)
    inner, outer = inner // groups * groups, outer // groups * groups
    while batch * edge**dimensions * inner * outer // groups * math.prod(kernel) > 2e11:
        batch //= 2
        if not batch:
            batch, edge = 1, edge // 2
    while batch > 1 and batch * edge**dimensions * max(inner, outer) > 2**26:
        batch //= 2
    turned = "transposed" in name
    function = getattr(functional, f"conv_transpose{dimensions}d" if turned else f"conv{dimensions}d")
    weights = (inner, outer // groups) if turned else (outer, inner // groups)
    last = dimensions == 2 and draw.chance(0.4)

    def build() -> nearpeak.Case:
        order = torch.channels_last if last else torch.contiguous_format
        x = tensor(batch, inner, *(edge,) * dimensions, dtype=dtype).to(memory_format=order)
        weight = tensor(*weights, *kernel, dtype=dtype).to(memory_format=order)
        bias = tensor(outer, dtype=dtype) if "bias" in name else None
        return nearpeak.Case(lambda x, w: function(x, w, bias, groups=groups, **options), x, weight)

    sizes = f"{shape_text(batch, inner, *(edge,) * dimensions)} to {outer} by {shape_text(*kernel)}"
    rest = "".join(f" {key} {value}" for key, value in options.items())
    return f"{name} {short(dtype)} {sizes}{rest} groups {groups}{' last' * last}", build


def composite(draw: Draw) -> Drawn:
    """Norms, losses and scans that models write out or that few have: 2**12 to 2**25 elements."""
    dtype = draw.float_dtype()
    rows, width = draw.size(16, 2**14), draw.size(16, 4096, 16)
    while rows * width > 2**25:
        rows = max(1, rows // 2)
    batch, channels, edge = draw.power(1, 32), draw.power(16, 256), draw.one(14, 28, 32, 56, 64)
    while batch * channels * edge**2 > 2**25:
        batch, channels = max(1, batch // 2), max(16, channels // 2)
    flat: dict[str, Callable[..., Any]] = {
        "huber": functional.huber_loss, "cosine loss": lambda x, y: functional.cosine_embedding_loss(
            x, y, torch.ones(rows, device=x.device, dtype=x.dtype)
        ),
        "triplet": lambda x, y: functional.triplet_margin_loss(x, y, x * 0.5),
        "gaussian nll": lambda x, y: functional.gaussian_nll_loss(x, y, y * y + 1),
        "soft targets": lambda x, y: functional.cross_entropy(x, y.softmax(-1)),
        "kl of softmax": lambda x, y: functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        "l1 of rows": lambda x, y: x / x.abs().sum(1, keepdim=True), "l2 of rows":
        lambda x, y: x / x.norm(dim=1, keepdim=True), "by all": lambda x, y: x / x.norm(),
        "sums from the end": lambda x, y: x.flip(-1).cumsum(-1).flip(-1), "masked sums": lambda x, y: torch.cumsum(
            x * (x > 0), 1
        ),
        "std": lambda x, y: x.std(-1), "any": lambda x, y: (x > 3).any(-1), "median": lambda x, y: x.median(-1),
        "least and largest": lambda x, y: torch.aminmax(x, dim=-1), "softmin": lambda x, y: functional.softmin(x, -1),
        "quantile": lambda x, y: torch.quantile(x.float(), 0.9, dim=-1), "kth": lambda x, y: torch.kthvalue(x, 3, -1),
        "close": lambda x, y: torch.isclose(x, y).all(), "least of rows": lambda x, y: torch.argmin(x, 1),
        "logsumexp and relu": lambda x, y: torch.relu(torch.logsumexp(x, 1, keepdim=True) - 1),
    }  # fmt: skip
    images: dict[str, Callable[..., Any]] = {
        "rms of channels": lambda x: x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + 1e-5),
        "layer norm of images": lambda x: functional.layer_norm(x, x.shape[1:]),
        "local response": lambda x: functional.local_response_norm(x, 5),
        "softmax of channels": lambda x: functional.softmax(x, 1), "sum of images": lambda x: x.sum((0, 2, 3)),
        "mean of places": lambda x: x.mean((2, 3)), "sums of the middle": lambda x: x.cumsum(1),
        "largest of channels": lambda x: x.max(1), "group norm of few": lambda x: functional.group_norm(x, 4),
        "norm of clips": lambda x: functional.batch_norm(x.unflatten(2, (2, -1)), None, None, training=True),
    }  # fmt: skip
    name = draw.one(*flat, *images, "classes of places", "smoothed classes", "weighted classes", "norm of rows")
    if name in images:
        shape = (batch, channels, edge, edge)
        return f"{name} {short(dtype)} {shape_text(*shape)}", lambda: nearpeak.Case(
            images[name], tensor(*shape, dtype=dtype)
        )
    label = f"{name} {short(dtype)} {shape_text(rows, width)}"
    if name in flat:
        return label, lambda: nearpeak.Case(flat[name], *(tensor(rows, width, dtype=dtype) for _ in "xy"))
    if name == "norm of rows":
        return label, lambda: nearpeak.Case(
            lambda x: functional.batch_norm(x, None, None, training=True), tensor(rows, width, dtype=dtype)
        )
    if name == "classes of places":
        classes, places = draw.one(2, 10, 21), min(edge, 64) * 2
        return f"{name} {short(dtype)} {shape_text(batch, classes, places, places)}", lambda: nearpeak.Case(
            functional.cross_entropy, tensor(batch, classes, places, places, dtype=dtype),
            integers(classes, batch, places, places),
        )  # fmt: skip
    options: dict[str, Any] = {"label_smoothing": 0.1} if name == "smoothed classes" else {}

    def build() -> nearpeak.Case:
        weight = None if options else torch.rand(width, device="cuda", dtype=dtype)
        return nearpeak.Case(
            lambda x, t: functional.cross_entropy(x, t, weight=weight, **options),
            tensor(rows, width, dtype=dtype), integers(width, rows),
        )  # fmt: skip

    return label, build


class Separable(nn.Module):
    """An inverted residual with a depthwise convolution and a gate on its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = 4 * channels
        self.wide = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU()
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, channels // 4, 1), nn.SiLU(), nn.Conv2d(channels // 4, inner, 1)
        )
        self.narrow = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(self.wide(x))
        return x + self.narrow(y * torch.sigmoid(self.gate(y)))


class Pyramid(nn.Module):
    """Convolutions down and up again, with a connection across."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GroupNorm(8, 2 * channels), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.last = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.up(self.down(first))], 1))


class Cells(nn.Module):
    """A recurrent network that is written out: a cell in a loop."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.cell, self.head = steps, nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], x.shape[2])
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
        return self.head(state)


class Dense(nn.Module):
    """Layers that each see the results of all before them."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels + 32 * place), nn.ReLU(),
                          nn.Conv2d(channels + 32 * place, 32, 3, padding=1, bias=False))
            for place in range(depth)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def network(draw: Draw) -> Drawn:
    """Small models that `model` does not draw, forward alone, forward and backward, and steps of three optimizers.

    1 to 64 images of 28 to 112 pixels, 32 to 256 channels; 1 to 32 sequences of 32 to 512 tokens, widths 64 to 1024.
    """
    name = draw.one("separable", "separable", "pyramid", "cells", "dense", "autoencoder", "convolutions of a sequence",
                    "self-attention", "decoder layer", "gated recurrent classifier", "bags and head", "towers",
                    "perceptron of few", "perceptron of few")  # fmt: skip
    dtype, run = draw.one(FP32, FP32, BF16, FP16), draw.one("forward", "forward", "training", "step")
    batch, tokens, width = draw.power(1, 32), draw.power(32, 512), draw.one(64, 128, 256, 512, 1024)
    channels, edge, depth = draw.one(32, 64, 128, 256), draw.one(28, 56, 112), draw.one(1, 2, 4)
    kind, many = draw.one("AdamW", "Adam", "SGD"), draw.power(1, 512)
    while batch * channels * edge**2 * 4 > 2**26:
        batch = max(1, batch // 2)
        edge = edge // 2 if batch == 1 else edge

    def module() -> tuple[nn.Module, torch.Tensor]:
        images, sequence = (batch, channels, edge, edge), (batch, tokens, width)
        x = lambda shape: tensor(*shape, dtype=dtype)  # noqa: E731
        if name == "separable":
            return nn.Sequential(*(Separable(channels) for _ in range(depth))), x(images)
        if name == "pyramid":
            return Pyramid(channels), x((batch, 3, edge, edge))
        if name == "cells":
            return Cells(width, min(tokens, 64)), x(sequence)
        if name == "dense":
            return Dense(channels, 2 * depth), x(images)
        if name == "autoencoder":
            inner = max(16, width // 8)
            layers: list[nn.Module] = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, inner), nn.ReLU(),
                                       nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 784),
                                       nn.Sigmoid()]  # fmt: skip
            return nn.Sequential(*layers), x((many, 784))
        if name == "convolutions of a sequence":
            layers = []
            for place in range(2 * depth):
                far = 2**place
                layers += [nn.Conv1d(width, width, 3, padding=far, dilation=far), nn.ReLU(), nn.Dropout(0.1)]
            return nn.Sequential(*layers), x((batch, width, tokens))
        if name == "self-attention":
            layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 2 * width, batch_first=True)
            return layer, x(sequence)
        if name == "decoder layer":
            layers = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1),
                      nn.Linear(4 * width, width), nn.Softmax(-1)]  # fmt: skip
            return nn.Sequential(*layers), x(sequence)
        if name == "gated recurrent classifier":
            return GatedPool(width, depth), x(sequence)
        if name == "bags and head":
            layers = [nn.EmbeddingBag(20000, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
            return nn.Sequential(*layers), integers(20000, many, 32)
        if name == "towers":
            layers = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
                      nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(),
                      nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * channels, 256), nn.ReLU(),
                      nn.Linear(256, 10)]  # fmt: skip
            return nn.Sequential(*layers), x((batch, 3, edge, edge))
        layers = [nn.Linear(width, 2 * width), nn.ReLU(), nn.BatchNorm1d(2 * width), nn.Linear(2 * width, width),
                  nn.Tanh(), nn.Linear(width, 10)]  # fmt: skip
        return nn.Sequential(*layers), x((max(2, many), width))

    def build() -> nearpeak.Case:
        network, x = module()
        network = network.to("cuda", dtype)
        if run == "forward":
            network.eval()

            def infer(x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    return network(x)

            return nearpeak.Case(infer, x)
        parameters = list(network.parameters())
        update = getattr(torch.optim, kind)(parameters, lr=1e-3) if run == "step" else None

        def train(x: torch.Tensor) -> None:
            network(x).float().square().mean().backward()
            if update is not None:
                update.step()

        def clear() -> None:
            for parameter in parameters:
                parameter.grad = None

        train(x)
        return nearpeak.Case(train, x, reset=clear)

    sizes = shape_text(batch, channels, edge, edge)
    if name not in ("separable", "pyramid", "dense", "towers"):
        sizes = shape_text(
            many if name in ("autoencoder", "bags and head", "perceptron of few") else batch, tokens, width
        )
    return f"{name} {run}{f' {kind}' if run == 'step' else ''} {short(dtype)} {sizes} depth {depth}", build


class GatedPool(nn.Module):
    """A gated recurrent network and a classifier on its last state."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(width, width, layers, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


FAMILIES: Mapping[str, Callable[[Draw], Drawn]] = {
    function.__name__: function
    for function in (
        pointwise, cast, reduction, normalization, loss, indexing, scan, sorting, movement, creation, matrix, attention,
        convolution, pooling, recurrent, fourier, optimizer, model, activation, contraction, selection, resizing,
        factorization, spatial, composite, network,
    )
}  # fmt: skip
