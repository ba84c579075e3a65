"""What kernels of Inductor's touch, from code as Inductor writes it."""

import pytest

from nearpeak.trace.patches.inductor_kernels import touched_elements


def kernel(*lines, sizes="xnumel = 8192"):
    body = "\n".join(f"    {line}" for line in (*sizes.split("; "), *lines))
    return f"def triton_poi_fused_0(in_ptr0, in_ptr1, in_out_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n{body}\n"


def test_digits_of_an_index_are_as_many_as_they_take_values():
    code = kernel(
        "x0 = (xindex % 64)",
        "x1 = ((xindex // 64) % 16)",
        "x2 = xindex // 1024",
        "tmp0 = tl.load(in_ptr0 + (x0 + 64*x2), xmask)",
        "tmp1 = tl.load(in_ptr1 + (x1), None, eviction_policy='evict_last')",
        "tl.store(out_ptr0 + (x0 + 64*x1 + 1024*x2), tmp0 + tmp1, xmask)",
    )
    found = touched_elements(code)
    assert found.read == {"in_ptr0": 64 * 8, "in_ptr1": 16}
    assert found.written == {"out_ptr0": 8192}
    assert found.complete


def test_digits_of_digits():
    code = kernel("x0 = xindex", "tmp0 = tl.load(in_ptr0 + (1 + 528*(x0 // 512) + ((x0 % 512))), None)")
    assert touched_elements(code).read == {"in_ptr0": 8192}


def test_a_reduction_reads_rows_and_writes_one_element_of_each():
    code = kernel(
        "x0 = xindex",
        "for r0_offset in tl.range(0, r0_numel, R0_BLOCK):",
        "    r0_index = r0_offset + r0_base",
        "    r0_mask = r0_index < r0_numel",
        "    r0_1 = r0_index",
        "    tmp0 = tl.load(in_ptr0 + (r0_1 + 2048*x0), r0_mask & xmask, other=0.0).to(tl.float32)",
        "    tmp1 = tl.load(in_ptr1 + (r0_1), r0_mask, other=0.0)",
        "tl.store(out_ptr0 + (x0), tmp2, xmask)",
        sizes="xnumel = 16; r0_numel = 2048",
    )
    found = touched_elements(code)
    assert found.read == {"in_ptr0": 16 * 2048, "in_ptr1": 2048}
    assert found.written == {"out_ptr0": 16}


@pytest.mark.parametrize(
    "load",
    [
        "tl.load(in_ptr0 + (x0 + 64*tmp4), xmask)",  # a gather
        "tl.load(in_ptr0 + (x0), tmp4 & xmask, other=0.0)",  # a part
        "tl.load(in_ptr0 + (x0*x0), xmask)",
        "tl.load(somewhere, xmask)",
    ],
)
def test_what_does_not_follow_from_the_code_counts_as_nothing(load):
    found = touched_elements(kernel("x0 = xindex", f"tmp0 = {load}", "tl.store(out_ptr0 + (x0), tmp0, xmask)"))
    assert found.read == {}
    assert found.written == {"out_ptr0": 8192}
    assert not found.complete


def test_a_result_that_is_read_again_is_no_read():
    code = kernel(
        "x0 = xindex",
        "tmp0 = tl.load(in_out_ptr0 + (x0), xmask)",
        "tl.store(out_ptr0 + (x0), tmp0, xmask)",
        "tmp1 = tl.load(out_ptr0 + (x0), xmask)",
        "tl.store(in_out_ptr0 + (x0), tmp1, xmask)",
        "tmp2 = tl.load(in_out_ptr0 + (x0), xmask)",
    )
    found = touched_elements(code)
    assert found.read == {"in_out_ptr0": 8192}
    assert found.written == {"out_ptr0": 8192, "in_out_ptr0": 8192}


def test_digits_that_vary_together_do_not_multiply():
    code = kernel("x0 = (xindex % 64)", "x2 = xindex", "tmp0 = tl.load(in_ptr0 + (x0 + 100000*x2), xmask)")
    assert touched_elements(code).read == {"in_ptr0": 8192}
    code = kernel("x0 = (xindex % 64)", "x1 = xindex // 64", "tmp0 = tl.load(in_ptr0 + (x0 + x1), xmask)")
    assert touched_elements(code).read == {"in_ptr0": 128}  # 191 places in truth


def test_sizes_that_the_code_leaves_open_come_from_the_launch():
    code = kernel("x0 = xindex", "tl.store(out_ptr0 + (x0), 1.0, xmask)", sizes="pass")
    assert touched_elements(code, (("xnumel", 12),)).written == {"out_ptr0": 12}
    assert not touched_elements(code).complete


def test_a_scalar_is_stored_by_a_filled_place():
    code = kernel("tl.store(out_ptr0 + (tl.full([1, 1], 0, tl.int32).broadcast_to(XBLOCK, 1)), tmp8, None)")
    assert touched_elements(code).written == {"out_ptr0": 1}


def test_atomic_additions_are_not_understood():
    code = kernel("x0 = xindex", "tl.atomic_add(out_ptr0 + (x0), 1.0, xmask)", "tl.store(out_ptr0 + (x0), 1.0, xmask)")
    assert not touched_elements(code).complete


def test_several_blocks_each_with_its_own_size():
    code = kernel(
        "if pid < 4:",
        "    xnumel = 100",
        "    x0 = xindex",
        "    tl.store(out_ptr0 + (x0), 1.0, xmask)",
        "elif pid < 8:",
        "    xnumel = 200",
        "    x1 = xindex",
        "    tl.store(in_out_ptr0 + (x1), 1.0, xmask)",
        sizes="pass",
    )
    assert touched_elements(code).written == {"out_ptr0": 100, "in_out_ptr0": 200}


def test_other_code_is_none():
    assert touched_elements("x = 1") is None
    assert touched_elements("def broken(:") is None
