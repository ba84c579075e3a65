"""What a difference looks like, in a terminal and as Markdown."""

import re
from dataclasses import replace

import pytest
from real_runs import real, scaled  # type: ignore[import-not-found]

from nearpeak.diffs.difference import difference
from nearpeak.diffs.gate import gate
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.idle import IdleCause
from nearpeak.render.markdown import markdown as as_markdown
from nearpeak.render.text import PLAIN, Style
from nearpeak.render.text import text as as_text
from nearpeak.render.views.difference import document


def text(found, top=12, style=PLAIN, **options):
    return as_text(document(found, top, **options), style)


def markdown(found, **options):
    return as_markdown(document(found, **options))


RUN = real("vit_second")
SAME = """\
Verdict: The same, as far as noise lets tell: 50.4 ms a step against 51.1 ms,
         -1.4 %, where runs of the same code differ by up to 2.9 %.
Before:  old.json, train.py, 2026-01-02 03:04, NVIDIA H200, 10 clean steps 7.7 %
         apart
After:   new.json, train.py, 2026-01-02 03:04, NVIDIA H200, 10 clean steps 4.9 %
         apart

part           before    after   change  of the step
------------  -------  -------  -------  -----------
ideal         15.1 ms  15.1 ms      0 s       +0.0 %
traffic       4.37 ms  4.37 ms      0 s       +0.0 %
fusion        6.08 ms  6.08 ms      0 s       +0.0 %
slow kernels  23.4 ms  23.3 ms  -155 us       -0.3 %
idle          2.04 ms  1.50 ms  -543 us       -1.1 %
wall          51.1 ms  50.4 ms  -697 us       -1.4 %

No op changed beyond noise."""


def finding(**changes):
    values = {
        "rule": "weight-copied",
        "title": "A weight is copied.",
        "source": "train.py:4",
        "modules": ("model",),
        "places": 1,
        "saving_s": 0.002,
        "share": 0.04,
        "evidence": "",
        "reasoning": "",
        "remedy": "",
    }
    return Finding(**{**values, **changes})


def everything():
    """Something in every section."""
    waits = IdleCause(cause="synchronization", seconds=5e-3, count=12, where="train.py:9", what="item")
    before = replace(real("vit_first"), findings=(finding(rule="old-one"),))
    after = replace(real("vit_compiled"), idle=(waits,), findings=(finding(),), flops=2 * RUN.flops)
    return difference(before, after)


def test_two_runs_that_are_the_same():
    found = difference(real("vit_first"), RUN)
    assert text(found, names=("old.json", "new.json")).startswith(SAME)


def test_an_op_has_its_times_and_its_place():
    slower = scaled(RUN, lambda op: op.name.startswith("aten.gelu."), 1.04)
    lines = text(difference(RUN, slower)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("gelu forward"))
    assert lines[at].split() == ["gelu", "forward", "12", "1.23", "ms", "1.28", "ms", "+49.1", "us", "+4.0", "%"]
    assert lines[at + 1].strip().startswith("same op; ")
    assert "layers.*.mlp.activation_fn" in lines[at + 1]
    assert lines[at + 3].startswith("all other kernels") or lines[at + 2].startswith("all other kernels")


@pytest.mark.parametrize("top", [1, 3, 100])
def test_no_line_is_wider_than_80_columns(top):
    shown = text(everything(), top, names=("a" * 300, "b" * 300))
    assert max(map(len, shown.splitlines())) <= 80


def test_every_section_is_there():
    shown = text(everything())
    for part in (
        "Verdict: Slower",
        "replaced by bmm",
        "synchronization",
        "+ weight-copied",
        "- old-one",
        "different wo",
    ):
        assert part in shown


def test_the_rest_is_counted():
    assert "--top" not in text(everything(), 100)
    assert "more changed; --top" in text(everything(), 1)


def test_runs_that_are_too_noisy_are_not_called_the_same():
    found = difference(replace(RUN, spread=0.5), scaled(RUN, lambda op: True, 1.3))
    shown = text(found)
    assert shown.startswith("Verdict: Too noisy to tell")
    assert "Ops are not compared" in shown


def test_what_the_clock_may_have_done_is_said():
    shown = " ".join(text(difference(RUN, scaled(RUN, lambda op: op.limiter == "compute", 1.05))).split())
    assert "Kernels that compute take 5.0 % longer, as they do with another clock." in shown
    shown = " ".join(text(difference(RUN, scaled(RUN, lambda op: True, 1.034))).split())
    assert shown.startswith("Verdict: The same, as far as the clock lets tell:")
    assert "Kernels that wait for memory take 3.4 % longer alike." in shown


def test_colors_are_only_where_they_are_wanted():
    found = everything()
    assert "\x1b" not in text(found)
    assert "\x1b[31mVerdict:\x1b[0m" in text(found, style=Style(color=True))


def test_markdown_has_tables_and_the_gate():
    found = everything()
    shown = markdown(found, names=("main", "change"), gate=gate(found, 0.03))
    assert shown.startswith("### nearpeak: the step is slower, +7.3 %")
    assert "Gate failed: a step takes 7.3 % longer" in shown
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    assert "| op that changed | ops | before | after | change | in % | how and where |" in tables
    assert all(line.endswith("|") for line in tables)
    assert len(shown) < 65_536


HOSTILE = "</script><img src=x onerror=alert(1)> | `x` [a](http://b.c) @octocat #1\n\u202e" + "x" * 10_000


def test_names_from_outside_are_only_text():
    op = real("vit_first").ops[0]
    odd = replace(op, name=HOSTILE, module=HOSTILE, source=HOSTILE, measured_s=0.01)
    before = replace(RUN, findings=(finding(rule=HOSTILE, title=HOSTILE, source=HOSTILE),), source=HOSTILE)
    after = replace(RUN, ops=(*RUN.ops, odd), device=HOSTILE, wall_s=0.06, walls=())
    found = difference(before, after)
    shown = text(found, names=(HOSTILE, HOSTILE))
    assert shown.isascii()
    assert max(map(len, shown.splitlines())) <= 80
    comment = re.sub(r"(`+).*?\1", "", markdown(found, names=(HOSTILE, HOSTILE)))  # code is only text
    for markup in ("<img", "</script", r"(?<!\\)\]\(", "@octocat"):
        assert not re.search(markup, comment)
    assert len(comment) < 65_536
    widths = {line.count("|") for line in comment.splitlines() if line.startswith("| ")}
    assert widths <= {6, 7, 8}


def test_two_programs_are_called_so_before_anything_else():
    found = difference(real("vit_first"), real("moe_first"))
    said = text(found).partition("Before:")[0].replace("\n         ", " ")
    assert said.startswith("Verdict: These are different programs: ops that both have take 4 % of the kernel time of ")
    assert not re.search("faster|slower", said, re.IGNORECASE)
    assert markdown(found).partition("\n")[0].endswith("the runs are of different programs")
