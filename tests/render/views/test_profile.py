"""The text of a profile, from made-up figures."""

import dataclasses
import re

import pytest
from made_up import profile  # type: ignore[import-not-found]

from nearpeak.profiles.completeness import Completeness, Loss
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.waterfall import build_waterfall
from nearpeak.render.text import PLAIN, Style
from nearpeak.render.text import text as written
from nearpeak.render.views.profile import ReportOptions, document


def text(profile, *, style=PLAIN, **options):
    return written(document(profile, ReportOptions(**options)), style)


GOLDEN = """\
Verdict: 10.0 s a step, 10.0 x the ideal 1.00 s on toy. Grade B: 95.0 % of the
         time has a bound; steps 6 % apart.
Why:     Most is lost to idle: 4.00 s, 40.0 % of the step (nothing runs on the
         device).
Next:    What the host did meanwhile was not recorded: profile the code itself
         with nearpeak.

part             time    share
-------------  ------  -------
ideal          1.00 s   10.0 %  ####
traffic        1.00 s   10.0 %      ####
fusion         1.00 s   10.0 %          ####
slow kernels   1.00 s   10.0 %              ####
not modeled    1.00 s   10.0 %                  ####
communication  1.00 s   10.0 %                      ####
idle           4.00 s   40.0 %                          ################
wall           10.0 s  100.0 %

op, in s             ops  measured  written  fused  expected  lost  limit
-------------------  ---  --------  -------  -----  --------  ----  ------
mul forward            1      2.00     1.00   0.50      1.50  1.00  memory
mine.kernel forward    1      1.00        -      -         -     -  -
mul backward           1      2.00     2.00   1.50      3.00  0.00  memory

Modeled: 95.0 % of the 5.00 s in which kernels ran. Without a bound: mine.kernel
1.00 s.

Grade: B (95.0 % of the time has a bound; steps 6 % apart). 7 clean steps, the
slowest and the fastest 6.0 % apart; under the profiler a step took 12.0 s;
99.9 % of its ops were found again in the trace.

A note."""


def measured(**changes):
    """The made-up profile with shares of fused groups, and with the facts of a measurement."""
    made = profile()
    fused = (0.5, 1.5, 0.0)
    ops = tuple(dataclasses.replace(op, fused_s=share) for op, share in zip(made.ops, fused, strict=True))
    facts = {"ops": ops, "steps": 7, "spread": 0.06, "matched": 0.999, "profiled_s": 12.0}
    facts["modeled_share"] = 0.95
    return dataclasses.replace(made, **(facts | changes))


def losing(**times):
    """A profile whose wall time of 10 s is lost in another way."""
    floors = {"ideal_s": 1.0, "fused_s": 1.0, "as_written_s": 1.0, "modeled_s": 1.0, "kernel_s": 1.0} | times
    return measured(waterfall=build_waterfall(wall_s=10.0, **floors))


def card(found):
    return " ".join(found.partition("\n\n")[0].split())


def test_the_report_reads_so():
    assert text(measured()) == GOLDEN


def test_colors_change_nothing_but_colors():
    colored = text(measured(), style=Style(color=True))
    assert re.sub(r"\x1b\[\d+m", "", colored) == GOLDEN
    assert "\x1b[1mVerdict:\x1b[0m" in colored
    assert "\x1b[33m################\x1b[0m" in colored
    assert "Grade: \x1b[32mB\x1b[0m" in colored


def test_blocks_on_a_terminal():
    assert text(measured(), style=Style(blocks=True)) == GOLDEN.replace("#", "█")


def test_it_can_be_ranked_otherwise():
    found = text(profile(), by="line")
    assert "train.py:4" in found
    assert found.index("train.py:4") < found.index("train.py:9")


def test_the_end_of_a_long_line_is_kept():
    made = measured()
    op = dataclasses.replace(made.ops[0], source="a/very/long/way/to/some/module/model.py:123")
    assert "model.py:123" in text(dataclasses.replace(made, ops=(op,)), by="line").partition("\n\n")[2]


def test_overloads_are_named_where_two_are_in_the_table():
    made = measured()
    other = dataclasses.replace(made.ops[0], name="aten.mul.Scalar")
    found = text(dataclasses.replace(made, ops=(made.ops[0], other)))
    assert "mul.Tensor forward" in found
    assert "mul.Scalar forward" in found


