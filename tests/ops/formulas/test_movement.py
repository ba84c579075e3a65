import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpeak.ops.cost import cost_of
from nearpeak.ops.formulas.movement import _on_or_below
from nearpeak.ops.work import Work

X = torch.randn(8, 16)
BYTES = 512
aten = torch.ops.aten


@pytest.mark.parametrize(
    ("call", "read", "written"),
    [
        (lambda: X.clone(), BYTES, BYTES),
        (lambda: X.t().contiguous(), BYTES, BYTES),
        (lambda: X.to(torch.bfloat16), BYTES, BYTES / 2),
        (lambda: X.to(torch.float64), BYTES, BYTES * 2),
        (lambda: X.to(torch.float32, copy=True), BYTES, BYTES),
        (lambda: X.flip(0), BYTES, BYTES),
        (lambda: X.roll(3), BYTES, BYTES),
        (lambda: X.rot90(), BYTES, BYTES),
        (lambda: aten.repeat(X, [2, 3]), BYTES, 6 * BYTES),
        (lambda: aten.repeat(X, [0, 3]), 0, 0),
        (lambda: torch.diag_embed(X), BYTES, 8 * 16 * 16 * 4),
        (lambda: aten.view_copy(X, [128]), BYTES, BYTES),
        (lambda: aten.slice_copy(X, 0, 0, 2), BYTES / 4, BYTES / 4),
        (lambda: aten.select_copy(X, 0, 0), 64, 64),
        (lambda: aten.expand_copy(X[:1], [8, 16]), 64, BYTES),
        (lambda: aten.split_with_sizes_copy(X, [2, 6]), BYTES, BYTES),
        (lambda: aten.as_strided_copy(X, [7, 4], [1, 1]), 40, 7 * 4 * 4),
        (lambda: aten.unfold_copy(X.view(-1)[:10], 0, 3, 2), 36, 48),
        (lambda: aten.unfold_copy(X.view(-1)[:10], 0, 1, 4), 12, 12),
        (lambda: aten.view_as_complex_copy(X.view(8, 8, 2)), BYTES, BYTES),
        (lambda: aten.pixel_shuffle(X[0].view(1, 4, 2, 2), 2), 64, 64),
        (lambda: aten.unfold_backward(X[:4, :3], [10], 0, 3, 2), 48, 40),
        (lambda: aten.slice_backward(X[:2], [8, 16], 0, 0, 2, 1), 128, BYTES),
        (lambda: aten.select_backward(X[0], [8, 16], 0, 0), 64, BYTES),
    ],
)
def test_copies_read_what_they_show_and_write_the_result(cost, call, read, written):
    found = cost(call)
    assert found.work == Work(bytes_read=read, bytes_written=written)
    assert found.family == "movement"


def test_a_copy_does_not_read_its_destination(cost):
    assert cost(torch.zeros(8, 16).copy_, X).work == Work(bytes_read=BYTES, bytes_written=BYTES)
    assert cost(torch.zeros(8, 16).copy_, X[:1]).work == Work(bytes_read=64, bytes_written=BYTES)
    assert cost(torch.zeros(8, 16).copy_, X.bfloat16()).work == Work(bytes_read=BYTES / 2, bytes_written=BYTES)


def test_a_copy_onto_itself_is_free(cost):
    assert cost(X.copy_, X).work == Work()


def test_a_copy_of_an_expanded_tensor_reads_it_once(cost):
    assert cost(X[:1].expand(8, 16).contiguous).work == Work(bytes_read=64, bytes_written=BYTES)


def test_joining_reads_each_tensor_once(cost):
    y = torch.randn(8, 16)
    assert cost(torch.cat, [X, y]).work == Work(bytes_read=2 * BYTES, bytes_written=2 * BYTES)
    assert cost(torch.cat, [X, X]).work == Work(bytes_read=BYTES, bytes_written=2 * BYTES)
    assert cost(torch.stack, [X, y]).work == Work(bytes_read=2 * BYTES, bytes_written=2 * BYTES)
    out = torch.empty(16, 16)
    assert cost(lambda: torch.cat([X, y], out=out)).work == Work(bytes_read=2 * BYTES, bytes_written=2 * BYTES)


