import pytest
import torch

from nearpeak.ops.cost import cost_of

aten = torch.ops.aten


def matrix(*shape, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype)


def positive(*shape):
    a = matrix(*shape)
    return a @ a.mT + 10 * torch.eye(shape[-1], dtype=torch.float64)


def of(op):
    cost = cost_of(op)
    assert (cost.family, cost.model) == ("linalg", "formula")
    return cost


@pytest.mark.parametrize(
    ("function", "arguments", "flops"),
    [
        (aten.linalg_cholesky_ex, (positive(3, 6, 6),), 3 * 216 / 3),
        (aten.linalg_lu_factor_ex, (matrix(6, 6),), 2 / 3 * 216),
        (aten.linalg_lu_factor_ex, (matrix(9, 3),), 9 * 9 - 27 / 3),
        (aten._linalg_det, (matrix(6, 6),), 2 / 3 * 216),
        (aten._linalg_solve_ex, (matrix(2, 6, 6), matrix(2, 6, 5)), 2 * (2 / 3 * 216 + 2 * 36 * 5)),
        (aten._linalg_solve_ex, (matrix(2, 6, 6), matrix(2, 6)), 2 * (2 / 3 * 216 + 2 * 36)),
        (aten.linalg_inv_ex, (matrix(6, 6),), 2 * 216),
        (aten.linalg_qr, (matrix(9, 3),), 81),
        (aten._linalg_svd, (matrix(3, 9),), 81),
        (aten._linalg_eigh, (positive(6, 6),), 216),
        (aten.linalg_eig, (matrix(6, 6),), 216),
        (aten.linalg_matrix_exp, (matrix(6, 6),), 0),
    ],
)
def test_counts(call, function, arguments, flops):
    cost = of(call(function, *arguments))
    assert cost.flops == ({"float64": pytest.approx(flops)} if flops else {})


def test_solving_with_a_triangle_reads_half_of_it(call):
    a, b = matrix(6, 6).tril() + 10 * torch.eye(6, dtype=torch.float64), matrix(6, 5)
    cost = of(call(aten.linalg_solve_triangular, a, b, upper=False))
    assert cost.flops == {"float64": 36 * 5}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (8 * (21 + 30), 8 * 30)
    right = of(call(aten.linalg_solve_triangular, a, matrix(5, 6), upper=False, left=False))
    assert right.flops == {"float64": 36 * 5}


def test_a_decomposition_reads_its_matrix_and_writes_its_results(call):
    cost = of(call(aten.linalg_qr, matrix(9, 3)))
    assert (cost.work.bytes_read, cost.work.bytes_written) == (8 * 27, 8 * (27 + 9))
    values = of(call(aten._linalg_svd, matrix(9, 3), False, False))
    assert (values.work.bytes_read, values.work.bytes_written) == (8 * 27, 8 * 3)


def test_float32_goes_by_the_flag_of_products(call):
    from dataclasses import replace

    op = call(aten.linalg_inv_ex, matrix(6, 6, dtype=torch.float32))
    assert cost_of(op).vector_flops == {"float32": 432}
    assert cost_of(replace(op, tf32_products=True)).flops == {"tfloat32": 432}


def test_nothing_is_computed_for_no_matrix(call):
    assert of(call(aten.linalg_qr, matrix(0, 3))).flops == {}
    assert of(call(aten.linalg_inv_ex, matrix(0, 6, 6))).work.bytes == 0


def test_unpacking_copies_what_is_asked_for(call):
    factors, pivots, _ = aten.linalg_lu_factor_ex(matrix(6, 6))
    cost = cost_of(call(aten.lu_unpack, factors, pivots))
    assert (cost.family, cost.work.bytes_read, cost.work.bytes_written) == ("movement", 8 * 36 + 4 * 6, 3 * 8 * 36)
    assert cost_of(call(aten.lu_unpack, factors, pivots, False, True)).work.bytes_read == 4 * 6


def test_distances(call):
    a, b = matrix(2, 5, 3), matrix(2, 7, 3)
    euclidean = of(call(aten._cdist_forward, a, b, 2.0, None))
    assert euclidean.flops == {"float64": 2 * 2 * 35 * 3}
    assert (euclidean.work.bytes_read, euclidean.work.bytes_written) == (8 * 2 * 36, 8 * 2 * 35)
    other = of(call(aten._cdist_forward, a, b, 1.0, None))
    assert (other.flops, other.vector_flops) == ({}, {"float64": 2 * 2 * 35 * 3})
    assert of(call(aten._cdist_forward, a, b, 0.0, None)).vector_flops == {}


def test_gradients_of_distances(call):
    a, b = matrix(5, 3), matrix(7, 3)
    distances = torch.cdist(a, b, p=1.0)
    cost = of(call(aten._cdist_backward, torch.ones_like(distances), a, b, 1.0, distances))
    assert cost.vector_flops == {"float64": 35 * 3}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (8 * (35 + 15 + 21), 8 * 15)
    none = of(call(aten._cdist_backward, torch.ones_like(distances), a, b, 0.0, distances))
    assert (none.work.bytes_read, none.work.bytes_written, none.vector_flops) == (0, 8 * 15, {})


def test_distances_within_a_set(call):
    a = matrix(5, 3)
    forward = of(call(aten._pdist_forward, a, 2.0))
    assert forward.flops == {"float64": 2 * 10 * 3}
    distances = torch.nn.functional.pdist(a)
    assert of(call(aten._pdist_backward, torch.ones(10, dtype=torch.float64), a, 2.0, distances)).work.bytes_read == (
        8 * (10 + 15)
    )
