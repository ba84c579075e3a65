"""Which ops of two runs stand for each other."""

from dataclasses import replace

from made_up import profile as made_up
from real_runs import real

from nearpeak.diffs.match import match_ops, operator_name
from nearpeak.ops.op import origin_of_name
from nearpeak.profiles.profile import ProfiledOp


def op(
    name, module="model.layers.0.mlp", *, took=1.0, family="pointwise", shapes=((4, 8),), flops=0.0, phase="forward"
):
    return ProfiledOp(
        name=name,
        origin=origin_of_name(name),
        family=family,
        phase=phase,
        module=module,
        source="model.py:1",
        shapes=shapes,
        kernels=1,
        measured_s=took,
        bound_s=0.0,
        expected_s=None,
        limiter="memory",
        flops=flops,
        bytes=100.0,
        modeled=True,
    )


def matches(before, after):
    base = made_up()
    return [
        (match.relation, [operator_name(op) for op in match.before], [operator_name(op) for op in match.after])
        for match in match_ops(replace(base, ops=tuple(before)), replace(base, ops=tuple(after)))
    ]


def test_layers_are_one_kind():
    ops = [op("aten.mul.Tensor", f"model.layers.{layer}.mlp") for layer in range(3)]
    assert matches(ops, ops) == [("same op", ["aten.mul"] * 3, ["aten.mul"] * 3)]


def test_each_op_is_in_one_match():
    before, after = real("vit_first"), real("vit_compiled")
    found = match_ops(before, after)
    assert sum(len(match.before) for match in found) == len(before.ops)
    assert sum(len(match.after) for match in found) == len(after.ops)
    assert len({id(op) for match in found for op in match.before}) == len({id(op) for op in before.ops})


def test_other_dtypes_of_an_op_are_kinds_of_their_own():
    small, large = op("aten.mul.Tensor"), replace(op("aten.mul.Tensor"), bytes=200.0)
    assert [how for how, *_ in matches([small, large], [large, small])] == ["same op", "same op"]
    (match,) = matches([small], [large])
    assert match[0] == "same op"


def test_modules_with_other_names():
    before = [op("aten.mul.Tensor", "old.layers.0.mlp")]
    assert matches(before, [op("aten.mul.Tensor", "new.blocks.0.ffn")]) == [("moved", ["aten.mul"], ["aten.mul"])]


def test_compiled_code_gives_the_result_of_a_product_too():
    before = [op("aten.mm.default", family="matrix", shapes=((4, 8), (8, 2)), flops=128.0)]
    after = [op("aten.mm.out", "model", family="matrix", shapes=((4, 8), (8, 2), (4, 2)), flops=128.0)]
    assert matches(before, after) == [("moved", ["aten.mm"], ["aten.mm"])]


def test_other_shapes():
    before, after = [op("aten.mul.Tensor")], [op("aten.mul.Tensor", shapes=((8, 8),), took=2.0)]
    assert matches(before, after) == [("reshaped", ["aten.mul"], ["aten.mul"])]


def test_another_backend_of_a_product():
    flash = op("aten.flash.default", family="attention", flops=50.0)
    other = op("aten.cudnn.default", family="attention", flops=50.0, shapes=((8, 4),))
    assert matches([flash], [other]) == [("replaced", ["aten.flash"], ["aten.cudnn"])]


def test_a_fused_kernel_replaces_what_its_module_and_the_ones_in_it_did():
    before = [op("aten.silu.default", "model.layers.0.mlp.act"), op("aten.mul.Tensor", "model.layers.0.mlp")]
    after = [op("mine.swiglu", "model.layers.0.mlp", took=1.5)]
    assert matches(before, after) == [("replaced", ["aten.silu", "aten.mul"], ["mine.swiglu"])]


def test_what_takes_far_longer_replaces_nothing():
    found = matches([op("aten.silu.default", took=1.0)], [op("mine.other", took=5.0)])
    assert found == [("only before", ["aten.silu"], []), ("only after", [], ["mine.other"])]


def test_ops_of_other_layers_kinds_do_not_replace_each_other():
    found = matches([op("aten.silu.default", "model.a.mlp")], [op("mine.other", "model.b.mlp")])
    assert [how for how, *_ in found] == ["only before", "only after"]


def test_layers_that_are_new():
    before = [op("aten.mul.Tensor", f"model.layers.{layer}.mlp") for layer in range(2)]
    after = [op("aten.mul.Tensor", f"model.layers.{layer}.mlp") for layer in range(3)]
    assert matches(before, after) == [
        ("same op", ["aten.mul"] * 2, ["aten.mul"] * 2),
        ("only after", [], ["aten.mul"]),
    ]


def test_a_model_that_is_compiled_as_a_whole_is_compared_by_phase_and_kind_of_work():
    found = [match for match in match_ops(real("vit_first"), real("vit_compiled")) if not match.is_one_to_one]
    assert all(match.relation == "replaced" for match in found if match.before_s > 1e-4)
    kinds = {
        (match.before[0].phase, families(match.before), families(match.after))
        for match in found
        if match.before_s > 1e-4
    }
    assert {phase for phase, *_ in kinds} == {"forward", "backward"}
    for phase in ("forward", "backward"):
        assert (phase, frozenset({"attention"}), frozenset({"matrix"})) in kinds
        assert sum(one[0] == phase for one in kinds) == 2  # and the ops that move memory
    products = sum(
        match.before_s for match in match_ops(real("vit_first"), real("vit_compiled")) if match.relation == "moved"
    )
    assert products > 18e-3  # all linear layers, forward and backward


def families(ops):
    return frozenset(op.family for op in ops)


def test_kernels_of_inductor_have_another_number_in_another_compilation():
    before, after = op("inductor.triton_poi_fused_gelu_3", "model"), op("inductor.triton_poi_fused_gelu_17", "model")
    assert matches([before], [after])[0][0] == "same op"


def test_the_name_of_a_kernel_without_overload_stays():
    assert operator_name(op("mine.kernel")) == "mine.kernel"
    assert operator_name(op("aten.sum.dim_IntList")) == "aten.sum"
