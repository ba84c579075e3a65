"""The report of a fixed model: one screen of text, and a page that escapes what it shows."""

from __future__ import annotations

import dataclasses

import pytest

from nearpeak.fixes.record import AppliedFix, Errors, FixedSite, FixReport, Speed
from nearpeak.render.report import DOCUMENT_FORMATS
from nearpeak.render.text import text
from nearpeak.render.views.fix import document

SPEED = Speed(
    before_s=0.337, after_s=0.231, ratio=0.685, low=0.68, high=0.69, confidence=0.98, pairs=8, verdict="FASTER",
    memory_before=40e9, memory_after=20e9,
)  # fmt: skip
ERROR = Errors(what="output, the batch", original=1e-3, fixed=1.1e-3, allowed=2e-3, reference="float64")


def make_report(layers: int = 16) -> FixReport:
    kept = [
        FixedSite(
            fix="norm", path=f"model.layers.{place}.norm", what="RMSNorm of 2048", source="model.py:41", computes="pow",
            status="replaced", kernels=("nearpeak.rms_norm.default",),
        )
        for place in range(layers)
    ]  # fmt: skip
    dropped = dataclasses.replace(kept[0], fix="rotary", what="rotary embedding", status="rolled back", kernels=())
    skipped = dataclasses.replace(dropped, fix="rotary", status="skipped", why="it has no kernel")
    return FixReport(
        model="LlamaForCausalLM", machine="NVIDIA H200", torch="2.11", python="3.12", nearpeak="0.1.0",
        date="2026-01-01", trains=True, batch="int64[4, 4096]",
        fixes=(
            AppliedFix(id="norm", title="norms", status="kept", predicted_s=0.02, speed=SPEED, errors=(ERROR,)),
            AppliedFix(id="rotary", title="rotary", status="rolled back", why="slower: 1.02 x the time"),
        ),
        sites=(*kept, dropped, skipped), errors=(ERROR,), speed=SPEED, notes=("a note",),
    )  # fmt: skip


def test_the_report_is_one_screen():
    lines = text(document(make_report())).splitlines()
    assert len(lines) <= 35
    assert max(map(len, lines)) <= 80
    screen = "\n".join(lines)
    assert "LlamaForCausalLM is faster: 337 ms to 231 ms a step, 0.69 x the time" in " ".join(screen.split())
    assert "model.layers.*.norm x 16" in screen
    assert "nearpeak.rms_norm" in screen
    assert "it has no kernel" in screen
    assert "rotary: slower: 1.02 x the time" in screen
    assert "peak 37.3 GiB to 18.6 GiB" in screen


def test_nothing_helps_is_an_answer():
    nothing = dataclasses.replace(make_report(), fixes=(), sites=(), errors=(), speed=None)
    assert "no fix applies to it. Nothing was changed." in " ".join(text(document(nothing)).split())


@pytest.mark.parametrize("ending", [".html", ".md", ".csv", ".txt"])
def test_a_page_has_all_errors_and_escapes_names(ending):
    hostile = dataclasses.replace(make_report(), model="</script><script>alert(1)</script>\x1b[31m")
    page = DOCUMENT_FORMATS[ending](document(hostile, full=True), None)
    assert "output, the batch" in page
    assert "\x1b" not in page
    if ending == ".html":
        assert "<script>alert" not in page
