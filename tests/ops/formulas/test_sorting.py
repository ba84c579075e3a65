import pytest
import torch

from nearpeak.ops.work import Work

X = torch.randn(8, 16)
BYTES = 512
INDICES = 1024


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda: X.sort(), BYTES + INDICES),
        (lambda: X.sort(stable=True), BYTES + INDICES),
        (lambda: X.argsort(), BYTES + INDICES),
        (lambda: X.topk(2), 8 * 2 * 12),
        (lambda: X.kthvalue(3), 8 * 12),
        (lambda: X.median(), 4),
        (lambda: X.median(1), 8 * 12),
        (lambda: X.nanmedian(), 4),
        (lambda: X.mode(), 8 * 12),
        (lambda: X.cummax(1), BYTES + INDICES),
        (lambda: X.cummin(1), BYTES + INDICES),
        (lambda: torch.histc(X, 10), 40),
        (lambda: torch.msort(X), BYTES + INDICES),
    ],
)
def test_ordering_reads_everything_and_writes_every_output(cost, call, written):
    found = cost(call)
    assert found.work == Work(bytes_read=BYTES, bytes_written=written)
    assert found.family == "sorting"


def test_sorting_into_given_tensors_writes_them_once(cost):
    out = (torch.empty(8, 16), torch.empty(8, 16, dtype=torch.int64))
    assert cost(lambda: torch.sort(X, out=out)).work == Work(bytes_read=BYTES, bytes_written=BYTES + INDICES)


@pytest.mark.parametrize("call", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_a_scan_does_one_operation_less_than_a_row_has_elements(cost, call):
    expected = Work(bytes_read=BYTES, bytes_written=BYTES, vector_flops={"float32": 8 * 15})
    assert cost(call, X, 1).work == expected


def test_a_scan_counts_in_the_dtype_that_it_writes(cost):
    assert cost(torch.cumsum, X.double(), 0).vector_flops == {"float64": 16 * 7}
    assert cost(torch.cumsum, X.bfloat16(), 0).vector_flops == {"float32": 16 * 7}
    integers = cost(torch.cumsum, torch.ones(8, 16, dtype=torch.bool), -1)
    assert integers.work == Work(bytes_read=128, bytes_written=1024)


def test_a_scan_in_place_reads_and_writes(cost):
    assert cost(X.clone().cumsum_, 1).work.bytes == 2 * BYTES


def test_a_scan_of_nothing_or_of_one_number(cost):
    assert cost(torch.cumsum, torch.zeros(0, 3), 0).work == Work()
    assert cost(torch.cumsum, torch.tensor(1.0), 0).work == Work(bytes_read=4, bytes_written=4)


def test_unique_writes_what_is_asked_for(cost):
    values = torch.tensor([3, 1, 3, 2])
    assert cost(torch.unique, values).work == Work(bytes_read=32, bytes_written=24)
    assert cost(torch.unique, values, return_inverse=True).work == Work(bytes_read=32, bytes_written=24 + 32)
    assert cost(torch.unique, values, return_counts=True).work == Work(bytes_read=32, bytes_written=24 + 24)
    assert cost(torch.unique_consecutive, values).work == Work(bytes_read=32, bytes_written=32)
    assert cost(torch.unique, values.view(2, 2), dim=0).work.bytes_read == 32


def test_a_search_need_not_read_the_whole_sequence(cost):
    sequence = torch.arange(100.0)
    assert cost(torch.searchsorted, sequence, X).work == Work(bytes_read=BYTES + 4, bytes_written=INDICES)
    assert cost(torch.bucketize, X, sequence).work == Work(bytes_read=BYTES + 4, bytes_written=INDICES)
    rows = torch.arange(80.0).view(8, 10)
    assert cost(torch.searchsorted, rows, X).work == Work(bytes_read=BYTES + 8 * 4, bytes_written=INDICES)
    assert cost(torch.searchsorted, sequence, torch.zeros(0)).work == Work()


def test_counting_reads_values_and_weights(cost):
    values = torch.tensor([0, 1, 1])
    assert cost(torch.bincount, values).work == Work(bytes_read=24, bytes_written=16)
    assert cost(torch.bincount, values, torch.ones(3)).work == Work(bytes_read=24 + 12, bytes_written=8)
    assert cost(torch.histogram, X, 4).work == Work(bytes_read=BYTES, bytes_written=16 + 20)


def test_looking_for_elements_reads_one_candidate_at_the_least(cost):
    assert cost(torch.isin, X, torch.randn(5)).work == Work(bytes_read=BYTES + 4, bytes_written=128)
    assert cost(torch.isin, X, 1.0).work == Work(bytes_read=BYTES, bytes_written=128)


def test_the_top_of_none_reads_nothing(cost):
    assert cost(X.topk, 0).work == Work()


def test_an_expanded_input_is_read_once(cost):
    assert cost(torch.sort, torch.randn(16).expand(8, 16)).work.bytes_read == 64
