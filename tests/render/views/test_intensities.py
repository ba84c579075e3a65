"""The table of intensities."""

import pytest
from estimates import addition, copy, estimate, machine, op, product

from nearpeak.errors import UsageError
from nearpeak.render.document import Document
from nearpeak.render.text import text
from nearpeak.render.views.estimate import intensities


def intensities_text(*arguments, **options):
    return text(Document(title="", is_titled=False, parts=tuple(intensities(*arguments, **options))))


EXPECTED = """\
op and its operands  FLOPs    bytes  FLOP/B  ridge  limit      bound
-------------------  -----  -------  ------  -----  -------  -------
mm x2                200 G   200 MB    1000    100  compute  2.00 ms
  512x256, 256x128
add                  100 M  1.00 GB   0.100   10.0  memory   1.00 ms
  512x256, 256x128
clone                    -  1.00 GB       -      -  memory   1.00 ms
  512x256, 256x128"""


def test_the_table():
    found = intensities_text(estimate([product(), product(), addition(), copy()]), machine())
    assert found.partition("\n\n")[0] == EXPECTED


def test_other_shapes_are_another_row():
    found = intensities_text(estimate([product(), product(shapes=((1024, 256), (256, 128)))]), machine())
    assert "1024x256, 256x128" in found
    assert "mm x2" not in found


def test_rows_beyond_the_top_are_counted():
    found = intensities_text(estimate([product(), addition(seconds=1e-4), copy(seconds=9e-4)]), machine(), top=1)
    assert "And 2 more, 50.0 % of the as-written time" in found
    assert "clone" not in found


def test_it_fits_in_80_columns():
    shapes = ((8192, 16384, 4096), (4096, 16384, 128), (4096,)) * 5
    hostile = op("mine." + "x" * 300 + ".default", shapes=shapes, flops=1e18, bytes_read=1e15, limiter="compute")
    found = intensities_text(estimate([hostile, hostile, op(shapes=((),))]), machine())
    assert max(map(len, found.splitlines())) <= 80
    assert "scalar" in found


def test_an_estimate_for_another_machine_is_refused():
    with pytest.raises(UsageError, match="for h200-sxm, and the machine that was given is toy"):
        intensities_text(estimate([product()], machine="h200-sxm"), machine())


def test_nothing():
    assert "op and its operands" in intensities_text(estimate([]), machine())