def test_padding_reads_the_tensor_once_and_a_crop_reads_what_is_left(cost):
    pad = torch.nn.functional.pad
    assert cost(pad, X, (1, 1)).work == Work(bytes_read=BYTES, bytes_written=8 * 18 * 4)
    assert cost(aten.constant_pad_nd, X, [-4, -4]).work == Work(bytes_read=BYTES / 2, bytes_written=BYTES / 2)
    assert cost(aten.constant_pad_nd, X, [-8, 8, 2, 0]).work == Work(bytes_read=BYTES / 2, bytes_written=10 * 16 * 4)
    for mode in ("reflect", "replicate"):
        image = torch.randn(1, 2, 4, 4)
        assert cost(pad, image, (1, 1, 1, 1), mode=mode).work == Work(bytes_read=128, bytes_written=2 * 36 * 4)


def test_the_gradient_of_padding_does_not_read_the_argument(cost):
    gradient, image = torch.randn(1, 2, 6, 6), torch.randn(1, 2, 4, 4)
    for operator in (aten.reflection_pad2d_backward, aten.replication_pad2d_backward):
        found = cost(operator, gradient, image, [1, 1, 1, 1])
        assert found.work == Work(bytes_read=288, bytes_written=128)


def test_a_triangle_reads_what_it_keeps(cost):
    square = torch.randn(2, 4, 4)
    assert cost(torch.tril, square).work == Work(bytes_read=2 * 10 * 4, bytes_written=128)
    assert cost(torch.triu, square, 1).work == Work(bytes_read=2 * 6 * 4, bytes_written=128)
    assert cost(square.clone().triu_).work == Work(bytes_written=2 * 6 * 4)
    assert cost(torch.tril, torch.zeros(0, 4)).work == Work()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 12))
@settings(max_examples=60)
def test_the_elements_of_a_triangle_are_counted(rows, columns, diagonal):
    kept = int(torch.ones(rows, columns).tril(diagonal).sum())
    assert _on_or_below(rows, columns, diagonal) == kept


def test_columns_of_an_image(cost):
    image = torch.randn(1, 2, 4, 4)
    columns = torch.nn.functional.unfold(image, 2)
    assert cost(torch.nn.functional.unfold, image, 2).work == Work(bytes_read=128, bytes_written=2 * 4 * 9 * 4)
    assert cost(torch.nn.functional.fold, columns, (4, 4), 2).work == Work(bytes_read=288, bytes_written=128)
    apart = cost(torch.nn.functional.unfold, image, 1, stride=2)
    assert apart.work == Work(bytes_read=32, bytes_written=32)
    padded = torch.nn.functional.unfold(image, 1, padding=1)
    assert cost(torch.nn.functional.fold, padded, (4, 4), 1, padding=1).work == Work(bytes_read=128, bytes_written=128)


def test_repeats_of_elements(cost):
    assert cost(torch.repeat_interleave, torch.tensor([1, 2])).work == Work(bytes_read=16, bytes_written=24)


def test_a_number_for_the_host_reads_one_element(cost):
    assert cost(X[0, 0].item).work == Work(bytes_read=4)


def test_packed_sequences_hold_no_padding(dispatched):
    from nearpeak.ops.cost import cost_of

    lengths = torch.tensor([4, 2])
    ops = dispatched(torch.nn.utils.rnn.pack_padded_sequence, torch.randn(4, 2, 8), lengths)
    (op,) = [op for op in ops if op.packet == "aten._pack_padded_sequence"]
    assert cost_of(op).work == Work(bytes_read=6 * 8 * 4, bytes_written=6 * 8 * 4)


def test_jagged_rows_write_the_result_and_may_read_none(cost):
    offsets = torch.tensor([0, 2, 8])
    found = cost(aten._jagged_to_padded_dense_forward, X, [offsets], [4], 0.0)
    assert found.work == Work(bytes_read=24, bytes_written=2 * 4 * 16 * 4)


def test_equality_may_be_settled_by_one_pair(call):
    x = torch.zeros(100)
    assert cost_of(call(torch.equal, x, torch.ones(100))).work.bytes_read == 8
    assert cost_of(call(torch.equal, x, torch.ones(10))).work.bytes_read == 0
    assert cost_of(call(torch.allclose, x, torch.ones(1))).work.bytes_read == 8
