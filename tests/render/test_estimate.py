"""The report of an estimate."""

from nearpeak.bound.estimate import Coverage, Estimate, EstimatedOp
from nearpeak.render.estimate import text
from nearpeak.work.model import Work


def op(name="aten.mm.default", seconds=1e-3, **fields):
    return EstimatedOp(
        **{
            "name": name,
            "family": "matrix",
            "flops": 2e9,
            "bytes_read": 4e6,
            "bytes_written": 2e6,
            "seconds": seconds,
            "limiter": "compute",
            "module": "layers.0",
            "phase": "forward",
            "source": "/home/me/train.py:41",
            "model": "formula",
            **fields,
        }
    )


def estimate(ops, unmodelled=None, **fields):
    return Estimate(
        **{
            "machine": "h200-sxm",
            "ceilings": "achievable",
            "how": "derated",
            "as_written_s": sum(one.seconds for one in ops),
            "fused_s": 0.5e-3,
            "ideal_s": 0.25e-3,
            "work": Work(flops={"bfloat16": 4e9}, bytes_read=8e6, bytes_written=4e6),
            "ops": tuple(ops),
            "groups": (),
            "coverage": Coverage(formula=len(ops), operands=0, none=0, seconds_share=1.0, unmodelled=unmodelled or {}),
            **fields,
        }
    )


EXPECTED = """\
On h200-sxm, derated datasheet: 3 ops, 4.00 GFLOP, 12.0 MB

floor          time  meaning
----------  -------  ------------------------------------------------
as written  2.50 ms  every op at its own roofline
fused        500 us  intermediates that need not reach memory do not
ideal        250 us  inputs, parameters and results cross memory once

family     ops  as written   share       FLOPs    bytes
---------  ---  ----------  ------  ----------  -------
matrix       2     2.00 ms  80.0 %  4.00 GFLOP  12.0 MB
pointwise    1      500 us  20.0 %  2.00 GFLOP  6.00 MB

op          count     time  limit    phase    line
----------  -----  -------  -------  -------  -----------
mm.default      2  2.00 ms  compute  forward  train.py:41
mul.Tensor      1   500 us  compute  forward  train.py:41

Modelled: 100.0 % of the as-written time."""


def test_the_report():
    ops = [op(), op(), op("aten.mul.Tensor", 0.5e-3, family="pointwise")]
    assert text(estimate(ops)) == EXPECTED


def test_what_has_no_model_is_named():
    assert "Without a formula: mine.kernel.default x3." in text(estimate([op()], {"mine.kernel.default": 3}))


def test_a_trace_that_stopped_says_so():
    assert "stopped at its limit" in text(estimate([op()], truncated=True))


def test_names_from_outside_are_cut_and_harmless():
    found = text(estimate([op("x" * 300 + "\x1b[31m", source="/" + "y" * 300 + ".py:1")]))
    assert "\x1b" not in found
    assert max(map(len, found.splitlines())) <= 100


def test_an_empty_trace_is_a_report_too():
    assert "0 ops" in text(estimate([]))
