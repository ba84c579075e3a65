"""The text of a profile, from made-up figures."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "diagnose"))

from made_up import profile  # type: ignore[import-not-found]

from nearpeak.diagnose.waterfall import waterfall
from nearpeak.render.profile import text

GOLDEN = """\
Verdict: 10.0 s a step, 10.0 x the ideal 1.00 s on toy.
Why:     Most is lost to idle: 4.00 s, 40.0 % of the step (nothing runs on the
         device).
Next:    Keep the device busy: CUDA graphs or torch.compile, no synchronisation,
         faster input.

part             time    share
-------------  ------  -------  ----------
ideal          1.00 s   10.0 %  ##
traffic        1.00 s   10.0 %  ##
fusion         1.00 s   10.0 %  ##
slow kernels   1.00 s   10.0 %  ##
not modelled   1.00 s   10.0 %  ##
communication  1.00 s   10.0 %  ##
idle           4.00 s   40.0 %  ##########
wall           10.0 s  100.0 %

op                   ops  measured   bound  expected    lost  limit
-------------------  ---  --------  ------  --------  ------  ------
mul.Tensor forward     1    2.00 s  1.00 s    1.50 s  1.00 s  memory
mine.kernel forward    1    1.00 s       -         -       -  -
mul.Tensor backward    1    2.00 s  2.00 s    3.00 s     0 s  memory

Modelled: 80.0 % of the 5.00 s in which kernels ran. Without a bound:
mine.kernel 1.00 s.

A note."""


def test_the_report_reads_so():
    assert "\n".join(line.rstrip() for line in text(profile()).splitlines()) == GOLDEN


def test_it_can_be_ranked_otherwise():
    found = text(profile(), by="line")
    assert "train.py:4" in found
    assert found.index("train.py:4") < found.index("train.py:9")


def test_a_broken_bound_is_called_one():
    times = {"ideal_s": 1.0, "fused_s": 2.0, "as_written_s": 8.0, "modelled_s": 4.0, "kernel_s": 5.0}
    broken = dataclasses.replace(profile(), waterfall=waterfall(wall_s=10.0, communication_s=1.0, **times))
    assert "below zero: a bound of nearpeak's is wrong" in text(broken)


def test_names_from_outside_are_harmless_and_cut():
    made = profile()
    op = dataclasses.replace(made.ops[0], name="x" * 200 + "\x1b[31m")
    found = text(dataclasses.replace(made, ops=(op,), device="\x1b", source="</script>"))
    assert "\x1b" not in found
    assert max(map(len, found.splitlines())) <= 90
