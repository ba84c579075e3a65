"""Decompositions, solvers and distances: operands read once, results written once, and a cautious count of FLOPs.

Counts are for one matrix of `m` rows and `n` columns with `k = min(m, n)` and `r` right-hand sides, at or below what
the cheapest classical algorithm does; iterations and pivoting are left out. Most of that work is products of blocks, so
it is charged to the engine that takes products of the dtype. Of a symmetric or triangular matrix half is read.

- Cholesky and LDL: n^3 / 3. LU and the determinant: 2 (m n k - (m + n) k^2 / 2 + k^3 / 3), which is 2/3 n^3.
- QR, singular values, least squares: k^2 max(m, n), what one half of the symmetric Gram matrix takes.
- Eigenvalues: n^3; the reduction to a tridiagonal matrix alone takes 4/3 n^3.
- Solving with a triangular matrix n^2 r, with a factorization twice that; the inverse 2 n^3.
- The exponential: none, since a matrix that is near zero takes none. Products of reflectors: none, for how many there
  are is not certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nearpeak.ops.cost import Cost, Part, accesses, formula
from nearpeak.ops.formulas.matrix import engines
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What an operator is given and how much it computes."""

    matrix: str
    """The argument that is factorized or solved with."""
    flops: Callable[[int, int, int], float]
    """Of rows, columns and right-hand sides."""
    right: str = ""
    """The argument with the right-hand sides."""
    half: bool = False
    """Only a triangle of the matrix is read."""


def _lu(m: int, n: int, r: int) -> float:
    k = min(m, n)
    return 2 * (m * n * k - (m + n) * k * k / 2 + k**3 / 3)


def _gram(m: int, n: int, r: int) -> float:
    return float(min(m, n) ** 2 * max(m, n))


def _third(m: int, n: int, r: int) -> float:
    return n**3 / 3


def _cube(m: int, n: int, r: int) -> float:
    return float(n**3)


def _solved(m: int, n: int, r: int) -> float:
    return float(n * n * r)


def _solved_twice(m: int, n: int, r: int) -> float:
    return 2.0 * n * n * r


def _nothing(m: int, n: int, r: int) -> float:
    return 0.0


_PROBLEMS: dict[str, _Problem] = {
    "aten.linalg_cholesky_ex": _Problem(matrix="self", flops=_third, half=True),
    "aten.cholesky": _Problem(matrix="self", flops=_third, half=True),
    "aten.cholesky_inverse": _Problem(matrix="self", flops=lambda m, n, r: 2 * n**3 / 3, half=True),
    "aten.cholesky_solve": _Problem(matrix="input2", right="self", flops=_solved_twice, half=True),
    "aten._cholesky_solve_helper": _Problem(matrix="A", right="self", flops=_solved_twice, half=True),
    "aten.linalg_ldl_factor_ex": _Problem(matrix="self", flops=_third, half=True),
    "aten.linalg_ldl_solve": _Problem(matrix="LD", right="B", flops=_solved_twice, half=True),
    "aten.linalg_lu": _Problem(matrix="A", flops=_lu),
    "aten.linalg_lu_factor_ex": _Problem(matrix="A", flops=_lu),
    "aten.linalg_lu_solve": _Problem(matrix="LU", right="B", flops=_solved_twice),
    "aten._linalg_det": _Problem(matrix="A", flops=_lu),
    "aten._linalg_slogdet": _Problem(matrix="A", flops=_lu),
    "aten._linalg_solve_ex": _Problem(
        matrix="A", right="B", flops=lambda m, n, r: _lu(m, n, r) + _solved_twice(m, n, r)
    ),
    "aten.linalg_inv_ex": _Problem(matrix="A", flops=lambda m, n, r: 2.0 * n**3),
    "aten.linalg_solve_triangular": _Problem(matrix="self", right="B", flops=_solved, half=True),
    "aten.triangular_solve": _Problem(matrix="A", right="self", flops=_solved, half=True),
    "aten.linalg_qr": _Problem(matrix="A", flops=_gram),
    "aten.geqrf": _Problem(matrix="self", flops=_gram),
    "aten.linalg_householder_product": _Problem(matrix="input", flops=_nothing),
    "aten.ormqr": _Problem(matrix="self", flops=_nothing),
    "aten._linalg_svd": _Problem(matrix="A", flops=_gram),
    "aten.linalg_pinv": _Problem(matrix="self", flops=_gram),
    "aten.linalg_lstsq": _Problem(matrix="self", right="b", flops=_gram),
    "aten._linalg_eigh": _Problem(matrix="A", flops=_cube, half=True),
    "aten.linalg_eig": _Problem(matrix="self", flops=_cube),
    "aten.linalg_eigvals": _Problem(matrix="self", flops=_cube),
    "aten._linalg_eigvals": _Problem(matrix="self", flops=_cube),
    "aten.linalg_matrix_exp": _Problem(matrix="self", flops=_nothing),
}


