"""Every public result has a short `repr`, a text report and a notebook card."""

from __future__ import annotations

import sys
import typing
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest
from comm_runs import run as comm_run  # type: ignore[import-not-found]
from estimates import addition, estimate, product  # type: ignore[import-not-found]
from real_runs import real  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[1] / "pytest_plugin"))

sys.path.insert(0, str(Path(__file__).parents[1] / "profiles"))

from figures import FINDING, timing  # type: ignore[import-not-found]
from made_jobs import made_ranks  # type: ignore[import-not-found]

import nearpeak
from nearpeak import plan
from nearpeak._display import Result, headline
from nearpeak.diffs.difference import difference
from nearpeak.fixes.record import FixReport
from nearpeak.judging.judgement import Charge, Check, Judgement, KernelShare, Rival, Speed, SuiteJudgement
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Ceiling
from nearpeak.measure.timing import Comparison, Sweep
from nearpeak.plan.training.fit import FitPlan, Remedy
from nearpeak.plan.validation.errors import ComparedRow, Validation, summarize_errors
from nearpeak.profiles.job_analysis import analyze_job
from nearpeak.render.results import VIEWS, document_of


def machine():
    """As calibrated: with hundreds of measured ceilings."""
    made = catalogue.find("h200-sxm")
    ceilings = {f"matrix.{i}": Ceiling(value=1.0, spread=0.0, how="measured") for i in range(300)}
    return replace(made, achievable=replace(made.achievable, ceilings=ceilings))


def comparison():
    return Comparison(
        a=timing(name="plain"),
        b=timing(name="fused"),
        ratio=0.5,
        low=0.49,
        high=0.51,
        confidence=0.98,
        verdict="FASTER",
        margin=0.01,
        detectable=0.01,
        pairs=40,
    )


def sweep():
    timings = tuple(timing(parameters={"rows": rows}) for rows in ("64", "128"))
    return Sweep(name="copy", parameters={"rows": ("64", "128", "256")}, timings=timings, failures={"rows=256": "no"})


def fix_report():
    return FixReport(
        model="LlamaForCausalLM", machine="NVIDIA H200", torch="2.11", python="3.12", nearpeak="0.1.0",
        date="2026-01-01", trains=True, batch="int64[4, 4096]", fixes=(), sites=(),
    )  # fmt: skip


def job():
    layout = plan.Layout(gpus=8, global_batch=64, sharding="zero3")
    return plan.Job(model=plan.find_model("llama-3-8b"), layout=layout, sequence=8192)


def cluster():
    return plan.Cluster.of("h100-sxm x 8")


def fit_plan():
    """Of a step that fits after one of two changes."""
    remedy = Remedy(
        recomputed_layers=4,
        pieces=1,
        states="as they are",
        sharding="none",
        peak=6.8e10,
        bytes=7e10,
        added_seconds=0.01,
    )
    return FitPlan(
        source="train.py:step",
        machine="a GPU",
        capacity=8e10,
        peak=8.8e10,
        needed=9e10,
        by_category={"parameters": 2e10, "gradients": 0.0, "optimizer": 4e10, "activations": 2.8e10},
        at="aten.mm.default of head",
        seconds=1.0,
        layers=8,
        batch=2,
        remedies=(remedy, replace(remedy, recomputed_layers=0, states="8-bit")),
    )


def serving():
    load = plan.Load(prompt=1024, output=128, concurrency=8)
    return plan.serving_plan(plan.find_model("llama-3-8b"), cluster(), load, layout=plan.ServingLayout(tp=8))


def validation():
    row = ComparedRow(
        id="1", what="step", unit="s", source="a paper", about="a run", measured=1.0, predicted=1.1, why=""
    )
    return Validation(
        kind="training",
        path="runs.csv",
        left_out=True,
        whole=(summarize_errors("step", [0.1]),),
        by={},
        worst=(row,),
        rows=(row,),
        skipped=(),
    )


def judgement(name: str = "kernel.py:softmax"):
    """Of a candidate that is wrong and slow."""
    made = timing(name="candidate")
    ratio = {"ratio": 2.0, "low": 1.9, "high": 2.1, "verdict": "SLOWER"}
    speed = Speed(
        sizes="rows=4",
        candidate=Rival(name="candidate", timing=made, hot_seconds=1e-6),
        rivals=(Rival(name="reference", timing=made, **ratio),),
        enqueue_seconds=2e-6,
        bound_seconds=1e-6,
        bound_limiter="memory",
        ceilings="measured",
    )
    return Judgement(
        candidate=name,
        reference="reference.py:softmax",
        charges=(Charge(name="WRONG_EDGES", evidence="columns 1001"),),
        checks=(
            Check(kind="sizes", inputs="float32 4x1001", outcome="failed", error=9.0, rms_ratio=3.0, detail="[0] is 1"),
            Check(kind="strides", inputs="float32 4x8", outcome="refused", detail="ValueError: contiguous only"),
        ),
        speeds=(speed,),
        kernels=(KernelShare(name="ampere_sgemm", calls=1, seconds=1e-6, share=1.0, library="cuBLAS"),),
        deterministic=True,
        bytes_held=0.0,
        last_words="Segmentation fault",
        notes=("A note.",),
        environment=made.environment,
        seconds=12.0,
    )


