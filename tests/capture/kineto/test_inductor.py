import pytest

from nearpeak.capture.kineto.inductor import least_written
from nearpeak.capture.kineto.tensors import Scalar, Seen

WIDE = Seen((8, 4), (4, 1), "float32")
NARROW = Seen((8, 4), (4, 1), "bfloat16")


@pytest.mark.parametrize(
    ("name", "tensors", "sizes", "blocks", "least"),
    [
        ("triton_poi_fused_add_0", (NARROW, NARROW), (32,), "XBLOCK=1024", (32, "bfloat16")),
        ("triton_poi_fused_add_0", (WIDE, NARROW), (32,), "XBLOCK=1024", (32, "bfloat16")),
        ("triton_poi_fused_add_0", (WIDE, NARROW, WIDE), (32,), "XBLOCK=1024", (32, "float32")),
        ("triton_poi_fused_clone_1", (NARROW, NARROW), (8, 4), "XBLOCK=32,YBLOCK=32", (32, "bfloat16")),
        ("triton_poi_fused_clone_1", (NARROW, NARROW), (99, 32), "XBLOCK=32", (32, "bfloat16")),
        ("triton_red_fused_sum_2", (NARROW, WIDE), (8, 4), "XBLOCK=2,R0_BLOCK=2048", (8, "bfloat16")),
        ("triton_per_fused_sum_3", (WIDE, WIDE), (8, 4), "XBLOCK=1", (8, "float32")),
        ("triton_poi_fused_index_put_4", (NARROW, NARROW), (32,), "XBLOCK=1024", None),
        ("triton_poi_fused_scatter_add_4", (NARROW, NARROW), (32,), "XBLOCK=1024", None),
        ("triton_tem_fused_mm_5", (NARROW, NARROW), (32,), "BLOCK_M=64", None),
        ("triton_for_fused_6", (NARROW, NARROW), (), "", None),
        ("triton_poi_fused_add_0", (), (32,), "XBLOCK=1024", None),
        ("triton_poi_fused_add_0", (NARROW,), (), "XBLOCK=1024", None),
        ("triton_poi_fused_add_0", (NARROW,), (1.5,), "XBLOCK=1024", None),
    ],
)
def test_what_a_kernel_must_write(
    name: str, tensors: tuple[Seen, ...], sizes: tuple[int, ...], blocks: str, least: tuple[int, str] | None
):
    arguments = (*tensors, *(Scalar(size) for size in sizes))
    assert least_written(name, arguments, {"kernel_kwargs": blocks}) == least
