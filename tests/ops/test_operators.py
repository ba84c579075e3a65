"""Every operator of torch that a backend must implement has a formula, or a reason why it has none."""

from __future__ import annotations

import re

import pytest
import torch

from nearpeak.ops.cost import registered

REASONS = {
    r"_?(sparse|nested)_.*|.*_(sparse|nested)_.*|sparse_.*|.*_sparse_?|_to_sparse.*|to_padded_tensor|_to_dense": (
        "how much a sparse or nested tensor holds is data"
    ),
    r"_coalesced?_?|_?(c?col|c?row|ccol|crow)?_?(indices|values)_copy|hspmm|sspaddmm|_spdiags|_spsolve": "sparse",
    r"_convert_indices_from_.*|_validate_compressed_.*|_cslt_.*": "sparse",
    r"_?mkldnn_.*|to_mkldnn": "oneDNN's own layout, whose tensors have no strides",
    r".*mps.*|_triton_.*|max_pool2d_backward|linear_backward|matmul_backward|_transform_bias_rescale_qkv": (
        "one backend's own, or one that only nested tensors take"
    ),
    r"quantized_.*": "tensors of quantized dtypes, which run on CPUs alone",
    r"_test_.*|_foobar|_compute_linear_combination": "torch's own tests, and a part that no user calls",
}
"""Operators without a formula by their names, and why."""

MOST_UNKNOWN = 0.02
"""The share of new operators that a torch which is newer (or older) than the one below may have."""
CHECKED = "2.13"


def needed():
    """Operators of `aten` that are not made of others, by the kernels that the dispatcher knows."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace != "aten":
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            packet, _, overload = operator.partition(".")
            found.add((f"aten.{packet}", f"aten.{packet}.{overload or 'default'}"))
    return found


def without_formula():
    """Those that have neither a formula nor a reason."""
    formulas = registered()
    packets = {packet for packet, name in needed() if packet not in formulas and name not in formulas}
    reason = re.compile("|".join(f"(?:{pattern})" for pattern in REASONS))
    return sorted(packet for packet in packets if not reason.fullmatch(packet.removeprefix("aten.")))


def test_every_operator_has_a_formula_or_a_reason():
    left, packets = without_formula(), {packet for packet, _ in needed()}
    assert len(packets) > 1000
    if torch.__version__.startswith(CHECKED):
        assert left == []
    else:
        print(f"torch {torch.__version__} has {len(left)} operators without a formula: {' '.join(left)}")
        assert len(left) / len(packets) < MOST_UNKNOWN


def test_most_operators_have_a_formula():
    formulas, operators = registered(), needed()
    covered = {packet for packet, name in operators if packet in formulas or name in formulas}
    assert len(covered) / len({packet for packet, _ in operators}) > 0.88


@pytest.mark.parametrize("pattern", REASONS)
def test_no_reason_is_given_in_vain(pattern):
    names = {packet.removeprefix("aten.") for packet, _ in needed() if packet not in registered()}
    assert any(re.fullmatch(pattern, name) for name in names)
