import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.ops.work import Work

aten = torch.ops.aten
ROW = 64
SIZE = 100 * ROW


def table():
    return torch.zeros(100, 16)


IDS = torch.tensor([1, 1, 5])
ROWS = torch.randn(3, 16)


def test_adding_rows_in_place_touches_one_row_at_the_least(cost):
    expected = Work(
        bytes_read=24 + 3 * ROW + ROW,
        bytes_written=ROW,
        vector_flops={"float32": 48},
    )
    found = cost(table().index_add_, 0, IDS, ROWS)
    assert found.work == expected
    assert found.family == "indexing"


def test_adding_rows_out_of_place_copies_the_rest(cost):
    found = cost(table().index_add, 0, IDS, ROWS)
    assert found.work == Work(bytes_read=24 + 3 * ROW + SIZE, bytes_written=SIZE, vector_flops={"float32": 48})


def test_copied_rows_do_not_read_the_destination(cost):
    assert cost(table().index_copy_, 0, IDS, ROWS).work == Work(bytes_read=24 + 3 * ROW, bytes_written=ROW)
    assert cost(table().index_copy, 0, IDS, ROWS).work == Work(
        bytes_read=24 + 3 * ROW + SIZE - 3 * ROW, bytes_written=SIZE
    )


def test_filled_rows(cost):
    assert cost(table().index_fill_, 0, IDS, 1.0).work == Work(bytes_read=24, bytes_written=ROW)
    assert cost(table().index_fill, 0, IDS, 1.0).work == Work(bytes_read=24 + SIZE - 3 * ROW, bytes_written=SIZE)


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_reduced_rows(cost):
    found = cost(table().index_reduce_, 0, IDS, ROWS, "amax")
    assert found.work == Work(bytes_read=24 + 3 * ROW + ROW, bytes_written=ROW)


def test_scatter_meets_one_element_for_each_place_across(cost):
    index = torch.zeros(3, 16, dtype=torch.int64)
    assert cost(table().scatter_, 0, index, ROWS).work == Work(bytes_read=384 + 3 * ROW, bytes_written=ROW)
    assert cost(table().scatter_, 1, index, 1.0).work == Work(bytes_read=384, bytes_written=3 * 4)
    assert cost(table().scatter, 0, index, ROWS).work == Work(bytes_read=384 + SIZE, bytes_written=SIZE)


def test_scatter_add_reads_what_it_adds_to(cost):
    index = torch.zeros(3, 16, dtype=torch.int64)
    found = cost(table().scatter_add_, 0, index, ROWS)
    assert found.work == Work(bytes_read=384 + 4 * ROW, bytes_written=ROW, vector_flops={"float32": 48})
    found = cost(table().scatter_add, 0, index, ROWS)
    assert found.work == Work(bytes_read=384 + 3 * ROW + SIZE, bytes_written=SIZE, vector_flops={"float32": 48})


def test_a_larger_source_is_read_where_there_are_indices(cost):
    index = torch.zeros(2, 4, dtype=torch.int64)
    assert cost(table().scatter_, 0, index, ROWS).work == Work(bytes_read=64 + 32, bytes_written=16)


def test_expanded_indices_of_experts_are_read_once(cost):
    index = torch.zeros(3, 1, dtype=torch.int64).expand(3, 16)
    assert cost(table().scatter_add_, 0, index, ROWS).work.bytes_read == 24 + 4 * ROW


def test_scatter_reduce_without_self_does_not_read_it(cost):
    index = torch.zeros(3, 16, dtype=torch.int64)
    base = table()
    found = cost(lambda: base.scatter_reduce_(0, index, ROWS, "sum", include_self=False))
    assert found.work == Work(bytes_read=384 + 3 * ROW, bytes_written=ROW)
    found = cost(lambda: base.scatter_reduce_(0, index, ROWS, "amax"))
    assert found.work == Work(bytes_read=384 + 4 * ROW, bytes_written=ROW)


def test_the_gradient_of_gather_is_a_scatter(dispatched):
    source = torch.randn(8, 16, requires_grad=True)
    index = torch.zeros(8, 2, dtype=torch.int64)
    ops = dispatched(lambda: source.gather(1, index).sum().backward())
    costs = [cost_of(op) for op in ops if "scatter_add" in op.name]
    assert costs
    assert costs[0].model == "formula"


def test_put_by_numbers(cost):
    target, index = table(), (IDS,)
    assert cost(lambda: target.index_put_(index, ROWS)).work == Work(bytes_read=24 + 3 * ROW, bytes_written=ROW)
    assert cost(lambda: target.index_put_(index, ROWS, accumulate=True)).work == Work(
        bytes_read=24 + 4 * ROW, bytes_written=ROW, vector_flops={"float32": 48}
    )
    assert cost(lambda: target.index_put(index, ROWS)).work == Work(bytes_read=24 + SIZE, bytes_written=SIZE)
    # autograd adds in place, and calls this under a trace
    assert cost(lambda: target.index_put(index, ROWS, accumulate=True)).work == Work(
        bytes_read=24 + 4 * ROW, bytes_written=ROW, vector_flops={"float32": 48}
    )
    found = cost(lambda: aten._unsafe_index_put(target, index, ROWS))
    assert found.work == Work(bytes_read=24 + SIZE, bytes_written=SIZE)