MADE = {
    "Judgement": (judgement, "<Judgement of kernel.py:softmax: WRONG_EDGES, 0.500 x as fast>"),
    "SuiteJudgement": (
        lambda: SuiteJudgement(folder="tasks", judgements=(judgement(),), failures={"a.py": "no function"}),
        "<Judgements of tasks: 0 of 1 accepted>",
    ),
    "Machine": (machine, "<Machine h200-sxm: 4.70 TB/s, bfloat16 930 TFLOP/s (derated)>"),
    "Timing": (timing, "<Timing of softmax: 10.00 us [9.90, 10.10] device time, 50.0 % of the bound, grade A>"),
    "Comparison": (comparison, "<Comparison: fused is FASTER against plain, 0.500 x the time [0.490, 0.510]>"),
    "Sweep": (sweep, "<Sweep of copy over 3 rows: 2 timings, 1 failed>"),
    "CommRun": (comm_run, "<Collectives over 8 ranks with nccl 2.27.3: 18 points, up to 170 GB/s of bus bandwidth>"),
    "Estimate": (lambda: estimate([product(), addition()]), "<Estimate of 2 ops on toy: as written 2.00 ms, fused "),
    "Profile": (lambda: real("vit_second"), "<Profile of train.py on NVIDIA H200: 50.4 ms a step, ideal 0 s>"),
    "Finding": (lambda: FINDING, "<unfused-norm at model.py:41: saves 800 ms, 8.0 %>"),
    "JobProfile": (lambda: analyze_job(made_ranks(), 3), "<Job of 3 ranks: 14.0 ms a step>"),
    "Difference": (
        lambda: difference(real("vit_first"), real("vit_second")),
        "<Difference of train.py and train.py: same, 51.1 ms -> 50.4 ms a step, -1.4 %>",
    ),
    "FixReport": (fix_report, "<FixReport of LlamaForCausalLM: nothing helps, nothing was changed>"),
    "Model": (lambda: plan.find_model("llama-3-8b"), "<Model llama-3-8b: 8.03 B weights, 32 layers of 4096>"),
    "Cluster": (cluster, "<Cluster of 8 x h100-sxm: 1 node of 8, NVLink 4 x18 450 GB/s>"),
    "Collective": (
        lambda: plan.collective_seconds("all_reduce", 2**30, 8, cluster()),
        "<Collective all_reduce of 1.07 GB over 8 GPUs: ",
    ),
    "MemoryPlan": (lambda: plan.memory_plan(job()), "<MemoryPlan of llama-3-8b: "),
    "FitPlan": (fit_plan, "<FitPlan of train.py:step on a GPU: 90.0 GB of 80.0 GB, does not fit: recompute 4 layers>"),
    "TrainingPlan": (lambda: plan.training_plan(job(), cluster()), "<TrainingPlan of llama-3-8b on 8 x h100-sxm: "),
    "SearchPlan": (
        lambda: plan.search_plan(plan.find_model("llama-3-8b"), cluster(), sequence=8192),
        "<SearchPlan of llama-3-8b on 8 x h100-sxm: ",
    ),
    "ServingPlan": (serving, "<ServingPlan of llama-3-8b on 8 x h100-sxm: "),
    "Validation": (validation, "<Validation of training in runs.csv: 1 rows, mean error step 10.0 %>"),
}


def test_every_class_with_a_view_is_tried_here():
    assert {name for _, name in VIEWS} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_result_shows_itself_in_three_ways(name: str):
    make, begins = MADE[name]
    result = make()
    assert type(result).__name__ == name and isinstance(result, Result)
    line = repr(result)
    assert line.startswith(begins) and line.endswith(">")
    assert len(line) <= 100 and "\n" not in line
    document = document_of(result)
    assert " ".join(result.report().split()).startswith(document.title) or not document.is_titled
    assert len(result.report().splitlines()) > 2
    assert result._repr_html_().startswith("<div")


def returned_classes():
    """The classes that public functions say they return."""
    functions = [getattr(nearpeak, name) for name in nearpeak.__all__ if name[0].islower()]
    functions += [getattr(plan, name) for name in plan.__all__ if name[0].islower() and name != "precision_named"]
    for function in functions:
        if callable(function):
            returned = typing.get_type_hints(function).get("return")
            yield from (each for each in typing.get_args(returned) or (returned,) if is_dataclass(each))


def test_every_public_function_returns_something_that_shows_itself():
    classes = set(returned_classes())
    assert {each.__name__ for each in classes} >= {
        "Machine",
        "Timing",
        "Comparison",
        "Sweep",
        "Estimate",
        "Profile",
    }
    assert [each for each in classes if not issubclass(each, Result)] == []


@pytest.mark.parametrize("name", ["a" * 500, "a\nb\u202e" * 30, ""])
def test_names_from_outside_do_not_make_a_headline_long(name: str):
    for line in (repr(replace(real("vit_second"), source=name)), repr(timing(name=name)), headline(name)):
        assert len(line) <= 100 and line.isprintable()


def test_a_profile_reports_one_screen_unless_all_is_asked_for():
    profile = real("vit_second")
    screen, full = profile.report(), profile.report(full=True)
    assert len(screen.splitlines()) <= 35 < len(full.splitlines())
    assert "Verdict:" in screen and "Grade:" not in screen and "Grade:" in full
    assert screen.splitlines()[-1] == 'report(full=True) has all tables; save("run.html") writes the page.'


def test_ops_are_one_line_each():
    profile = real("vit_second")
    assert repr(max(profile.ops, key=lambda op: op.measured_s)).startswith("<aten.")
    assert max(len(repr(op)) for op in profile.ops) <= 100
    assert repr(product()) == "<aten.mm.default forward at /home/me/train.py:41: bound 1.00 ms (compute)>"


def test_a_case_does_not_print_its_arguments():
    assert repr(nearpeak.Case(sum, [1] * 1000, name="total")) == "<Case total: 1 arguments>"
