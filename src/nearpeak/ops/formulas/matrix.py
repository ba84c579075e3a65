"""Matrix products.

Counted: a multiply-add as 2 FLOPs on the engine that takes the operands' dtype, each operand once through its strides,
the result once. Not counted: adding the bias and scaling by `alpha` or `beta`, which ride on the accumulator, nor are
algorithms of the Strassen kind considered, which no library uses, nor float32 products that are put together from
several of a shorter dtype (three of tf32, nine of bfloat16), which no library that torch calls does unless it is told
to. `beta=0` means that the addend is not read, `alpha=0` that the factors are not. A complex product takes three real
ones (Gauss), the fewest that libraries use.

Products with a sparse factor count a multiply-add for each stored value and column, on the vector units, and read the
stored values; which rows of the dense factor they read is not known, nor is what the indices take.

Products with 2:4 structured sparsity multiply only the half of a factor that is stored: half of the multiply-adds of a
dense product, at the dense rate of the dtype. float32 runs in tf32. The stored half, the positions of its numbers and
the other factor are read once, the result is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nearpeak.ops.cost import Cost, Family, Part, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def engines(dtype: str, flops: float, *, tf32: bool) -> tuple[dict[str, float], dict[str, float]]:
    """FLOPs of a product of `dtype` operands as (matrix engine, vector units), by the dtype names of ceilings.

    float32 runs on the vector units unless tf32 is allowed. Products of integers wider than 8 bits have no ceiling and
    count nothing.

    >>> engines("float8_e4m3fn", 8.0, tf32=False), engines("float32", 8.0, tf32=False)
    (({'float8': 8.0}, {}), ({}, {'float32': 8.0}))
    """
    if dtype in _PARTS:
        dtype, flops = _PARTS[dtype], 3 * flops
    if not flops:
        return {}, {}
    if dtype == "float32":
        return ({"tfloat32": flops}, {}) if tf32 else ({}, {"float32": flops})
    if dtype.startswith(("float8", "float4")):
        return {dtype[:6]: flops}, {}
    return ({dtype: flops}, {}) if dtype in ("float64", "bfloat16", "float16", "int8") else ({}, {})


def vector_dtype(dtype: str) -> str:
    """The dtype in which vector units work on `dtype`: float32 for everything but doubles."""
    return "float64" if dtype in ("float64", "complex128") else "float32"


def result(op: Op) -> Tensor:
    """The first output, or what the op writes where it returns nothing."""
    return op.outputs[0] if op.outputs else op.tensor(op.mutated[0])


def product_cost(
    family: Family,
    dtype: str,
    reads: Iterable[Part],
    writes: Iterable[Part],
    *,
    flops: float,
    other_flops: float = 0.0,
    tf32: bool = False,
) -> Cost:
    """The cost of an op that does `flops` of products in `dtype`, and `other_flops` on the vector units beside them."""
    matrix, vector = engines(dtype, flops, tf32=tf32)
    products = dict(matrix or vector)
    if other_flops:
        name = vector_dtype(dtype)
        vector[name] = vector.get(name, 0.0) + other_flops
    return Cost(
        family=family,
        reads=accesses(*reads),
        writes=accesses(*writes),
        flops=matrix,
        vector_flops=vector,
        products=products,
    )


def matrix_product(
    op: Op,
    left: str,
    right: str,
    *,
    added: str | None = None,
    contracted: int | None = None,
    dtype: str | None = None,
    vector: Mapping[str, float] | None = None,
    extra: tuple[Part, ...] = (),
) -> Cost:
    """`left @ right + added`: an element of the result takes `contracted` multiply-adds (the last size of `left`)."""
    out = result(op)
    a, b = op.tensor(left), op.tensor(right)
    if a.sparse is not None or b.sparse is not None:
        return _sparse_product(op, a, b, added)
    if not out.elements:
        return Cost(family="matrix")
    inner = (a.shape[-1] if contracted is None else contracted) * _packed(a)
    if not b.elements:  # a sparse factor, of which nothing is known, is recorded as an empty one
        inner = 0
    reads: list[Part] = list(extra)
    scale = op.arguments.get("alpha", 1)
    if scale == 0:
        inner = 0
    else:
        reads += [a, b]
    if added is not None and op.arguments.get("beta", 1) != 0:
        reads += op.tensors(added)
    flops, vector_flops = engines(dtype or a.dtype, 2.0 * out.elements * inner, tf32=op.tf32_products)
    products = dict(flops or vector_flops) if vector else None
    for name, count in (vector or {}).items():
        vector_flops[name] = vector_flops.get(name, 0.0) + count
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.written),
        flops=flops,
        vector_flops=vector_flops,
        products=products,
    )


def _sparse_product(op: Op, a: Tensor, b: Tensor, added: str | None) -> Cost:
    """A multiply-add for each stored value and column. Which rows of a dense factor are read is not known."""
    out = result(op)
    sparse, dense = (a, b) if a.sparse is not None else (b, a)
    reads: list[Part] = [stored_part(factor) for factor in (a, b) if factor.sparse is not None]
    if added is not None and op.arguments.get("beta", 1) != 0:
        reads += op.tensors(added)
    columns = dense.shape[-1 if sparse is a else 0] if dense.sparse is None and dense.shape else 0
    flops = 2.0 * (sparse.sparse.stored if sparse.sparse is not None else 0) * columns
    return Cost(
        family="indexing",
        reads=accesses(*reads),
        writes=accesses(stored_part(out)),
        vector_flops={sparse.dtype: flops} if flops and "float" in sparse.dtype else {},
    )


def stored_part(tensor: Tensor) -> Part:
    """A tensor; of a sparse one the values, without the indices beside them."""
    return tensor if tensor.sparse is None else (tensor, tensor.sparse.stored * tensor.item_bytes)


@formula("aten._sparse_addmm", "aten.sspaddmm", "aten.hspmm")
def _sparse_addmm(op: Op) -> Cost:
    if op.tensor("mat1").sparse is None:  # a trace file does not show which values there are
        return Cost(family="indexing", writes=accesses(*op.written), model="operands")
    return matrix_product(op, "mat1", "mat2", added="self" if "self" in op.arguments else None)


@formula("aten._sparse_mm", "aten._sparse_sparse_matmul")
def _sparse_mm(op: Op) -> Cost:
    left, right = ("sparse", "dense") if "sparse" in op.arguments else ("self", "other")
    return matrix_product(op, left, right)


@formula("aten._coalesce", "aten._to_sparse", "aten._to_sparse_csr", "aten._to_sparse_csc", "aten._to_dense")
def _conversion(op: Op) -> Cost:
    """Stored values read and written, of a dense tensor all of them; the indices beside them are not counted."""
    reads, writes = map(stored_part, op.inputs), map(stored_part, op.outputs)
    return Cost(family="movement", reads=accesses(*reads), writes=accesses(*writes), model="operands")


def _packed(tensor: Tensor) -> int:
    """How many numbers one element holds."""
    return 2 if tensor.dtype == "float4_e2m1fn_x2" else 1


@formula("aten.mm", "aten.bmm", "aten._int_mm")
def _two_matrices(op: Op) -> Cost:
    return matrix_product(op, "self", "mat2")


@formula("aten.matmul")
def _matmul(op: Op) -> Cost:
    return matrix_product(op, "self", "other")


@formula("aten.mv")
def _matrix_vector(op: Op) -> Cost:
    return matrix_product(op, "self", "vec")


@formula("aten.dot")
def _dot(op: Op) -> Cost:
    return matrix_product(op, "self", "tensor")


@formula("aten.vdot")
def _vdot(op: Op) -> Cost:
    return matrix_product(op, "self", "other")


@formula("aten.linear")
def _linear(op: Op) -> Cost:
    return matrix_product(op, "input", "weight", added="bias")


@formula("aten.addmm", "aten.addmm_")
def _addmm(op: Op) -> Cost:
    return matrix_product(op, "mat1", "mat2", added="self")


@formula("aten._addmm_activation")
def _addmm_activation(op: Op) -> Cost:
    """One vector FLOP per element for the activation, whichever it is."""
    out = result(op)
    return matrix_product(op, "mat1", "mat2", added="self", vector={vector_dtype(out.dtype): float(out.elements)})


@formula("aten.addmv", "aten.addmv_")
def _addmv(op: Op) -> Cost:
    return matrix_product(op, "mat", "vec", added="self")


@formula("aten.baddbmm", "aten.baddbmm_")
def _baddbmm(op: Op) -> Cost:
    return matrix_product(op, "batch1", "batch2", added="self")


@formula("aten.addbmm", "aten.addbmm_")
def _addbmm(op: Op) -> Cost:
    """The products of the batch are summed, so the batch is contracted too."""
    batch = op.tensor("batch1")
    return matrix_product(op, "batch1", "batch2", added="self", contracted=batch.shape[0] * batch.shape[2])


@formula("aten._scaled_mm", "aten._scaled_mm_v2")
def _scaled_mm(op: Op) -> Cost:
    """float8 or float4 factors. Scales are read; those of blocks without the padding that their layout may have."""
    a, b = op.tensor("self"), op.tensor("mat2")
    scales = [
        *_scales(op, "scale_a", rows=a.shape[0], columns=a.shape[1] * _packed(a)),
        *_scales(op, "scale_b", rows=b.shape[1], columns=a.shape[1] * _packed(a)),
    ]
    return matrix_product(op, "self", "mat2", added="bias", extra=tuple(scales))


def _scales(op: Op, argument: str, *, rows: int, columns: int) -> Iterator[tuple[Tensor, float]]:
    for scale in op.tensors(argument):
        block = 32 if scale.dtype == "float8_e8m0fnu" else 16
        yield scale, min(scale.bytes, rows * math.ceil(columns / block) * scale.item_bytes)


@formula("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
def _grouped_mm(op: Op) -> Cost:
    """One product for each group. `offs`, which cuts the flat factor into groups, is data and not known.

    - Both factors stacked: a batched product.
    - One stacked, one flat (tokens with experts): each token meets one matrix whatever the cut, so FLOPs are those of
      one product over all tokens. All tokens could go to one expert, so of the stack one matrix is read.
    - Both flat: the contraction is cut; every element of both is used in one group, and a result is written for each.

    Assumed: the groups cover the flat factor. Scales that belong to groups are charged for one group.
    """
    a, b, out = op.tensor("self"), op.tensor("mat2"), result(op)
    if not out.elements:
        return Cost(family="matrix")
    inner = a.shape[-1] * _packed(a)
    groups = a.shape[0] if len(a.shape) == 3 else b.shape[0] if len(b.shape) == 3 else out.shape[0]
    a_scales, b_scales = tuple(op.tensors("scale_a")), tuple(op.tensors("scale_b"))
    reads: list[Part] = [*op.tensors("offs"), *op.tensors("bias")]
    elements = out.elements
    if len(a.shape) == len(b.shape) == 3:
        reads += [a, b, *a_scales, *b_scales]
    elif len(a.shape) == 2 and len(b.shape) == 2:
        elements //= groups
        reads += [a, b, *_shares((*a_scales, *b_scales), groups)]
    elif len(a.shape) == 2:
        reads += [a, replace(b, shape=(1, *b.shape[1:])), *a_scales, *_shares(b_scales, groups)]
    else:
        reads += [replace(a, shape=(1, *a.shape[1:])), b, *_shares(a_scales, groups), *b_scales]
    flops, vector_flops = engines(a.dtype, 2.0 * elements * inner, tf32=op.tf32_products)
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.written),
        flops=flops,
        vector_flops=vector_flops,
    )


def _shares(scales: tuple[Tensor, ...], groups: int) -> list[tuple[Tensor, float]]:
    return [(scale, scale.bytes / groups) for scale in scales]


@formula("aten._foreach_mm")
def _products(op: Op) -> Cost:
    """One product for each pair of the lists."""
    pairs = list(zip(op.tensors("self"), op.tensors("mat2"), op.outputs, strict=True))
    count = sum(2.0 * out.elements * left.shape[-1] for left, _, out in pairs)
    dtype = pairs[0][0].dtype if pairs else "float32"
    flops, vector_flops = engines(dtype, count, tf32=op.tf32_products)
    reads = accesses(*(tensor for left, right, out in pairs if out.elements for tensor in (left, right)))
    return Cost(family="matrix", reads=reads, writes=accesses(*op.written), flops=flops, vector_flops=vector_flops)


@formula("aten.addr", "aten.addr_")
def _outer(op: Op) -> Cost:
    """The product of each pair of elements and the addend, unless `beta` is 0; pointwise, as nothing is contracted."""
    out = result(op)
    added = op.tensors("self") if op.arguments.get("beta", 1) != 0 else ()
    flops = (1.0 + len(added)) * out.elements
    vector_flops = {vector_dtype(out.dtype): flops} if flops and (out.is_floating or "complex" in out.dtype) else {}
    reads = accesses(*(*added, *op.tensors("vec1", "vec2"))) if out.elements else ()
    return Cost(family="pointwise", reads=reads, writes=accesses(*op.written), vector_flops=vector_flops)


@formula("aten._trilinear")
def _trilinear(op: Op) -> Cost:
    """Three operands, of which any two may meet first: their bytes are certain, the FLOPs depend on the order."""
    writes = accesses(*op.written)
    return Cost(family="matrix", reads=accesses(*op.tensors("i1", "i2", "i3")) if writes else (), writes=writes)


@formula("aten._cslt_sparse_mm")
def _cslt_mm(op: Op) -> Cost:
    """Numbers and their places are stored in one tensor."""
    return _semi_structured_cost(
        op, op.tensor("dense_B").shape[0], op.tensors("compressed_A", "dense_B", "bias", "alpha")
    )


@formula("aten._sparse_semi_structured_mm", "aten._sparse_semi_structured_addmm")
def _semi_structured_mm(op: Op) -> Cost:
    """`beta=0` means that the addend is not read."""
    added = op.tensors("input") if op.arguments.get("beta", 1) != 0 else ()
    return _semi_structured_cost(op, op.tensor("mat2").shape[0], (*op.tensors("mat1", "mat1_meta", "mat2"), *added))


@formula("aten._sparse_semi_structured_linear")
def _semi_structured_linear(op: Op) -> Cost:
    return _semi_structured_cost(op, op.tensor("input").shape[-1], op.tensors("input", "weight", "meta", "bias"))


def _semi_structured_cost(op: Op, contracted: int, reads: tuple[Tensor, ...]) -> Cost:
    out = result(op)
    if not out.elements:
        return Cost(family="matrix")
    flops, vector = engines(reads[0].dtype, float(out.elements * contracted), tf32=True)
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.written),
        flops=flops,
        vector_flops=vector,
    )


@formula("aten._cslt_compress", "aten._to_sparse_semi_structured", "aten._sparse_semi_structured_tile")
def _compress_semi_structured(op: Op) -> Cost:
    """The dense matrix read, what is kept of it and the places written."""
    return Cost(family="movement", reads=accesses(*op.tensors("input", "dense")), writes=accesses(*op.written))