def test_put_of_one_value_over_numbers_covers_all_of_them(cost):
    target, value = table(), torch.tensor(1.0)
    found = cost(lambda: target.index_put((IDS,), value))
    assert found.work == Work(bytes_read=24 + 4 + SIZE - 3 * ROW, bytes_written=SIZE)


def test_put_of_several_indices_broadcasts_them(cost):
    target, values = table(), torch.randn(2, 3)
    found = cost(lambda: target.index_put_((torch.tensor([[0], [1]]), IDS), values, accumulate=True))
    assert found.work == Work(bytes_read=16 + 24 + 24 + 4, bytes_written=4, vector_flops={"float32": 6})


def test_put_by_a_mask_meets_every_place_once(cost):
    target, mask = table(), torch.arange(100) < 3
    assert cost(lambda: target.index_put_((mask,), ROWS)).work == Work(bytes_read=100 + 3 * ROW, bytes_written=3 * ROW)
    found = cost(lambda: target.index_put((mask,), ROWS))
    assert found.work == Work(bytes_read=100 + SIZE, bytes_written=SIZE)


def test_put_of_one_value_by_a_mask_may_meet_nothing(cost):
    target, mask, value = table(), torch.arange(100) < 3, torch.tensor(1.0)
    assert cost(lambda: target.index_put_((mask,), value)).work == Work(bytes_read=100)
    assert cost(lambda: target.index_put((mask,), value)).work == Work(bytes_read=100, bytes_written=SIZE)


def test_put_of_nothing_costs_nothing(cost):
    target = table()
    assert cost(lambda: target.index_put_((IDS[:0],), ROWS[:0])).work == Work()


def test_put_in_flat_places(cost):
    values = torch.randn(3)
    assert cost(table().put_, IDS, values).work == Work(bytes_read=24 + 12, bytes_written=4)
    found = cost(table().put, IDS, values, True)
    assert found.work == Work(bytes_read=24 + 12 + SIZE, bytes_written=SIZE, vector_flops={"float32": 3})


def test_a_masked_scatter_takes_every_element_from_one_side(cost):
    mask = torch.zeros(100, 16, dtype=torch.bool)
    assert cost(table().masked_scatter, mask, ROWS).work == Work(bytes_read=1600 + SIZE, bytes_written=SIZE)
    assert cost(table().masked_scatter_, mask, ROWS).work == Work(bytes_read=1600)
    found = cost(aten.masked_scatter_backward, table(), mask, [3, 16])
    assert found.work == Work(bytes_read=1600, bytes_written=3 * ROW)


def test_masked_accumulation_reads_the_old_tensor(cost):
    mask, index = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 2])
    found = cost(aten._unsafe_masked_index_put_accumulate, torch.zeros(8), mask, [index], torch.ones(3))
    assert found.work == Work(bytes_read=3 + 32, bytes_written=32)


def test_scattered_views_read_only_what_stays(cost):
    base = table()
    whole = Work(bytes_read=SIZE, bytes_written=SIZE)
    assert cost(torch.select_scatter, base, ROWS[0], 0, 2).work == whole
    assert cost(torch.slice_scatter, base, ROWS, 0, 0, 3).work == whole
    assert cost(torch.diagonal_scatter, base, ROWS[0]).work == whole
    assert cost(torch.as_strided_scatter, base, ROWS, (3, 16), (16, 1)).work == whole


def test_half_types_are_added_in_float32_and_integers_do_no_flops(cost):
    half = cost(table().bfloat16().index_add_, 0, IDS, ROWS.bfloat16())
    assert half.vector_flops == {"float32": 48}
    assert cost(table().double().index_add_, 0, IDS, ROWS.double()).vector_flops == {"float64": 48}
    assert cost(table().long().index_add_, 0, IDS, ROWS.long()).vector_flops == {}


def test_segments_read_their_data_where_lengths_cover_them(call):
    data, lengths = torch.randn(10, 4), torch.tensor([4, 6])
    op = call(torch.ops.aten.segment_reduce, data, "sum", lengths=lengths)
    assert (cost_of(op).work.bytes_read, cost_of(op).work.bytes_written) == (160 + 16, 32)
    unsafe = call(torch.ops.aten.segment_reduce, data, "sum", lengths=lengths, unsafe=True)
    assert cost_of(unsafe).work.bytes_read == 16
    out = torch.ops.aten.segment_reduce(data, "sum", lengths=lengths)
    back = call(torch.ops.aten._segment_reduce_backward, torch.ones_like(out), out, data, "sum", lengths=lengths)
    assert (cost_of(back).work.bytes_read, cost_of(back).work.bytes_written) == (32 + 16, 160)
