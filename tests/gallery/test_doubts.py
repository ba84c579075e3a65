"""Flags of measurements are not lost on the way to a page."""

from __future__ import annotations

import dataclasses
import types

from gallery.conftest import CPU  # type: ignore[import-not-found]

import nearpeak
from nearpeak.gallery import pages, run
from nearpeak.gallery.parts import Prediction, prediction_table
from nearpeak.gallery.run import Context
from nearpeak.measure.timing import make_flag

CONTENDED = make_flag("CPU_CONTENDED", "cpu contended in 9 of 9 blocks")
TAIL = make_flag("HEAVY_TAIL", "a note, which is no doubt")


def run_busy(monkeypatch, flags, machine=CPU, kind="cpu", device="cpu"):
    """An example of two measurements, with these flags each."""

    def example(context):
        yield prediction_table("", [context.row(name, None, predicted=1.0, band=(0.5, 2.0)) for name in "ab"])

    bench = lambda *args, **options: types.SimpleNamespace(name="f", kind=kind, seconds=129.0, flags=flags)  # noqa: E731
    monkeypatch.setattr(nearpeak, "bench", bench)
    monkeypatch.setattr(run, "_example_module", lambda name: types.SimpleNamespace(example=example, __doc__="A.\n\nB."))
    return run.run_example("ridge", Context(machine=machine, device=device))


def test_contention_is_told_with_what_to_do_in_every_format(monkeypatch):
    result = run_busy(monkeypatch, (CONTENDED, TAIL))
    remedy = "Other work shares the cores: stop it, or pin this process."
    assert result.doubts == (f"CPU_CONTENDED in 2 of 2 measurements. {remedy}",)
    assert pages.verdict(result) == "0 of 2 predictions are within their bands. Doubts: CPU_CONTENDED."
    assert remedy in " ".join(pages.text(result).split())
    assert remedy in pages.markdown(result, lambda name, svg: "")


def test_a_time_of_the_host_among_those_of_a_gpu_is_told(monkeypatch):
    assert run_busy(monkeypatch, (), kind="device", device="cuda").doubts == ()
    result = run_busy(monkeypatch, (), kind="enqueue", device="cuda")
    assert result.doubts == ("Times of the host and not of the GPU: f (enqueue), f (enqueue).",)


def test_a_quiet_run_tells_nothing_of_it(monkeypatch):
    result = run_busy(monkeypatch, (TAIL,))
    assert result.doubts == ()
    assert pages.verdict(result) == "0 of 2 predictions are within their bands."


def test_predictions_from_a_poor_calibration_are_called_so(monkeypatch):
    poor = dataclasses.replace(CPU, achievable=dataclasses.replace(CPU.achievable, cache_bandwidth=1e9))
    result = run_busy(monkeypatch, (), poor)
    assert "the cache was slower than the memory" in result.doubts[0]
    assert pages.verdict(result).endswith("Doubts: the calibration.")


def test_flags_are_those_of_one_example(monkeypatch):
    run_busy(monkeypatch, (CONTENDED,))
    context = Context(machine=CPU, device="cpu")
    context.flags.append((CONTENDED,))
    monkeypatch.setattr(
        run,
        "_example_module",
        lambda name: types.SimpleNamespace(
            example=lambda context: [
                prediction_table("", [Prediction(what="a", predicted=1.0, measured=1.0, low=0.5)])
            ],
            __doc__="A.\n\nB.",
        ),
    )
    assert run.run_example("ridge", context).doubts == ()
