"""A profile of a few layers on one GPU sets the pace of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearpeak.cli.main import main
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.model import forward_flops
from nearpeak.plan.training.calibration import calibrate_plan, first_layers, split_step
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.plan import training_plan
from nearpeak.profiles.file import read, save
from nearpeak.profiles.profile import Profile, ProfiledOp

MODEL, SEQUENCE, MICROBATCH = get_model("llama-3-8b"), 4096, 2
H200 = Cluster.of("h200-sxm x 1")
LAYER, ONCE, WEIGHTS, FIXED = 21e-3, 17e-3, 9e-3, 1e-3


def op(name, module, seconds, phase="forward", flops=0.0, wait=0.0):
    return ProfiledOp(
        name=name,
        family="gemm",
        phase=phase,
        module=module,
        source="",
        shapes=(),
        kernels=1,
        measured_s=seconds,
        bound_s=0.0,
        expected_s=None,
        limiter="memory",
        flops=flops,
        bytes=0.0,
        modeled=False,
        launch_wait_s=wait,
    )


def profile(layers=2, *, wait=0.0, prefix="model.layers", sequences=MICROBATCH, **changes) -> Profile:
    flops = forward_flops(first_layers(MODEL, 1), SEQUENCE)
    one = 3 * (flops.total - flops.output) * SEQUENCE * sequences
    ops = [op("aten.embedding.default", "model.embed", 0.1 * ONCE)]
    ops += [op("aten.mm.default", f"{prefix}.{n}.mlp.experts.0", LAYER / 3, flops=one / 3) for n in range(layers)]
    ops += [op("aten.mm.default", "head", 0.3 * ONCE, flops=one)]
    ops += [op("aten.nll_loss.default", "", 0.1 * ONCE)]
    ops += [op("aten.mm.default", "head", 0.5 * ONCE, "backward", flops=one)]
    ops += [
        op("aten.mm.default", f"{prefix}.{n}.attention", 2 * LAYER / 3, "backward", 2 * one / 3, wait)
        for n in reversed(range(layers))
    ]
    ops += [op("aten._foreach_norm.Scalar", "", 0.2 * WEIGHTS), op("aten._foreach_mul_.Tensor", "", 0.1 * WEIGHTS)]
    ops += [op("aten._fused_adamw_.default", "", 0.7 * WEIGHTS, "optimizer")]
    wall = layers * (LAYER + wait) + ONCE + WEIGHTS + FIXED
    saved = read("tests/data/profile_schema_2.json")
    made = replace(
        saved,
        device="NVIDIA H200",
        source="train.py",
        ops=tuple(ops),
        wall_s=wall,
        communication_s=0.0,
        timeline=(),
        findings=(),
        world_size=None,
        gaps=(),
    )
    return replace(made, **changes)


def job(layers=32, **layout):
    fields = {"gpus": 1, "global_batch": MICROBATCH, "microbatch": MICROBATCH, "sharding": "none"} | layout
    return Job(
        model=first_layers(MODEL, layers), layout=Layout(**fields), sequence=SEQUENCE, precision=precision_named("bf16")
    )


def test_a_step_is_split_by_what_it_grows_with():
    step = split_step(profile())
    assert step.layers == 2
    assert step.layer == step.layer_kernels == pytest.approx(LAYER)
    assert step.once == pytest.approx(ONCE) and step.weights == pytest.approx(WEIGHTS)
    assert step.fixed == pytest.approx(FIXED)
    assert step.seconds == pytest.approx(profile().wall_s)


@pytest.mark.parametrize("layers", [2, 8, 16, 32])
def test_two_layers_predict_any_number(layers):
    calibration = calibrate_plan(profile(), job(layers), H200)
    predicted = training_plan(job(layers), H200, calibration=calibration).time.seconds
    grown = WEIGHTS * first_layers(MODEL, layers).parameters / first_layers(MODEL, 2).parameters
    assert predicted == pytest.approx(layers * LAYER + ONCE + grown + FIXED, rel=1e-3)
    assert calibration.microbatch == MICROBATCH


def test_layers_that_wait_for_the_host_wait_in_the_plan():
    wait = 0.5 * LAYER
    calibration = calibrate_plan(profile(wait=wait), job(8), H200)
    predicted = training_plan(job(8), H200, calibration=calibration).time
    assert predicted.seconds == pytest.approx(
        8 * (LAYER + wait) + ONCE + WEIGHTS * 3.03 / 1.49 + FIXED, rel=0.07
    )  # the output layer's kernels hide a part of the wait
    assert predicted.parts["launches"] > 6 * wait


def test_on_a_cluster_communication_is_added_as_planned():
    cluster = Cluster.of("h200-sxm x 16")
    wide = job(32, gpus=16, global_batch=32, sharding="zero3")
    calibration = calibrate_plan(profile(), wide, cluster)
    plan = training_plan(wide, cluster, calibration=calibration)
    alone = training_plan(job(32), H200, calibration=calibration)
    assert plan.time.parts["GEMMs"] == pytest.approx(alone.time.parts["GEMMs"])
    assert plan.time.parts["data"] > 0 and alone.time.parts["data"] == 0
    assert plan.provenances[0].kind == "measured" and "2 layers" in plan.provenances[0].text


def test_a_profile_that_does_not_belong_to_the_plan_is_refused():
    with pytest.raises(UsageError, match="NVIDIA H100"):
        calibrate_plan(profile(device="NVIDIA H100 80GB HBM3"), job(), H200)
    with pytest.raises(UsageError, match="one GPU"):
        calibrate_plan(profile(world_size=8), job(), H200)
    with pytest.raises(UsageError, match=r"0\.50 times|1\.50 times"):
        calibrate_plan(profile(sequences=1.5), job(), H200)
    with pytest.raises(UsageError, match="33 layers"):
        calibrate_plan(profile(layers=33), job(), H200)
    whole = profile()
    nameless = tuple(replace(item, module="") for item in whole.ops)
    with pytest.raises(UsageError, match="numbered layers"):
        calibrate_plan(replace(whole, ops=nameless), job(), H200)
    forward = tuple(item for item in whole.ops if item.phase == "forward")
    with pytest.raises(UsageError, match="backward"):
        calibrate_plan(replace(whole, ops=forward), job(), H200)


@pytest.mark.parametrize("prefix", ["layers", "", "transformer.h"])
def test_layers_are_found_by_their_numbers(prefix):
    made = profile()
    start = f"{prefix}." if prefix else ""
    ops = tuple(replace(item, module=item.module.replace("model.layers.", start)) for item in made.ops)
    assert split_step(replace(made, ops=ops)).layer == pytest.approx(LAYER)


def test_the_command_takes_the_profile(tmp_path, capsys):
    path = tmp_path / "two.json"
    save(profile(), path)
    command = ["plan", "train", "llama-3-8b", "--on", "h200-sxm x 1", "--sharding", "none", "--microbatch", "2"]
    assert main([*command, "--from", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Measured: 2 layers of train.py, microbatch 2" in " ".join(out.split())
    assert main(["plan", "train", "llama-3-8b", "--on", "h200-sxm x 8", "--from", str(path)]) == 2
    assert "--from needs a layout" in capsys.readouterr().err
