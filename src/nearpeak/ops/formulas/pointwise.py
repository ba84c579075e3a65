"""Pointwise operators: every operand is read once, the result is written once, one operation per element.

The other families of streaming operators (reductions, norms, losses, optimizers) build on the parts here: `read`,
`written`, `distinct` and `arithmetic`.

Masked elements are not charged: a causal mask hides half, and a kernel need not load them. `where` reads one of its
branches for each element, at least the branch with fewer bytes. `masked_fill` reads the mask; in place it writes only
where the mask is set, which may be nowhere. What the arguments alone would save is not charged either: `pow` with
exponent 0 reads nothing.

Clamping and `nan_to_num` in place change few elements of usual data, and possibly none: no write is charged. Savings
that need special values are not deducted: `relu_` writes elements that it does not change, and `any` reads all of its
input although one element can decide (torch's kernels do, as measured on a CPU).

One operation per element is a lower bound: an exponential takes several instructions. The rate is that of float32,
although vector units do twice as many operations in half precision. This is safe as long as memory is the limit: an
H200 does 14 float32 operations in the time of one byte (66.9 TFLOP/s, 4.8 TB/s), and no operator here comes near 7. A
test checks this for the operators of usual models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

SECTOR_BYTES = 32

TAGGED = """
__ilshift__ __ixor__ __lshift__ __rshift__ __xor__ _conj_physical abs acos acos_ acosh acosh_ add add_ addcdiv addcdiv_
addcmul addcmul_ angle asin asin_ asinh asinh_ atan atan2 atan2_ atan_ atanh atanh_ bitwise_and bitwise_and_
bitwise_left_shift bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or bitwise_or_ bitwise_right_shift
bitwise_right_shift_ bitwise_xor bitwise_xor_ ceil ceil_ celu celu_ clamp clamp_ clamp_max clamp_max_ clamp_min
clamp_min_ clip clip_ conj_physical conj_physical_ copysign cos cos_ cosh cosh_ deg2rad deg2rad_ digamma digamma_ div
div_ elu elu_ eq erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expm1 expm1_ float_power float_power_ floor
floor_ fmax fmin fmod fmod_ frac frac_ frexp gcd ge gelu gelu_backward gt hardshrink hardsigmoid hardsigmoid_ hardtanh
hardtanh_ heaviside hypot hypot_ i0 i0_ igamma igamma_ igammac igammac_ isfinite isinf isnan isneginf isposinf lcm ldexp
ldexp_ le leaky_relu leaky_relu_ lerp lerp_ lgamma lgamma_ log log10 log10_ log1p log1p_ log2 log2_ log_ logaddexp
logaddexp2 logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit
logit_ logit_backward lt masked_fill maximum minimum mish mul mul_ mvlgamma mvlgamma_ nan_to_num nan_to_num_ ne neg neg_
nextafter nextafter_ polygamma polygamma_ positive pow pow_ rad2deg rad2deg_ reciprocal reciprocal_ relu relu6 relu_
remainder remainder_ round round_ rrelu rsqrt rsqrt_ rsub selu selu_ sgn sgn_ sigmoid sigmoid_ sigmoid_backward sign
sign_ signbit silu silu_ silu_backward sin sin_ sinc sinc_ sinh sinh_ softplus softshrink special_airy_ai
special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx
special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_spherical_bessel_j0 special_xlog1py special_zeta sqrt sqrt_ square square_ sub sub_ tan tan_ tanh tanh_
tanh_backward threshold threshold_backward true_divide trunc trunc_ where xlogy xlogy_
""".split()
"""The operators that torch itself tags as pointwise, in all of their overloads; a test compares them with torch."""

TAGGED_OVERLOADS = ("max.other", "max.out", "min.other", "min.out")
"""Overloads that are pointwise while their operator is a reduction."""

UNTAGGED = """
__and__ __iand__ __ior__ __irshift__ __or__ _add_relu _add_relu_ _dirichlet_grad _prelu_kernel _prelu_kernel_backward
_standard_gamma_grad abs_ complex copysign_ elu_backward
eq_ floor_divide floor_divide_ gcd_ ge_ gelu_ glu glu_backward glu_backward_jvp glu_jvp gt_ hardshrink_backward
hardsigmoid_backward hardswish
hardswish_ hardswish_backward hardtanh_backward heaviside_ lcm_ le_ leaky_relu_backward linalg_cross
log_sigmoid_backward log_sigmoid_forward lt_ masked_fill_ mish_ mish_backward ne_ polar rrelu_with_noise_backward
softplus_backward softshrink_backward threshold_
""".split()
"""Operators without the tag that read every operand once and write their result once all the same."""

MOSTLY_UNCHANGED = ("clamp_", "clamp_max_", "clamp_min_", "clip_", "nan_to_num_")
"""Operators that in place leave usual data as they are."""

MASKED = ("where", "masked_fill", "masked_fill_")
"""Operators that need not read all that they are given."""

WITHOUT_ARITHMETIC = frozenset(
    """
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _conj_physical abs
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor complex conj_physical copysign
    frexp isfinite isinf isnan isneginf isposinf logical_and logical_not logical_or logical_xor masked_fill nan_to_num
    neg nextafter positive sgn sign signbit threshold threshold_backward where
    """.split()
)
"""Operators that only choose between values or look at bits: no floating-point operation is unavoidable."""


def distinct(tensor: Tensor) -> float:
    """How many elements of it differ in memory: expanded ones count once."""
    return tensor.bytes / tensor.item_bytes


def read(op: Op, *, unread: Iterable[str] = ()) -> tuple[Tensor, ...]:
    """The operands that it reads: not what it only writes, not the arguments named in `unread`.

    `self` of an in-place operator is read. Tensors without dimensions are left out: most are numbers from the host,
    and the others are one element.
    """
    skipped = {*unread, *(name for name in op.mutated if name != "self")}
    tensors = op.tensors(*(name for name in op.arguments if name not in skipped))
    return tuple(tensor for tensor in tensors if tensor.shape)


def arithmetic(inputs: Iterable[Tensor], outputs: Iterable[Tensor], count: float) -> dict[str, float]:
    """`count` operations of the vector units under the dtype that they work in.

    float64 where an input has it, float32 for all other floating and complex types; nothing for integers and booleans,
    unless they are turned into floating-point numbers.
    """
    dtypes = {tensor.dtype for tensor in inputs}
    if not count:
        return {}
    if dtypes & {"float64", "complex128"}:
        return {"float64": count}
    if any(_has_fraction(dtype) for dtype in dtypes | {tensor.dtype for tensor in outputs}):
        return {"float32": count}
    return {}


def kept_part(tensor: Tensor, keep: float) -> tuple[Tensor, float]:
    """What is read of a tensor of which a random share is kept: pieces of 32 bytes, the smallest that memory moves, of
    which any element is kept. That is nearly all for usual shares."""
    return tensor, tensor.bytes * (1 - (1 - keep) ** (SECTOR_BYTES / tensor.item_bytes))


def _has_fraction(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def pointwise_flops(name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> dict[str, float]:
    """One operation per element of the result, or per distinct combination of operands where those are fewer.

    The exponential of a row that is expanded to four is computed once at the least, and written four times.
    """
    if not outputs or name.removesuffix("_") in WITHOUT_ARITHMETIC or name in WITHOUT_ARITHMETIC:
        return {}
    elements = float(max(tensor.elements for tensor in outputs))
    combinations = 1.0
    for tensor in {*inputs}:
        combinations *= distinct(tensor)
        if (
            combinations >= elements
        ):  # the others could only add to it, unless they are empty, and then so is the result
            break
    return arithmetic(inputs, outputs, min(elements, combinations))


def total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of counts by dtype."""
    sums: dict[str, float] = {}
    for count in counts:
        for dtype, value in count.items():
            sums[dtype] = sums.get(dtype, 0.0) + value
    return sums


