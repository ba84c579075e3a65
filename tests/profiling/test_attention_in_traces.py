"""Attention that is written out is recognized in trace files, by sizes and order: a file has no addresses."""

from pathlib import Path
from typing import Any

import pytest

from nearpeak.profiles.profile import Profile
from nearpeak.profiling.load import profile_trace
from tests.made_traces import MadeTrace, T

BATCH, HEADS, TOKENS, HEAD, WIDTH = 8, 16, 2048, 64, 1024
GROUPS = BATCH * HEADS
RULE = "attention-written-out"


def attention(trace: MadeTrace, tokens: int = TOKENS, *, inputs: bool = True, compiled: bool = False) -> float:
    """Product, scale, mask, softmax and product; gives the microseconds of these."""
    flat, wide = T(GROUPS, tokens, tokens), T(BATCH, HEADS, tokens, tokens)
    query, key = T(GROUPS, tokens, HEAD), T(GROUPS, HEAD, tokens, strides=(tokens * HEAD, 1, HEAD))
    trace.op("aten::bmm", query, key, us=900)
    if compiled:
        trace.op("triton_per_fused__softmax_masked_fill_mul_0", flat, wide, GROUPS * tokens, tokens, us=1500)
        trace.events[-3]["args"]["kernel_backend"] = "triton"
    else:
        trace.op("aten::mul", wide, T(dtype="float32"), us=700)
        trace.op("aten::add", wide, T(1, 1, tokens, tokens), 1, us=800)
        trace.op("aten::_softmax", wide, -1, False, us=900)
        if not inputs:
            for name in ("Input Dims", "Input Strides", "Input type", "Concrete Inputs"):
                del trace.events[-3]["args"][name]
    trace.op("aten::bmm", flat, T(GROUPS, tokens, HEAD), us=900)
    return 3300.0 if compiled else 4200.0


def attention_backward(trace: MadeTrace) -> float:
    flat, wide = T(GROUPS, TOKENS, TOKENS), T(BATCH, HEADS, TOKENS, TOKENS)
    narrow, turned = T(GROUPS, TOKENS, HEAD), T(GROUPS, TOKENS, TOKENS, strides=(TOKENS * TOKENS, 1, TOKENS))
    trace.op("aten::bmm", turned, narrow, us=900)
    trace.op("aten::bmm", narrow, T(GROUPS, HEAD, TOKENS), us=900)
    trace.op("aten::_softmax_backward_data", wide, wide, -1, 15, us=1300)
    trace.op("aten::mul", wide, T(dtype="float32"), us=700)
    trace.op("aten::bmm", T(GROUPS, HEAD, TOKENS), flat, us=900)
    trace.op("aten::bmm", flat, narrow, us=900)
    return 5600.0


def linear(trace: MadeTrace, out: int = WIDTH) -> None:
    trace.op("aten::mm", T(BATCH * TOKENS, WIDTH), T(WIDTH, out), us=100)


def profiled(trace: MadeTrace, tmp_path: Path) -> Profile:
    return profile_trace(trace.write(tmp_path / "trace.json"))


def found_in(profile: Profile) -> dict[str, Any]:
    return {finding.rule: finding for finding in profile.findings}


@pytest.mark.parametrize("options", [{}, {"inputs": False}, {"compiled": True}])
def test_attention_in_inference(tmp_path: Path, options: dict[str, bool]):
    trace = MadeTrace()
    took = 0.0
    for _ in range(3):
        for _ in range(3):
            linear(trace)
        took += attention(trace, **options)
        linear(trace)
    profile = profiled(trace, tmp_path)
    finding = found_in(profile)[RULE]
    assert finding.places == 3
    assert sum(profile.ops[index].measured_s for index in finding.ops) == pytest.approx(took / 1e6)
    assert 0.5 < finding.share < took / 1e6 / profile.wall_s
    assert "scaled_dot_product_attention" in finding.remedy
    assert "128 x 2048 x 2048" in finding.evidence
    assert profile.findings[0] is finding


def test_attention_with_its_backward(tmp_path: Path):
    trace = MadeTrace()
    took = 0.0
    for _ in range(2):
        linear(trace)
        took += attention(trace)
    for _ in range(2):
        took += attention_backward(trace)
        linear(trace)
    profile = profiled(trace, tmp_path)
    finding = found_in(profile)[RULE]
    assert finding.places == 2
    assert sum(profile.ops[index].measured_s for index in finding.ops) == pytest.approx(took / 1e6)
    assert "forward and backward" in finding.evidence


def test_the_advice_for_a_ragged_sequence_names_attention_and_no_vocabulary(tmp_path: Path):
    trace = MadeTrace()
    for _ in range(2):
        linear(trace)
        attention(trace, 2047)
    profile = profiled(trace, tmp_path)
    assert profile.findings[0].rule == RULE
    for finding in profile.findings:
        assert "vocabulary" not in finding.remedy, finding


def test_a_softmax_that_is_not_of_attention(tmp_path: Path):
    trace = MadeTrace()
    linear(trace, 50000)  # the scores of a vocabulary, and of experts: products with a weight
    trace.op("aten::_softmax", T(BATCH * TOKENS, 50000), -1, False, us=500)
    linear(trace)
    trace.op("aten::bmm", T(GROUPS, TOKENS, HEAD), T(GROUPS, HEAD, HEAD), us=100)
    trace.op("aten::_softmax", T(GROUPS, TOKENS, HEAD), 1, False, us=500)  # over columns
    trace.op("aten::bmm", T(GROUPS, TOKENS, HEAD), T(GROUPS, HEAD, HEAD), us=100)
    trace.op("aten::bmm", T(4, 64, 64), T(4, 64, 64), us=100)
    trace.op("aten::_softmax", T(GROUPS, TOKENS, TOKENS), -1, False, us=500)  # of something else
    trace.op("aten::bmm", T(4, 64, 64), T(4, 64, 64), us=100)
    trace.op("aten::bmm", T(8, 4096, 512), T(8, 512, 64), us=100)  # tokens to experts, by their scores
    trace.op("aten::_softmax", T(8, 4096, 64), -1, False, us=500)
    trace.op("aten::bmm", T(8, 64, 4096, strides=(4096 * 64, 1, 64)), T(8, 4096, 512), us=100)
    assert RULE not in found_in(profiled(trace, tmp_path))


def test_probabilities_on_the_right(tmp_path: Path):
    """Values by transposed probabilities, in float32 and back in bfloat16 between."""
    trace = MadeTrace()
    trace.op("aten::bmm", T(4, 4096, 64), T(4, 64, 4096), us=900)
    trace.op("aten::mul", T(4, 4096, 4096), T(dtype="float32"), us=400)
    trace.op("aten::_to_copy", T(4, 4096, 4096), 6, None, None, None, False, None, us=600)
    trace.op("aten::_softmax", T(4, 4096, 4096, dtype="float32"), 2, False, us=800)
    trace.op("aten::_to_copy", T(4, 4096, 4096, dtype="float32"), 15, None, None, None, False, None, us=600)
    trace.op("aten::bmm", T(4, 64, 4096), T(4, 4096, 4096, strides=(4096 * 4096, 1, 4096)), us=900)
    profile = profiled(trace, tmp_path)
    assert found_in(profile)[RULE].share > 0.5
    assert len(found_in(profile)[RULE].ops) == 6
