"""The report of an estimate."""

import pytest
from estimates import estimate, op

from nearpeak.bound.tiles import Tiling
from nearpeak.render.text import text as written
from nearpeak.render.views.estimate import document


def text(estimate, **options):
    return written(document(estimate, **options))


EXPECTED = """\
On toy, measured ceilings: 3 ops, 6.00 GFLOP, 12.0 MB

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

Modeled: 100.0 % of the as-written time."""


def test_the_report():
    ops = [op(), op(), op("aten.mul.Tensor", 0.5e-3, family="pointwise")]
    assert text(estimate(ops)) == EXPECTED


def test_what_has_no_model_is_named():
    report = text(estimate([op()], {"mine.kernel.default": 3}))
    assert "Without a formula: mine.kernel.default x3." in report.replace("\n", " ")


def test_a_trace_that_stopped_says_so():
    assert "stopped at its limit" in text(estimate([op()], truncated=True))


def test_names_from_outside_are_cut_and_harmless():
    found = text(estimate([op("x" * 300 + "\x1b[31m", source="/" + "y" * 300 + ".py:1")]))
    assert "\x1b" not in found
    assert max(map(len, found.splitlines())) <= 100


def test_an_empty_trace_is_a_report_too():
    assert "0 ops" in text(estimate([]))


def tiled(m, **fields):
    tiling = Tiling(batch=1, m=m, n=2560, k=64, tile=(128, 256, 64), tiles=-(-m // 128) * 10, processors=10)
    return op(tiling=tiling, **fields)


def test_products_that_fill_the_processors_badly():
    found = text(estimate([tiled(64), tiled(64), tiled(1280)]))
    section = found.partition("Matrix products that fill the 10 processors badly")[2].splitlines()
    row = next(line for line in section if line.startswith("mm"))
    assert row.split() == ["mm", "x2", "64x2560x64", "128x256", "1.00", "50", "%", "50", "%", "2.00", "ms"]
    assert "1280x2560" not in found  # nothing is lost there
    assert max(map(len, found.splitlines())) <= 80


@pytest.mark.parametrize("fields", [{"m": 1280}, {"m": 64, "limiter": "memory"}])
def test_products_that_lose_nothing_by_it_are_not_shown(fields):
    assert "badly" not in text(estimate([tiled(**fields)]))