@formula(*(f"aten.{name}" for name in (*TAGGED, *TAGGED_OVERLOADS, *UNTAGGED) if name not in MASKED))
def pointwise(op: Op) -> Cost:
    """Reads each operand once, writes the result; one operation per element of it.

    A power of 0 is 1 whatever its base is.
    """
    name = op.packet.removeprefix("aten.")
    power_of_zero = op.packet in ("aten.pow", "aten.pow_") and _is_zero(op.arguments.get("exponent"))
    unread = ("self",) if power_of_zero else ()
    inputs, outputs = read(op, unread=unread), op.written
    if any(not tensor.elements for tensor in inputs) and any(tensor.elements for tensor in outputs):
        # A sparse operand, of which nothing is known, is recorded as an empty one; in place it may change nothing.
        return Cost(family="pointwise", writes=accesses(*(() if op.mutated else outputs)), model="operands")
    return Cost(
        family="pointwise",
        reads=accesses(*inputs),
        writes=() if name in MOSTLY_UNCHANGED else accesses(*outputs),
        vector_flops={} if unread else pointwise_flops(name, inputs, outputs),
    )


@formula("aten.where")
def where(op: Op) -> Cost:
    """Reads the condition and, for each element, one of two values: the branch with fewer bytes at the least."""
    branches = [op.arguments.get(name) for name in ("self", "other")]
    tensors = [branch for branch in branches if isinstance(branch, Tensor)]
    least = min(tensors, key=lambda tensor: tensor.bytes) if len(tensors) == 2 else None
    needed = least if least is not None and least.shape else None
    return Cost(
        family="pointwise",
        reads=accesses(op.tensor("condition"), needed),
        writes=accesses(*op.written),
    )


@formula("aten.masked_fill", "aten.masked_fill_")
def masked_fill(op: Op) -> Cost:
    """Reads the mask. Writes the result; in place only what the mask selects, which may be nothing."""
    writes = () if op.packet.endswith("_") else op.written
    return Cost(family="pointwise", reads=accesses(op.tensor("mask")), writes=accesses(*writes))


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value == 0
