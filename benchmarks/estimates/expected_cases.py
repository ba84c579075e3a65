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
    tokens = max(1, elements // (heads * head))
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


FAMILIES: Mapping[str, Callable[[Draw], Drawn]] = {
    function.__name__: function
    for function in (
        pointwise, cast, reduction, normalization, loss, indexing, scan, sorting, movement, creation, matrix, attention,
        convolution, pooling, recurrent, fourier, optimizer, model,
    )
}  # fmt: skip
