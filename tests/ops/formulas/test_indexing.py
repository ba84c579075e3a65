import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpeak.ops.cost import cost_of, least_bytes
from nearpeak.ops.tensor import Tensor
from nearpeak.ops.work import Work

aten = torch.ops.aten
TABLE = torch.randn(100, 16)
ROW = 64
IDS = torch.randint(0, 100, (4, 5))


def test_an_embedding_reads_indices_and_at_least_one_row(cost):
    assert cost(aten.embedding, TABLE, IDS).work == Work(bytes_read=160 + ROW, bytes_written=20 * ROW)
    assert cost(aten.embedding, TABLE, IDS).family == "indexing"


def test_an_embedding_of_nothing_is_free(cost):
    assert cost(aten.embedding, TABLE, IDS[:0]).work == Work()


def test_a_dense_gradient_writes_the_whole_table(cost):
    gradient = torch.randn(4, 5, 16)
    found = cost(aten.embedding_dense_backward, gradient, IDS, 100, -1, False)
    assert found.work == Work(bytes_read=160 + 20 * ROW, bytes_written=100 * ROW)
    summed = torch.ones(()).expand(4, 5, 16)
    found = cost(aten.embedding_dense_backward, summed, IDS, 100, -1, False)
    assert found.work == Work(bytes_read=160 + 4, bytes_written=100 * ROW)


def test_a_gradient_with_a_padding_index_may_need_no_row(cost):
    found = cost(aten.embedding_dense_backward, torch.randn(4, 5, 16), IDS, 100, 0, False)
    assert found.work == Work(bytes_read=160, bytes_written=100 * ROW)


def test_renormalized_rows_are_read(cost):
    assert cost(aten.embedding_renorm_, TABLE.clone(), IDS.view(-1), 1.0, 2.0).work == Work(bytes_read=160 + ROW)


def test_bags(dispatched):
    ids, offsets = torch.arange(6), torch.tensor([0, 3])
    weight = TABLE.clone().requires_grad_()

    def step():
        torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum").sum().backward()

    costs = {op.packet: cost_of(op) for op in dispatched(step)}
    assert costs["aten._embedding_bag"].work == Work(bytes_read=48 + 16 + ROW, bytes_written=2 * ROW)
    backward = next(cost for name, cost in costs.items() if "bag" in name and "backward" in name)
    assert backward.work.bytes_written == 100 * ROW
    assert backward.work.bytes_read == 48 + 4  # the gradient of a sum is one expanded number


def test_selected_slices(cost):
    index = torch.tensor([3, 3, 7])
    assert cost(TABLE.index_select, 0, index).work == Work(bytes_read=24 + ROW, bytes_written=3 * ROW)
    assert cost(TABLE.index_select, 1, index).work == Work(bytes_read=24 + 400, bytes_written=1200)
    assert cost(TABLE.index_select, 0, index[:0]).work == Work()


def test_a_gather_reads_one_element_for_each_place_across(cost):
    index = torch.zeros(50, 3, dtype=torch.int64)
    assert cost(TABLE.gather, 1, index).work == Work(bytes_read=1200 + 200, bytes_written=600)
    assert cost(TABLE.gather, 0, index).work == Work(bytes_read=1200 + 12, bytes_written=600)
    assert cost(TABLE.gather, 0, index[:0]).work == Work()


def test_a_gather_from_expanded_or_overlapping_memory_reads_less(cost):
    index = torch.zeros(50, 3, dtype=torch.int64)
    assert cost(TABLE[:1].expand(100, 16).gather, 1, index).work.bytes_read == 1200 + 4
    windows = torch.randn(120).unfold(0, 16, 1)
    assert cost(windows.gather, 1, index).work.bytes_read == 1200 + 4


def test_expanded_indices_are_read_once(cost):
    index = torch.zeros(50, 1, dtype=torch.int64).expand(50, 16)
    assert cost(TABLE.gather, 0, index).work == Work(bytes_read=400 + ROW, bytes_written=50 * ROW)


def test_take_reads_one_element(cost):
    assert cost(torch.take, TABLE, IDS).work == Work(bytes_read=160 + 4, bytes_written=80)


@pytest.mark.parametrize(
    ("key", "read", "written"),
    [
        ((IDS,), 160 + ROW, 20 * ROW),
        ((slice(None), torch.tensor([1, 1])), 16 + 400, 800),
        ((torch.tensor([1, 2]), torch.tensor([3, 4])), 32 + 4, 8),
    ],
)
def test_indexing_by_numbers_reads_one_slice(cost, key, read, written):
    assert cost(lambda: TABLE[key]).work == Work(bytes_read=read, bytes_written=written)


def test_indexing_by_a_mask_reads_what_comes_out(cost):
    rows = torch.arange(100) < 30
    assert cost(lambda: TABLE[rows]).work == Work(bytes_read=100 + 30 * ROW, bytes_written=30 * ROW)
    elements = torch.zeros(100, 16, dtype=torch.bool)
    elements[:2] = True
    assert cost(lambda: TABLE[elements]).work == Work(bytes_read=1600 + 2 * ROW, bytes_written=2 * ROW)
    nothing = rows & ~rows
    assert cost(lambda: TABLE[nothing]).work == Work(bytes_read=100)
    expanded = TABLE[:1].expand(100, 16)
    assert cost(lambda: expanded[rows]).work.bytes_read == pytest.approx(100 + 0.3 * ROW)


def test_selection_by_a_mask(cost):
    mask = torch.zeros(100, 16, dtype=torch.bool)
    mask[:2] = True
    assert cost(TABLE.masked_select, mask).work == Work(bytes_read=1600 + 2 * ROW, bytes_written=2 * ROW)
    broadcast = cost(TABLE[0].masked_select, mask).work
    assert broadcast.bytes_read == pytest.approx(1600 + 2 * ROW / 100)


def test_unsafe_indexing_is_indexing(cost):
    assert cost(aten._unsafe_index, TABLE, [IDS]).work == Work(bytes_read=160 + ROW, bytes_written=20 * ROW)


def test_a_masked_index_needs_only_the_mask(cost):
    mask = torch.ones(4, 5, dtype=torch.bool)
    found = cost(aten._unsafe_masked_index, TABLE[:, 0], mask, [IDS], 0.0)
    assert found.work == Work(bytes_read=20, bytes_written=80)


def test_places_that_are_not_zero(cost):
    assert cost(torch.nonzero, torch.eye(4)).work == Work(bytes_read=64, bytes_written=64)


LAYOUTS = [(5, 1), (1, 6), (0, 1), (5, 0), (0, 0), (1, 1), (2, 1)]


@given(st.sampled_from(LAYOUTS), st.sampled_from([0, 1]), st.data())
@settings(max_examples=100)
def test_no_choice_of_indices_touches_less_than_the_least(strides, dim, data):
    """Against the addresses that a gather and a selection of slices really meet, in every kind of layout."""
    shape = (6, 5)
    source = Tensor(shape=shape, strides=strides, dtype="float32", storage=0)
    addresses = torch.arange(64).as_strided(shape, strides)
    rows, columns = data.draw(st.integers(1, shape[0])), data.draw(st.integers(1, shape[1]))
    numbers = st.integers(0, shape[dim] - 1)
    flat = data.draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    index = torch.tensor(flat).view(rows, columns)
    gathered = addresses.gather(dim, index).unique().numel()
    assert least_bytes(source, (dim,), (rows, columns)) <= 4 * gathered
    selected = addresses.index_select(dim, index[0]).unique().numel()
    assert least_bytes(source, (dim,)) <= 4 * selected
