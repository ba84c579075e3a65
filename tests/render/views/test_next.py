"""Next answers Why: it is about the largest loss, or says that nothing is known to do about it."""

import dataclasses

import pytest
from made_up import profile  # type: ignore[import-not-found]

from nearpeak.profiles.conditions import StepConditions
from nearpeak.profiles.finding import Finding
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.profile import ProfileCeilings, ProfiledOp
from nearpeak.profiles.waterfall import build_waterfall
from nearpeak.render.views.verdict import next_finding, sentences

FLOORS = {"ideal_s": 1.0, "fused_s": 1.0, "as_written_s": 1.0}


def op(name="aten.convolution.default", family="convolution", measured_s=8.0, bound_s=0.5, expected_s=7.5, **fields):
    made = {"phase": "forward", "module": "net", "source": "model.py:8", "shapes": (), "kernels": 1, "flops": 1.0}
    made |= {"bytes": 1.0, "modeled": True, "limiter": "compute"} | fields
    return ProfiledOp(name=name, family=family, measured_s=measured_s, bound_s=bound_s, expected_s=expected_s, **made)


SGD = op("aten._foreach_add_.List", "optimizer", 0.6, 0.4, 0.5, phase="optimizer", source="train.py:30")


def losing(*ops, kernel_s=9.5, **fields):
    """A step of ten seconds whose kernels are slow for eight and a half of them."""
    falls = build_waterfall(wall_s=10.0, **FLOORS, modeled_s=kernel_s, kernel_s=kernel_s)
    made = dataclasses.replace(profile(), steps=7, spread=0.01, modeled_share=1.0, communication_s=0.0)
    return dataclasses.replace(made, ops=ops, waterfall=falls, device="NVIDIA H200", **fields)


def finding(rule, saving_s, ops=(), **fields):
    return Finding(
        rule=rule,
        title=f"It is {rule}.",
        source="train.py:30",
        modules=(),
        places=1,
        saving_s=saving_s,
        share=saving_s / 10.0,
        evidence="",
        reasoning="",
        remedy="x",
        ops=ops,
        **fields,
    )


def test_a_small_finding_elsewhere_is_no_answer_to_slow_convolutions():
    made = losing(op(expected_s=2.0), SGD)
    small = finding("unfused-optimizer", 0.35, ops=(1,))
    said = sentences(made, [small])
    assert "convolution (forward) loses most" in said["Why"]
    assert said["Next"].startswith("Begin with convolution (forward) at model.py:8: good kernels take 2.00 s for it")
    assert said["Next"].endswith("The largest saving known is 3.5 %: unfused-optimizer at train.py:30.")
    assert next_finding(made, [small]) is None


def test_a_finding_about_the_convolutions_is_the_answer():
    made = losing(op(expected_s=2.0), SGD)
    answer = finding("channels-first", 4.0, ops=(0,))
    assert sentences(made, [finding("unfused-optimizer", 4.5, ops=(1,)), answer])["Next"].startswith("It is channels-")


def test_many_small_answers_are_one_together():
    ops = [op(f"aten.op{number}.default", measured_s=1.0, bound_s=0.1, expected_s=0.9) for number in range(9)]
    small = [finding(f"rule-{number}", 0.5, ops=(number,)) for number in range(9)]
    assert next_finding(losing(*ops), small) is small[0]


def test_where_no_faster_kernel_is_known_next_says_so_and_what_the_loss_consists_of():
    ceilings = ProfileCeilings(bandwidth=1e12, clock_hz=2.0e9)
    made = losing(op(), SGD, ceilings=ceilings, conditions=StepConditions(clock_hz=1.5e9))
    said = sentences(made)["Next"]
    assert said.startswith(
        "No remedy is known for convolution (forward) at model.py:8: good kernels take 7.50 s, these"
    )
    assert said.endswith("They reach 6 % of the compute rate; of the loss 2.00 s at a lower clock.")


def test_waves_of_tiles_follow_from_shapes():
    product = op("aten.mm.default", "matrix", 8.0, 2.0, 7.9, shapes=((129, 4096), (4096, 128 * 67)))
    said = sentences(losing(product, machine="h200-sxm"))["Next"]
    assert "in tiles and waves that are not full" in said


