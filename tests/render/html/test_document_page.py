"""Pages of the planner: self-contained, escaped, and their arithmetic is that of Python."""

import dataclasses
import html
import re

import pytest
from javascript import run

from nearpeak._records import to_json
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.serving.deployment import Deployment, ServingLayout
from nearpeak.plan.serving.plan import Load, serving_plan
from nearpeak.plan.serving.step import step_time
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import memory_by_stage
from nearpeak.plan.training.plan import memory_plan
from nearpeak.render.document import Document, Paragraph, Table
from nearpeak.render.html.document import document_page
from nearpeak.render.views.plan.sliders import decode_sliders, memory_sliders
from nearpeak.render.views.plan.training import memory_document

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def job(name="llama-3-70b", sequence=8192, precision="bf16", software="fused", **layout):
    given = {"gpus": 64, "global_batch": 256, **layout}
    return Job(
        model=get_model(name),
        layout=Layout(**given),
        sequence=sequence,
        precision=precision_named(precision),
        software=software,
    )


def test_nothing_that_is_given_becomes_markup():
    made = document_page(
        Document(
            title=HOSTILE,
            facts=(HOSTILE,),
            parts=(Paragraph(text=HOSTILE), Table(title=HOSTILE, headers=(HOSTILE,), rows=((HOSTILE,),), note=HOSTILE)),
        )
    )
    assert "<img" not in made and made.count("<script") == 2


def test_a_hostile_name_of_a_model_reaches_no_picture():
    plan = memory_plan(job())
    named = dataclasses.replace(plan.job.model, name=HOSTILE)
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, model=named))
    made = document_page(memory_document(plan), memory_sliders(plan))
    assert "<img" not in made and made.count("<script") == 2


def test_a_page_needs_nothing_from_elsewhere():
    made = document_page(memory_document(memory_plan(job())), memory_sliders(memory_plan(job())))
    assert "default-src 'none'" in html.unescape(made)
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", made)
    assert links == []
    assert not re.search(r"<svg[^>]* style=", made) and made.count("<style>") == 1
    assert len(made) < 150_000


@pytest.mark.parametrize(
    ("planned", "choice"),
    [
        (job(), {}),
        (job(tp=4, pp=4), {}),
        (job(), {"tp": 8, "pp": 2, "sharding": "zero3", "recompute": "full", "sequence": 4096, "microbatch": 2}),
        (job("llama-3-8b"), {"pp": 3, "gpus": 48, "sharding": "zero2", "recompute": "parts"}),
        (job("gemma-2-9b", sharding="none", gpus=1, global_batch=1), {"microbatch": 4}),
        (job("mixtral-8x7b", ep=8), {"ep": 4, "tp": 2, "sharding": "zero3"}),
        (job("deepseek-v3", ep=32, pp=2, precision="mxfp8"), {"pp": 4, "tp": 2, "ep": 16}),
        (job("deepseek-v3", ep=4, pp=16, recompute=("layer",)), {}),
        (job("nemotron-3-nano", ep=8), {"pp": 2, "sharding": "zero3"}),
        (job("llama-3-8b", software="eager", sharding="none"), {"pp": 2}),
        (job("llama-3-8b", tp=2, cp=2, software="eager", precision="bf16-fp32-grads"), {"tp": 1}),
    ],
)
def test_the_sliders_give_what_python_gives(planned, choice):
    plan = memory_plan(planned, Cluster.of("h100-sxm x 64"))
    sliders = memory_sliders(plan)
    assert sliders is not None
    picked = {**sliders.data["start"], **choice}
    found = run(
        ["units.js", "dom.js", "plan_memory.js"],
        "[memoryProblem(data.model, data.choice), memoryPeak(data.model, data.choice)]",
        {"model": to_json(sliders.data), "choice": picked},
    )
    layout = planned.layout
    recompute = {"none": (), "parts": ("norm", "feed_activation"), "full": ("layer",)}[picked["recompute"]]
    ranks = picked["gpus"] // (picked["tp"] * picked["pp"] * layout.cp)
    other = dataclasses.replace(
        planned,
        sequence=picked["sequence"],
        layout=dataclasses.replace(
            layout,
            gpus=picked["gpus"],
            tp=picked["tp"],
            pp=picked["pp"],
            ep=picked["ep"],
            microbatch=picked["microbatch"],
            global_batch=ranks * picked["microbatch"] * picked["microbatches"],
            sharding=picked["sharding"],
            recompute=recompute,
        ),
    )
    fullest = max(memory_by_stage(other), key=lambda stage: stage.total)
    assert found[0] is None
    parts = found[1]
    assert parts["parameters"] == pytest.approx(fullest.parameters)
    assert parts["gradients"] == pytest.approx(fullest.gradients)
    assert parts["optimizer"] == pytest.approx(fullest.optimizer)
    assert parts["activations"] == pytest.approx(fullest.activation + fullest.recomputed)
    assert parts["logits"] == pytest.approx(fullest.logits)
    assert sum(parts.values()) == pytest.approx(fullest.total)


def test_a_choice_that_cannot_be_says_why():
    sliders = memory_sliders(memory_plan(job()))
    found = run(
        ["units.js", "dom.js", "plan_memory.js"],
        "memoryProblem(data.model, data.choice)",
        {"model": to_json(sliders.data), "choice": {**sliders.data["start"], "tp": 8, "pp": 16}},
    )
    assert found == "tp x cp x pp = 128 does not divide 64 GPUs"


def test_the_sliders_of_decoding_show_the_planners_own_steps():
    plan = serving_plan(
        get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), Load(prompt=1024, output=256, concurrency=32),
        ServingLayout(tp=8), "fp8",
    )  # fmt: skip
    sliders = decode_sliders(plan)

    def shown(**choice):
        picked = {**sliders.data["start"], **choice}
        found = {"model": to_json(sliders.data), "choice": picked}
        return run(["units.js", "dom.js", "plan_decode.js"], "decodeStep(data.model, data.choice)", found)

    planned = shown()
    assert planned["seconds"] == pytest.approx(plan.replica.decode.seconds)
    assert planned["limit"] == plan.replica.decode.limiter
    moved = shown(batch=64, context=256)
    deployment = Deployment.of(plan.model, plan.cluster, plan.layout, "fp8")
    assert moved["seconds"] == pytest.approx(step_time(deployment, sequences=64, context=256).seconds)
    assert moved["cache"] == pytest.approx(64 * 256 * plan.memory.bytes_per_token)