def test_backward_is_said_once_and_not_cut_off():
    made = measured()
    ops = [
        dataclasses.replace(made.ops[0], name="aten.gelu_backward.default", phase="backward"),
        dataclasses.replace(made.ops[0], name="aten._scaled_dot_product_flash_attention_backward.default"),
    ]
    ops[1] = dataclasses.replace(ops[1], phase="backward", measured_s=9.0)
    found = text(dataclasses.replace(made, ops=tuple(ops)))
    assert "\ngelu_backward  " in found
    assert re.search(r"\n_scaled_dot_\w*\.\.\._backward  ", found)


def test_a_broken_bound_is_called_one():
    found = text(losing(as_written_s=8.0, modeled_s=4.0, kernel_s=5.0))
    assert "below zero: measure this machine again" in found
    assert "Grade: F" in found


def test_slow_kernels_name_the_op_its_line_and_what_good_ones_take():
    found = card(text(losing(modeled_s=9.0, kernel_s=9.0)))
    assert "mul.Tensor (forward) loses most: 1.00 s in 1 op, 2.0 x the bound." in found
    assert "Begin with mul.Tensor (forward) at train.py:4: good kernels take 1.50 s for it, these took 2.00 s." in found


def test_kernels_as_fast_as_others_are_not_called_slow():
    made = losing(modeled_s=9.0, kernel_s=9.0)
    ops = tuple(dataclasses.replace(op, expected_s=1.9) for op in made.ops)
    found = card(text(dataclasses.replace(made, ops=ops)))
    assert "No remedy is known for mul.Tensor (forward) at train.py:4: good kernels take 1.90 s, these 2.00 s." in found


def test_fusion_names_the_line_with_most_of_it():
    found = card(text(losing(as_written_s=9.0, modeled_s=9.0, kernel_s=9.0)))
    assert "train.py:4 has most of it: 1.00 s in 2 ops." in found
    assert "Next: Fuse the ops at train.py:4: torch.compile" in found


def test_what_has_no_bound_is_named():
    found = card(text(losing(kernel_s=9.0)))
    assert "mine.kernel takes most of it: 1.00 s." in found
    assert "nearpeak.declare_cost" in found


def test_idle_time_has_the_cause_with_most_in_all_its_places():
    def cause(name, seconds, where="", what=""):
        return IdleCause(cause=name, seconds=seconds, count=1, where=where, what=what)

    waits = (cause("synchronization", 1.2, "train.py:4", "item"), cause("synchronization", 1.3, "train.py:9", "cpu"))
    found = card(text(measured(idle=(cause("launching", 1.5), *waits))))
    assert "Its largest cause is synchronization (cpu), 2.50 s" in found
    assert "most at train.py:9." in found
    assert "Keep results on the device there" in found


def test_where_little_is_lost_nothing_is_promised():
    found = text(losing(ideal_s=9.9, fused_s=9.9, as_written_s=9.9, modeled_s=9.9, kernel_s=9.9))
    assert "Little is left to gain" in card(found)


@pytest.mark.parametrize("by", ["op", "module", "line", "phase", "family"])
def test_names_from_outside_are_harmless_and_cut(by):
    made = measured()
    bad = "x" * 200 + "\x1b[31m"
    op = dataclasses.replace(made.ops[0], name=bad, module=bad, source=bad, phase=bad, family=bad, limiter=bad)
    cause = IdleCause(cause="python", seconds=1.0, count=1, where=bad, what=bad)
    found = text(dataclasses.replace(made, ops=(op,), device=bad, source=bad, machine=bad, idle=(cause,)), by=by)
    assert "\x1b" not in found
    assert max(map(len, found.splitlines())) <= 80


def test_a_recording_with_all_of_its_markers_is_said_to_be_complete():
    complete = Completeness(launches=1200, markers=8)
    said = "the 1,200 launches of the step have their kernels, and all 8 marker kernels are there"
    assert said in " ".join(text(measured(completeness=complete)).split())
    loss = Loss(kind="markers", count=1, in_step=False, text="A marker is gone.")
    lossy = dataclasses.replace(complete, losses=(loss,))
    for other in (None, Completeness(launches=1200), lossy):
        assert "marker kernels are there" not in " ".join(text(measured(completeness=other)).split())
