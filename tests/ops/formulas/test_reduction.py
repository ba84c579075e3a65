import pytest
import torch

from nearpeak.ops.cost import cost_of


def work(op):
    return cost_of(op).work


def test_a_sum_reads_all_and_writes_one(call):
    found = work(call(torch.sum, torch.zeros(64, 100)))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (25600, 4, {"float32": 6399})


def test_a_sum_of_rows_writes_one_per_row(call):
    found = work(call(torch.sum, torch.zeros(64, 100, dtype=torch.bfloat16), dim=1))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (12800, 128, {"float32": 64 * 99})


def test_a_sum_over_an_expanded_dimension_reads_and_adds_what_is_there(call):
    found = work(call(torch.sum, torch.zeros(100).expand(64, 100), dim=0))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (400, 400, {})


@pytest.mark.parametrize(("dtype", "flops"), [(torch.int64, {}), (torch.bool, {}), (torch.float64, {"float64": 99})])
def test_only_floating_point_numbers_are_counted(call, dtype, flops):
    assert work(call(torch.sum, torch.zeros(100, dtype=dtype))).vector_flops == flops


def test_a_maximum_along_a_dimension_writes_values_and_indices(call):
    op = call(torch.max, torch.zeros(64, 100), dim=1)
    assert op.name == "aten.max.dim"
    assert (work(op).bytes_read, work(op).bytes_written) == (25600, 64 * (4 + 8))
    assert cost_of(op).family == "reduction"


def test_out_is_written_and_not_read(call):
    values, indices = torch.empty(64), torch.empty(64, dtype=torch.int64)
    op = call(torch.max, torch.zeros(64, 100), dim=1, out=(values, indices))
    assert (work(op).bytes_read, work(op).bytes_written) == (25600, 64 * (4 + 8))


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (torch.mean, 4),
        (torch.amax, 4),
        (torch.argmax, 8),
        (torch.prod, 4),
        (torch.max, 4),
        (torch.any, 1),
        (torch.all, 1),
        (torch.nansum, 4),
        (torch.std, 4),
        (torch.var, 4),
        (torch.std_mean, 8),
        (torch.var_mean, 8),
        (torch.aminmax, 8),
        (torch.count_nonzero, 8),
        (torch.linalg.vector_norm, 4),
    ],
)
def test_whole_reductions(call, function, written):
    op = call(function, torch.zeros(64, 100))
    assert cost_of(op).family == "reduction", op.name
    assert (work(op).bytes_read, work(op).bytes_written) == (25600, written)


def test_logsumexp(call):
    found = work(call(torch.logsumexp, torch.zeros(64, 100), dim=1))
    assert (found.bytes_read, found.bytes_written) == (25600, 256)


def test_a_trace_reads_the_diagonal(call):
    found = work(call(torch.trace, torch.zeros(64, 100)))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (256, 4, {"float32": 63})


def test_a_sum_of_nothing_reads_nothing(call):
    found = work(call(torch.sum, torch.zeros(0, 100)))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (0, 4, {})
