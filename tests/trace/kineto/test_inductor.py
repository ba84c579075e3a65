import pytest
import torch

from nearpeak.trace.kineto.arguments import RecordedTensor, Scalar
from nearpeak.trace.kineto.inductor import (
    WHOLE_OPERAND_OPERATORS,
    MinTraffic,
    RecordedGemm,
    min_traffic,
    whole_operators,
)

WIDE = RecordedTensor((8, 4), (4, 1), "float32")
NARROW = RecordedTensor((8, 4), (4, 1), "bfloat16")
ROWS = RecordedTensor((8, 1), (1, 1), "float32")
ROW = RecordedTensor((4,), (1,), "bfloat16")
MANY = RecordedTensor((2, 8, 4), (32, 4, 1), "bfloat16")
PLACES = RecordedTensor((8,), (1,), "int64")
SCRATCH = RecordedTensor((1024,), (1,), "float32")
X, XY, R = "XBLOCK=1024", "XBLOCK=32,YBLOCK=32", "XBLOCK=2,R0_BLOCK=2048"
SPLIT = "XBLOCK=1,RSPLIT_SIZE=16"
NOTHING = MinTraffic(None, (), None)


def moved(name: str, tensors: tuple[RecordedTensor, ...], sizes: tuple[float, ...], blocks: str) -> MinTraffic:
    return min_traffic(name, (*tensors, *(Scalar(size) for size in sizes)), {"kernel_kwargs": blocks})


@pytest.mark.parametrize(
    ("name", "tensors", "sizes", "blocks", "least"),
    [
        ("triton_poi_fused_add_slice_0", (NARROW, NARROW), (32,), X, (32, "bfloat16")),
        ("triton_poi_fused_add_slice_0", (WIDE, NARROW), (32,), X, (32, "bfloat16")),
        ("triton_poi_fused_add_slice_0", (WIDE, NARROW, WIDE), (32,), X, (32, "float32")),
        ("triton_poi_fused_cat_1", (NARROW, NARROW), (8, 4), XY, (32, "bfloat16")),
        ("triton_poi_fused_cat_1", (NARROW, NARROW), (99, 32), "XBLOCK=32", (32, "bfloat16")),
        ("triton_red_fused_slice_sum_2", (NARROW, WIDE), (8, 4), R, (8, "bfloat16")),
        ("triton_per_fused_slice_sum_3", (WIDE, WIDE), (8, 4), "XBLOCK=1", (8, "float32")),
        ("triton_per_fused_slice_sum_3", (WIDE, NARROW, SCRATCH), (8, 4), "XBLOCK=1,RSPLIT=4", (8, "bfloat16")),
        ("triton_poi_fused_mul_0", (NARROW,), (32,), X, (32, "bfloat16")),
        ("triton_red_fused_embedding_mean_0", (PLACES, WIDE, WIDE), (8, 4), R, (8, "float32")),
        ("triton_poi_fused_embedding_dense_backward_4", (WIDE,), (32,), X, (32, "float32")),
        ("triton_poi_fused_embedding_dense_backward_4", (WIDE, NARROW), (32,), X, (32, "bfloat16")),
    ],
)
def test_what_a_kernel_must_write(
    name: str, tensors: tuple[RecordedTensor, ...], sizes: tuple[int, ...], blocks: str, least: tuple[int, str]
):
    assert moved(name, tensors, sizes, blocks) == MinTraffic(None, (), least)


@pytest.mark.parametrize(
    ("name", "tensors", "sizes"),
    [
        ("triton_poi_fused_index_put_4", (NARROW, NARROW), (32,)),
        ("triton_poi_fused_scatter_add_4", (NARROW, NARROW), (32,)),
        ("triton_poi_fused_embedding_dense_backward_4", (WIDE, PLACES, NARROW), (32,)),
        ("triton_poi_fused__to_copy_embedding_dense_backward_4", (WIDE, NARROW), (32,)),
        ("triton_tem_fused_mm_5", (NARROW, NARROW), (32,)),
        ("triton_for_fused_6", (NARROW, NARROW), ()),
        ("triton_", (NARROW, NARROW), (32,)),
        ("triton_poi_fused_add_0", (), (32,)),
        ("triton_poi_fused_add_0", (NARROW,), ()),
        ("triton_poi_fused_add_0", (NARROW,), (1.5,)),
    ],
)
def test_where_nothing_is_certain(name: str, tensors: tuple[RecordedTensor, ...], sizes: tuple[int, ...]):
    assert moved(name, tensors, sizes, X) == NOTHING