def test_kernels_of_a_few_microseconds_are_told():
    many = [op("aten.mul.Tensor", "pointwise", 3e-6, 1e-7, 3e-6, limiter="memory") for _ in range(50)]
    assert "in kernels of a few us each, mostly their start" in sentences(losing(*many))["Next"]


def test_a_kernel_of_nearpeaks_is_not_to_be_fused():
    made = losing(op("nearpeak.rms_norm.default", "normalization", limiter="memory"))
    said = sentences(made)["Next"]
    assert "it is a kernel of nearpeak's" in said
    assert "use it with" not in said
    falls = build_waterfall(wall_s=10.0, ideal_s=1.0, fused_s=1.0, as_written_s=9.0, modeled_s=9.0, kernel_s=9.0)
    fused = [dataclasses.replace(each, bound_s=8.0, fused_s=1.0) for each in made.ops]
    said = sentences(dataclasses.replace(made, waterfall=falls, ops=tuple(fused)))["Next"]
    assert said.startswith("No remedy is known: the kernels at model.py:8 are fused ones already")


@pytest.mark.parametrize(
    ("name", "family", "accused"),
    [("aten.gelu_backward.default", "pointwise", False), ("aten.mm.default", "matrix", True)],
)
def test_an_expectation_of_another_kind_of_kernel_accuses_no_op_on_a_cpu(name, family, accused):
    slow = op(name, family, 9.4, 0.1, 0.157, limiter="memory")
    made = dataclasses.replace(losing(slow), device="cpu")
    said = sentences(made)["Next"]
    assert ("good kernels take 157 ms" in said) == accused
    assert ("no kernel like it was measured on this machine" in said) != accused


def test_idle_python_is_answered_by_what_to_do_about_python():
    idle = (IdleCause(cause="python", seconds=6.4, count=400, where="utils.py:9", what="between ops"),)
    falls = build_waterfall(wall_s=10.0, **FLOORS, modeled_s=3.6, kernel_s=3.6)
    made = dataclasses.replace(losing(op(), SGD), waterfall=falls, idle=idle, callers={"utils.py:9": "generate.py:12"})
    small = finding("unfused-norm", 0.18, ops=(1,))
    said = sentences(made, [small])
    assert "most at generate.py:12" in said["Why"]  # and not the line in the installed package
    assert "compile" in said["Next"]
    assert said["Next"].endswith("The largest saving known is 1.8 %: unfused-norm at train.py:30.")
    answer = finding("launch-bound", 5.0, idle_s=5.0)
    assert sentences(made, [answer, small])["Next"].startswith("It is launch-bound.")


def test_a_larger_saving_of_another_part_is_next_and_why_says_so():
    falls = build_waterfall(wall_s=10.0, **FLOORS, modeled_s=5.0, kernel_s=5.0)
    idle = (IdleCause(cause="synchronization", seconds=4.5, count=1, where="train.py:9", what="item"),)
    wait = finding("synchronization", 4.0, idle_s=4.0)
    made = dataclasses.replace(losing(op(measured_s=5.0)), idle=idle)
    slower = build_waterfall(wall_s=10.0, **FLOORS, modeled_s=6.0, kernel_s=6.0)
    said = sentences(dataclasses.replace(made, waterfall=slower), [wait])
    assert "Most is lost to slow kernels" in said["Why"]
    assert said["Why"].endswith("Most can be saved of another part, idle: 4.00 s.")
    assert said["Next"].startswith("It is synchronization.")
    assert "another part" not in sentences(dataclasses.replace(made, waterfall=falls), [wait])["Why"]


def test_a_saving_is_of_no_part_that_is_smaller_than_it():
    """Ops whose fused kernels would move less, and save more than the traffic of the step or its fusion alone."""
    chain = op(measured_s=4.0, bound_s=3.9, fused_s=1.5)
    floors = {"ideal_s": 1.0, "fused_s": 2.5, "as_written_s": 5.0}
    falls = build_waterfall(wall_s=10.0, **floors, modeled_s=9.0, kernel_s=9.0)
    assert (falls.seconds("traffic"), falls.seconds("fusion")) == (1.5, 2.5)
    made = dataclasses.replace(losing(chain), waterfall=falls)
    said = sentences(made, [finding("unfused-pointwise", 3.3, ops=(0,))])
    assert said["Why"].endswith("Most can be saved of other parts, fusion and traffic: 3.30 s.")


