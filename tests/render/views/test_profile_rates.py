"""The text of rates and memory, from made-up figures."""

import dataclasses

from nearpeak.profiles.memory import PeakMemory
from nearpeak.profiles.rates import StepRates
from nearpeak.render.document import Document, Items
from nearpeak.render.text import text
from nearpeak.render.views.profile import _memory, _rates


def rates_text(rates):
    return text(Document(title="", is_titled=False, parts=(Items(items=tuple(_rates(rates)), hanging=0),)))


def memory_text(memory):
    return text(Document(title="", is_titled=False, parts=tuple(_memory(memory))))


RATES = StepRates(
    model_flops=4e14,
    hardware_flops=5e14,
    mfu=0.412,
    hfu=0.52,
    recompute_known=True,
    memory_bytes=1e12,
    flops_per_s=5e14,
    bytes_per_s=1e12,
    compute_share=0.6,
    bandwidth_share=0.25,
    kernel_flops_per_s=6e14,
    kernel_bytes_per_s=1.2e12,
    kernel_compute_share=0.72,
    kernel_bandwidth_share=0.3,
)
GIB = 2.0**30
MEMORY = PeakMemory(
    device="cuda:0",
    capacity_bytes=140 * GIB,
    peak_bytes=32 * GIB,
    parameters_bytes=4 * GIB,
    gradients_bytes=4 * GIB,
    optimizer_bytes=8 * GIB,
    activations_bytes=12 * GIB,
    other_bytes=1 * GIB,
    workspace_bytes=3 * GIB,
    unused_bytes=0.5 * GIB,
    op="aten.mm.default",
    phase="forward",
    module="layers.3.mlp",
    source="train.py:41",
)


def test_rates_name_their_convention():
    assert (
        rates_text(RATES)
        == """\
MFU 41.2 %, HFU 52.0 % of the dense datasheet peak (model and hardware FLOPs of
products, convolutions and attention).
Achieved: 500 TFLOP/s of products (60.0 % of the achievable, 72.0 % while
kernels ran), at least 1.00 TB/s of memory traffic (25.0 % of the achievable,
30.0 % while kernels ran)."""
    )


def test_a_trace_file_does_not_tell_what_ran_again():
    found = rates_text(dataclasses.replace(RATES, mfu=0.52, recompute_known=False))
    assert found.startswith("MFU at most 52.0 %, HFU 52.0 %")
    assert "a trace file does not tell which ops were computed again." in found.replace("\n", " ")


def test_what_is_not_known_is_said():
    unknown = dataclasses.replace(RATES, mfu=None, hfu=None, compute_share=None, bandwidth_share=None)
    assert (
        rates_text(unknown)
        == """\
MFU and HFU are not known: the machine has no datasheet peak for these dtypes.
Achieved: 500 TFLOP/s of products, at least 1.00 TB/s of memory traffic."""
    )


def test_memory_says_where_the_peak_is_and_what_for():
    assert (
        memory_text(MEMORY)
        == """\
Memory: 32.0 of 140 GiB at the peak (forward, layers.3.mlp, train.py:41):

memory                  size   share
------------------  --------  ------
parameters          4.00 GiB  12.5 %
gradients           4.00 GiB  12.5 %
optimizer state     8.00 GiB  25.0 %
activations         12.0 GiB  37.5 %
used by no op       1.00 GiB   3.1 %
workspace, at most  3.00 GiB   9.4 %
reserved, unused     512 MiB"""
    )


def test_small_sizes_have_their_own_units_and_unknown_ones_no_row():
    small = dataclasses.replace(
        MEMORY,
        capacity_bytes=None,
        peak_bytes=3 * 2.0**20 + 2048 + 12,
        parameters_bytes=3 * 2.0**20,
        gradients_bytes=0.0,
        optimizer_bytes=2048.0,
        activations_bytes=12.0,
        other_bytes=None,
        workspace_bytes=None,
        unused_bytes=None,
        module="",
        source="\x1b[31m" + "x" * 200,
    )
    found = memory_text(small)
    assert found.startswith("Memory: 3.00 MiB at the peak (forward,")
    assert "\x1b" not in found
    assert "2.00 KiB" in found
    assert "12 B" in found
    assert "used by no op" not in found
    assert max(map(len, found.splitlines())) <= 80