@pytest.mark.parametrize(
    ("name", "tensors", "sizes", "blocks", "least"),
    [
        # Two that look alike may be one: the first is read, the last is written.
        ("triton_poi_fused_add_0", (NARROW, NARROW, NARROW), (32,), X, MinTraffic(0, (), (32, "bfloat16"))),
        ("triton_poi_fused_add_0", (NARROW, WIDE, WIDE, NARROW), (32,), X, MinTraffic(0, (1,), (32, "bfloat16"))),
        ("triton_poi_fused__to_copy_add_0", (NARROW, ROW, WIDE), (32,), X, MinTraffic(0, (1,), (32, "float32"))),
        # More elements than points: a part of it would do, unless a sum was written out.
        ("triton_poi_fused_add_0", (MANY, NARROW), (32,), X, MinTraffic(None, (), (32, "bfloat16"))),
        ("triton_poi_fused_add_sum_0", (MANY, NARROW), (32,), X, MinTraffic(0, (), (32, "bfloat16"))),
        ("triton_red_fused_sum_2", (NARROW, ROW, ROWS), (8, 4), R, MinTraffic(0, (1,), (8, "float32"))),
        # Scratch memory, which is flat and at the end, does not count.
        ("triton_per_fused_sum_2", (NARROW, WIDE, SCRATCH), (8, 4), SPLIT, MinTraffic(0, (1,), (8, "bfloat16"))),
    ],
)
def test_a_kernel_of_operators_that_go_over_all_of_their_operands(
    name: str, tensors: tuple[RecordedTensor, ...], sizes: tuple[int, ...], blocks: str, least: MinTraffic
):
    assert moved(name, tensors, sizes, blocks) == least


def matrix(rows: int, columns: int, dtype: str = "bfloat16") -> RecordedTensor:
    return RecordedTensor((rows, columns), (columns, 1), dtype)


@pytest.mark.parametrize(
    ("name", "tensors", "product"),
    [
        ("mm", (matrix(8, 32), matrix(32, 4), matrix(8, 4)), RecordedGemm(32, "bfloat16", (0, 1))),
        ("mm_t", (matrix(8, 32), matrix(4, 32), matrix(8, 4)), RecordedGemm(32, "bfloat16", (0, 1))),
        ("addmm_relu", (ROW, matrix(8, 32), matrix(32, 4), matrix(8, 4)), RecordedGemm(32, "bfloat16", (1, 2))),
        # The first and the last of these could be the operands too, with a smaller inner size.
        ("add_mm", (matrix(8, 32), matrix(32, 4), matrix(2, 1), matrix(8, 4)), RecordedGemm(32, "bfloat16", (0, 1))),
        ("mm_mul", (matrix(8, 8), matrix(8, 8), matrix(8, 8), matrix(8, 8)), RecordedGemm(8, "bfloat16", ())),
        ("_to_copy_mm", (matrix(8, 32), matrix(32, 4), matrix(8, 4, "float32")), RecordedGemm(32, "bfloat16", (0, 1))),
        ("_to_copy_mm", (matrix(8, 32, "float32"), matrix(32, 4, "float32"), matrix(8, 4)), None),
        ("mm", (matrix(8, 32, "float32"), matrix(32, 4), matrix(8, 4)), None),
    ],
)
def test_a_template_of_a_product(name: str, tensors: tuple[RecordedTensor, ...], product: RecordedGemm | None):
    least = moved(f"triton_tem_fused_{name}_7", tensors, (), "BLOCK_M=64")
    out = tensors[-1]
    assert least == MinTraffic(None, (), (out.shape[0] * out.shape[1], str(out.dtype)), product)


def test_templates_of_which_nothing_is_certain():
    right = (matrix(8, 32), matrix(32, 4), matrix(8, 4))
    for name in ("flex_attention", "mm_slice", "add", "addmm_mm"):
        assert moved(f"triton_tem_fused_{name}_7", right, (), "BLOCK_M=64") == NOTHING
    assert moved("triton_tem_fused_mm_7", (matrix(8, 32), matrix(31, 4), matrix(8, 4)), (), "") == NOTHING
    assert moved("triton_tem_fused_mm_7", right[:2], (), "") == NOTHING
    parts = (
        matrix(8, 16),
        matrix(16, 8),
        RecordedTensor((4, 8, 8), (64, 8, 1), "float32"),
    )  # of a sum over 16, in four
    assert moved("triton_tem_fused_mm_7", parts, (), "") == NOTHING


def test_a_name_is_taken_apart_only_if_all_of_it_is_known():
    assert whole_operators("_log_softmax__to_copy_add") == {"_log_softmax", "_to_copy", "add"}
    assert whole_operators("add_mul_mul") is None  # each is there once
    assert whole_operators("mul_add") is None  # in order
    assert whole_operators("add_mm") is None
    assert whole_operators("") is None


def test_no_other_operator_reads_like_one_of_these():
    names = {
        name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::" in name
    }
    assert len(names) > 1000
    assert {name for name in names if whole_operators(name) is not None} <= WHOLE_OPERAND_OPERATORS


VIEWS = "_unsafe_view expand permute reshape squeeze t transpose unsqueeze view alias detach".split()


def test_each_element_of_each_operand_reaches_the_result():
    """An element that is not a number must be seen in what comes out."""
    tried = 0
    for name in sorted(
        WHOLE_OPERAND_OPERATORS.difference(VIEWS, ["log_sigmoid_backward"])
    ):  # which has an operand for CPUs alone
        function = getattr(torch.ops.aten, name, None)
        for count in (1, 2, 3):
            operands = [torch.full((2, 3), 0.5) for _ in range(count)]
            try:
                before = function(*operands)
            except Exception:  # it takes other operands
                continue
            if not isinstance(before, torch.Tensor) or before.dtype != torch.float32:
                continue
            for operand in operands:
                for place in range(operand.numel()):
                    kept = float(operand.view(-1)[place])
                    operand.view(-1)[place] = torch.nan
                    assert not torch.equal(function(*operands), before), (name, count, place)
                    operand.view(-1)[place] = kept
            tried += 1
            break
    assert tried > 60
