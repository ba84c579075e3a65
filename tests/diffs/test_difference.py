"""What changed between two runs, and that chance is not called a change."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import profile as made_up
from real_runs import elasticity, kind, real, scaled, simulated

from nearpeak.diffs.difference import difference
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.idle import IdleCause

PAGE = Path(__file__).parents[2] / "docs" / "diff.md"


def quiet(found) -> bool:
    return found.verdict == "same" and not (found.ops or found.idle or found.appeared or found.gone)


@pytest.mark.parametrize("model", ["vit", "moe"])
def test_two_real_runs_of_one_script_are_the_same(model):
    first, second = real(f"{model}_first"), real(f"{model}_second")
    assert quiet(difference(first, second))
    assert quiet(difference(second, first))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("vit_first", marks=pytest.mark.slow),
        pytest.param("vit_compiled", marks=pytest.mark.slow),
        pytest.param("moe_first", marks=pytest.mark.exhaustive),
    ],
)
def test_twenty_simulated_pairs_of_one_script_are_the_same(model):
    runs = [difference(simulated(real(model), 2 * pair), simulated(real(model), 2 * pair + 1)) for pair in range(20)]
    assert [quiet(found) for found in runs] == [True] * 20
    assert max(abs(math.log(found.clock)) for found in runs) > 0.03  # there was something to separate


def kinds_in_many_layers(profile):
    """Those whose 3 % are more than what is left out as too little."""
    totals = {}
    for op in profile.ops:
        totals.setdefault(kind(op), []).append(op.measured_s)
    return [one for one, times in totals.items() if len(times) > 3 and 0.03 * sum(times) > 0.0006 * profile.wall_s]


@pytest.mark.slow
def test_a_kernel_that_stands_still_is_named_where_it_is_3_percent_slower():
    """Whatever the clock does, and no other op is; what follows the clock cannot be told from it."""
    named = []
    for model in ("vit_first", "vit_compiled", "moe_first"):
        run = real(model)
        still = {kind(op) for op in run.ops if elasticity(op) == 0.0}
        for number, one in enumerate(kinds_in_many_layers(run)):
            slower = scaled(simulated(run, 5000 + 2 * number), lambda op, one=one: kind(op) == one, 1.03)
            found = difference(simulated(run, 5001 + 2 * number), slower)
            right = [op for op in found.ops if op.verdict == "slower" and op.names_after == (one[0],)]
            assert len(found.ops) == len(right)
            if one in still:
                named.append(bool(right))
    assert len(named) >= 10
    assert sum(named) >= 0.9 * len(named)


@pytest.mark.slow
def test_the_page_has_how_many_kinds_are_named_between_real_runs():
    """Both ways, as each kind differs between the runs on its own, and may hide 3 % or add to it."""
    named = {"memory": [], "compute": []}
    for model in ("vit", "moe"):
        runs = real(f"{model}_first"), real(f"{model}_second")
        limits = {kind(op): op.limiter for op in runs[0].ops}
        for before, after in (runs, runs[::-1]):
            for one in kinds_in_many_layers(runs[0]):
                found = difference(before, scaled(after, lambda op, one=one: kind(op) == one, 1.03))
                right = [op for op in found.ops if op.verdict == "slower" and op.names_after == (one[0],)]
                assert len(found.ops) == len(right)
                named["compute" if limits[one] == "compute" else "memory"].append(bool(right))
    figures = {limit: f"{sum(hits)} of {len(hits)}" for limit, hits in named.items()}
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"named in {figures['memory']} cases where it is limited by memory, and in {figures['compute']}" in page


@pytest.mark.parametrize(
    ("model", "name"),
    [("vit", "aten.native_layer_norm_backward"), ("vit", "aten.gelu"), ("moe", "aten.masked_fill")],
)
def test_a_slower_kernel_is_named_between_real_runs(model, name):
    slower = scaled(real(f"{model}_second"), lambda op: op.name.startswith(f"{name}."), 1.03)
    found = difference(real(f"{model}_first"), slower)
    assert found.ops
    assert {op.names_after for op in found.ops} == {(name,)}
    assert all(op.verdict == "slower" and op.relation == "same op" for op in found.ops)
    assert found.verdict == "same"  # of the step it is too little


def test_all_kernels_slower_alike_is_a_drift_and_no_change_of_ops():
    run = real("moe_first")
    found = difference(run, scaled(run, lambda op: True, 1.08))
    assert found.verdict == "slower"
    assert found.drift == pytest.approx(1.08)
    assert found.ops == ()


def test_kernels_that_compute_follow_the_clock():
    run = real("vit_first")
    found = difference(run, scaled(run, lambda op: op.limiter == "compute", 1.05))
    assert found.ops == ()
    assert found.clock == pytest.approx(1.05)
    assert found.drift == pytest.approx(1.0)


def test_a_step_that_is_mostly_one_kind_of_kernel_does_not_hide_it_as_drift():
    run = real("vit_first")
    heavy = scaled(run, lambda op: "gelu_backward" in op.name, 60.0)
    found = difference(heavy, scaled(heavy, lambda op: "gelu_backward" in op.name, 1.05))
    assert [op.names_after for op in found.ops] == [("aten.gelu_backward",)]
    assert found.verdict == "slower"


def test_one_layer_that_is_far_slower_is_named_alone():
    run = real("vit_first")
    found = difference(run, scaled(run, lambda op: op.name.startswith("aten.gelu.") and ".5." in op.module, 5.0))
    (op,) = found.ops
    assert op.count_after == 1
    assert op.module.endswith("layers.5.mlp.activation_fn")


def test_a_real_slowdown_of_the_step():
    run = real("vit_second")
    found = difference(run, scaled(run, lambda op: "layer_norm" in op.name, 1.5))
    assert found.verdict == "slower"
    low, high = found.interval
    assert 0.0 < low < found.change < high
    assert {op.names_after[0] for op in found.ops} == {"aten.native_layer_norm", "aten.native_layer_norm_backward"}


def test_ops_that_account_for_it_make_a_small_change_real():
    run = real("vit_second")
    faster = scaled(run, lambda op: op.name.startswith("aten.gelu."), 0.5)
    found = difference(run, faster)
    assert abs(found.change) < found.noise
    assert (found.verdict, found.explained) == ("faster", True)


def test_the_first_slow_step_does_not_decide():
    run = real("vit_second")
    once = replace(run, walls=(1.3 * run.walls[0], *run.walls[1:]), wall_s=1.013 * run.wall_s)
    assert difference(run, once).change == pytest.approx(0.0, abs=1e-3)


def test_eager_against_compiled_reads_by_phase_and_kind_of_work():
    found = difference(real("vit_first"), real("vit_compiled"))
    assert found.verdict == "slower"
    assert len(found.ops) <= 8
    attention = [op for op in found.ops if op.names_after == ("aten.bmm",)]
    assert [op.names_before[0].split("_")[1] for op in attention] == ["scaled"] * 2
    assert {op.phase for op in attention} == {"forward", "backward"}


def test_another_device():
    run = real("vit_first")
    found = difference(run, replace(scaled(run, lambda op: True, 1.5), device="NVIDIA H100"))
    assert "different devices" in found.doubts[0]
    assert found.drift is None
    assert found.ops  # all of it is real


def test_no_clean_steps():
    run = real("vit_first")
    found = difference(run, replace(run, steps=0, walls=(), spread=None))
    assert "the second run has no clean steps" in found.doubts[0]
    assert found.noise >= 0.1


def test_unsteady_steps_tell_nothing_about_ops():
    run = real("vit_second")
    walls = tuple(wall * (1.0 + 0.05 * number) for number, wall in enumerate(run.walls))
    noisy = replace(run, walls=walls, spread=0.45, wall_s=1.2 * run.wall_s)
    found = difference(noisy, scaled(run, lambda op: "gelu" in op.name, 1.5))
    assert found.noise >= 0.45
    assert (found.verdict, found.steady, found.ops) == ("same", False, ())
    assert "45 % apart" in found.notes[0]


def test_a_cpu_is_noisier_than_a_gpu():
    run = replace(real("vit_second"), device="cpu")
    found = difference(run, scaled(run, lambda op: True, 1.05))
    assert (found.verdict, found.ops) == ("same", ())


def test_idle_causes_that_changed():
    run = replace(real("vit_second"), idle=())
    waits = IdleCause(cause="synchronization", seconds=5e-3, count=12, where="train.py:9", what="item")
    found = difference(run, replace(run, idle=(waits,)))
    (change,) = found.idle
    assert (change.cause, change.before_s, change.after_s) == ("synchronization", 0.0, 5e-3)
    assert (change.where, change.what, change.count_after) == ("train.py:9", "item", 12)
    assert not difference(replace(run, idle=(waits,)), replace(run, idle=(replace(waits, seconds=4e-3),))).idle


def finding(rule, source="train.py:4", share=0.05):
    return Finding(
        rule=rule,
        title="A waste.",
        source=source,
        modules=("model",),
        places=1,
        saving_s=share,
        share=share,
        evidence="",
        reasoning="",
        remedy="",
    )


def test_findings_that_appeared_or_went():
    run = made_up()
    before = replace(run, findings=(finding("old"), finding("moved", "train.py:4"), finding("small", share=0.005)))
    after = replace(run, findings=(finding("new"), finding("moved", "train.py:90"), finding("little", share=0.005)))
    found = difference(before, after)
    assert [one.rule for one in found.appeared] == ["new"]
    assert [one.rule for one in found.gone] == ["old"]


def test_a_finding_that_the_other_run_could_not_decide_is_not_new():
    run = made_up()
    assert difference(replace(run, undecided=("new",)), replace(run, findings=(finding("new"),))).appeared == ()


def test_other_work_is_said():
    run = real("vit_first")
    assert "different work" in difference(run, replace(run, flops=2 * run.flops)).notes[0]


def test_parts_sum_to_the_wall_times():
    found = difference(real("vit_first"), real("vit_second"))
    assert sum(part.before_s for part in found.parts) == pytest.approx(found.before.wall_s)
    assert sum(part.after_s for part in found.parts) == pytest.approx(found.after.wall_s)


def test_a_profile_without_ops_and_without_time():
    empty = replace(made_up(), ops=(), wall_s=0.0, kernel_s=0.0)
    for other in (empty, made_up()):
        assert difference(empty, other).verdict == difference(other, empty).verdict == "same"


def resized(profile, factor):
    """The same program on another batch: all shapes, FLOPs and times change."""
    ops = tuple(
        replace(
            op,
            shapes=tuple(tuple(factor * size for size in shape) for shape in op.shapes),
            flops=factor * op.flops,
            measured_s=factor * op.measured_s,
        )
        for op in profile.ops
    )
    return replace(profile, ops=ops, flops=factor * profile.flops)


@pytest.mark.parametrize("names", [("train.py", "train.py"), ("runs/vit.py", "moe.py")])
@pytest.mark.parametrize("models", [("vit_first", "moe_first"), ("moe_first", "vit_compiled")])
def test_two_models_are_different_programs(models, names):
    runs = [replace(real(model), source=name) for model, name in zip(models, names, strict=True)]
    found = difference(*runs)
    assert found.verdict == "different programs"
    assert max(found.common_shares) < 0.1


def test_a_changed_program_is_not_another_one():
    first = replace(real("vit_first"), source="slow.py")
    one_layer = replace(first, ops=tuple(op for op in first.ops if ".layer.1" not in op.module), flops=1.0)
    sorted_too = replace(first.ops[0], name="aten.sort.default", module="", source="slow.py:9", measured_s=9.0)
    for before, after in (
        (first, resized(real("vit_second"), 20)),  # other shapes, and times that are not comparable
        (first, resized(real("vit_compiled"), 2)),
        (first, one_layer),
        (replace(first, ops=(*first.ops, sorted_too)), replace(first, source="fast.py", flops=1.0)),  # a waste is gone
        (first, replace(real("moe_first"), flops=1.01 * first.flops)),  # the same work in other ops: rewritten
    ):
        after = replace(after, source="fast.py")
        assert difference(before, after).verdict != "different programs"
        assert difference(after, before).verdict != "different programs"


def test_runs_without_kernels_are_not_called_different():
    empty = replace(made_up(), ops=())
    assert difference(empty, empty).common_shares == (1.0, 1.0)