def test_idle_time_that_was_not_seen_gets_no_story():
    idle = (IdleCause(cause="unknown", seconds=6.0, count=0, where="", what=""),)
    falls = build_waterfall(wall_s=10.0, **FLOORS, modeled_s=3.0, kernel_s=3.0)
    said = sentences(dataclasses.replace(losing(op()), waterfall=falls, idle=idle))["Next"]
    assert said.startswith("What it is was not seen")


def test_where_all_kernels_are_slower_than_good_ones_no_op_is_accused():
    names = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.convolution.default")
    families = ("matrix", "matrix", "matrix", "convolution")
    slow = [op(name, family, 2.4, 0.2, 1.2) for name, family in zip(names, families, strict=True)]
    said = sentences(dataclasses.replace(losing(*slow), device="cpu"))["Next"]
    assert said.startswith("No remedy is known for mm (forward) at model.py:8: good kernels take 1.20 s, these 2.40 s")
    assert "most kernels of the step take 2.0 x what good ones do" in said
    slow[0] = dataclasses.replace(slow[0], measured_s=5.0)
    assert sentences(dataclasses.replace(losing(*slow), device="cpu"))["Next"].startswith("Begin with mm (forward)")


def test_findings_that_one_compilation_removes_are_one_next():
    made = losing(op(expected_s=2.0), SGD)
    inside = [
        dataclasses.replace(finding(rule, 2.0, ops=(0,), library="layers"), remedy="model.compile()")
        for rule in ("unfused-norm", "unfused-rotary")
    ]
    assert sentences(made, inside)["Next"] == (
        "It is unfused-norm. Changing that and 1 more finding at train.py:30 (in layers) saves 4.00 s, "
        "40.0 % (25 to 62 %): 2 findings below."
    )


def test_a_finding_about_the_ops_that_lose_most_is_next_although_much_is_left():
    made = losing(op(expected_s=7.5), SGD)
    about = finding("channels-first", 1.4, ops=(0,))
    assert next_finding(made, [about]) is about
    assert next_finding(made, [finding("channels-first", 0.3, ops=(0,))]) is None  # not worth a change


def test_ops_all_over_a_model_are_not_said_to_be_at_the_line_of_their_finding():
    names = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.convolution.default")
    spread = [op(name, measured_s=2.0, expected_s=0.5, source=f"model.py:{name}") for name in names]
    batch = finding("padded-batch", 6.0, ops=(0, 1, 2, 3))
    assert "of it are in the 4 ops of padded-batch at train.py:30." in sentences(losing(*spread), [batch])["Why"]
    there = [dataclasses.replace(each, source="train.py:30") for each in spread]
    assert "of it are in 4 ops at train.py:30." in sentences(losing(*there), [batch])["Why"]


def test_the_largest_loss_is_not_another_part_than_itself():
    falls = build_waterfall(wall_s=10.0, ideal_s=1.0, fused_s=1.0, as_written_s=4.5, modeled_s=9.5, kernel_s=9.5)
    small = op(
        name="aten.mul.Tensor", family="pointwise", measured_s=4.0, bound_s=2.6, fused_s=1.3, source="train.py:30"
    )
    made = dataclasses.replace(losing(small, op(measured_s=5.5)), waterfall=falls)
    answer = finding("unfused-pointwise", 3.9, ops=(0,))
    said = sentences(made, [answer])
    assert "Most is lost to slow kernels" in said["Why"]
    assert said["Next"].startswith("It is unfused-pointwise.")
    assert "another part" not in said["Why"]


def test_what_is_spent_once_is_the_answer_to_a_step_that_waits_for_it_and_no_largest_saving():
    made = losing(op(expected_s=2.0), SGD)
    waiting = dataclasses.replace(
        made,
        waterfall=build_waterfall(wall_s=10.0, **FLOORS, modeled_s=2.0, kernel_s=2.0),
        idle=(IdleCause(cause="launching", seconds=8.0, count=1, where="train.py:30", what="launched late"),),
    )
    plan = finding("attention-plan", 0.0, once_s=7.0)
    assert next_finding(waiting, [plan]) == plan
    said = sentences(waiting, [plan])
    assert "saves 7.00 s once for each new size: attention-plan" in said["Next"]
    assert "another part" not in said["Why"]
    small = dataclasses.replace(plan, once_s=0.5)
    assert "largest saving known" not in sentences(made, [small])["Next"]