@formula(*_PROBLEMS)
def _solve(op: Op) -> Cost:
    problem = _PROBLEMS[op.packet if op.packet in _PROBLEMS else op.name]
    matrix = op.tensor(problem.matrix)
    results = [tensor for tensor in op.written if tensor.elements]
    if not matrix.elements or not results:
        return Cost(family="linalg", writes=accesses(*op.written))
    rows, columns = matrix.shape[-2:]
    right = op.tensors(problem.right)[0] if problem.right else None
    problems = math.prod(matrix.shape[:-2])
    sides = 0
    if right is not None:
        problems = max(problems, right.elements // max(1, math.prod(right.shape[-2:])))
        sides = max(1, right.elements // max(1, problems * columns))
    flops, vector = engines(
        matrix.dtype, problem.flops(rows, columns, sides) * math.prod(matrix.shape[:-2]), tf32=op.tf32_products
    )
    read: list[Part] = [
        (matrix, matrix.bytes * (columns + 1) / (2 * columns)) if problem.half else matrix,
        *(tensor for tensor in _others(op, problem)),
    ]
    return Cost(family="linalg", reads=accesses(*read), writes=accesses(*results), flops=flops, vector_flops=vector)


def _others(op: Op, problem: _Problem) -> tuple[Tensor, ...]:
    """Right-hand sides, pivots and scales."""
    skipped = {problem.matrix, *op.mutated}
    return op.tensors(*(name for name in op.arguments if name not in skipped))


@formula("aten.lu_unpack")
def _unpack(op: Op) -> Cost:
    """Copies of what is asked for: the factors, and the pivots as a matrix."""
    wanted = [name for name, flag in (("LU_data", "unpack_data"), ("LU_pivots", "unpack_pivots")) if op.arguments[flag]]
    results = [tensor for tensor in op.written if tensor.elements]
    return Cost(
        family="movement",
        reads=accesses(*op.tensors(*wanted)) if results else (),
        writes=accesses(*results),
    )


@formula("aten._linalg_check_errors")
def _check(op: Op) -> Cost:
    """The codes read."""
    return Cost(family="linalg", reads=accesses(*op.tensors("info")))


@formula("aten._cdist_forward", "aten._euclidean_dist")
def _distances(op: Op) -> Cost:
    """Distances of all pairs of two sets of points: a product for the Euclidean one, else a difference and a sum."""
    first, second = op.tensor("x1"), op.tensor("x2")
    count = 2.0 * sum(tensor.elements for tensor in op.outputs) * first.shape[-1]
    return _pairwise(op, (first, second), count if op.arguments.get("p", 2.0) else 0.0)


@formula("aten._cdist_backward")
def _distances_backward(op: Op) -> Cost:
    """As many products, or an operation per pair and coordinate. The distances can be computed anew; their zeroth
    power has no gradient."""
    power, points = op.arguments["p"], op.tensors("x1", "x2")
    pairs = float(op.tensor("grad").elements * points[0].shape[-1])
    return _pairwise(op, (op.tensor("grad"), *points) if power else (), (2.0 if power == 2 else bool(power)) * pairs)


@formula("aten._pdist_forward")
def _distances_within(op: Op) -> Cost:
    """Distances of all pairs of one set of points."""
    points = op.tensor("self")
    count = 2.0 * sum(tensor.elements for tensor in op.outputs) * points.shape[-1]
    return _pairwise(op, (points,), count if op.arguments["p"] else 0.0)


@formula("aten._pdist_backward")
def _distances_within_backward(op: Op) -> Cost:
    """As `_distances_backward`; each pair moves two points."""
    power, points, grad = op.arguments["p"], op.tensor("self"), op.tensor("grad")
    pairs = float(grad.elements * points.shape[-1])
    return _pairwise(op, (grad, points) if power else (), (2.0 if power == 2 else bool(power)) * pairs)


def _pairwise(op: Op, reads: tuple[Tensor, ...], flops: float) -> Cost:
    """Euclidean distances go to the engine for products."""
    writes = accesses(*op.written)
    if not writes:
        return Cost(family="linalg")
    euclidean = op.arguments.get("p", 2.0) == 2
    dtype = op.inputs[0].dtype
    if euclidean:
        matrix, vector = engines(dtype, flops, tf32=op.tf32_products)
    else:
        matrix, vector = {}, ({"float64" if dtype == "float64" else "float32": flops} if flops else {})
    return Cost(family="linalg", reads=accesses(*reads), writes=writes, flops=matrix, vector_flops=vector)
