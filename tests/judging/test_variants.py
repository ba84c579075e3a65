"""Inputs of other sizes, values and strides, which the reference accepts."""

from __future__ import annotations

import random

import pytest
import torch

from nearpeak.errors import CaseError
from nearpeak.judging.variants import Task, size_variants, small_inputs, stride_variants, value_variants

PARAMETERS = """
import torch

def scale(x, weight):
    return x * weight

def inputs(rows=6, columns=10):
    return torch.randn(rows, columns), torch.randn(columns)
"""
FIXED = PARAMETERS.replace("rows=6, columns=10", "").replace("rows, columns", "6, 10").replace("(columns)", "(10)")


def task(tmp_path, source):
    path = tmp_path / "reference.py"
    path.write_text(source, encoding="utf-8")
    return Task(f"{path}:scale", None, torch.device("cpu"))


@pytest.mark.parametrize("source", [PARAMETERS, FIXED], ids=["parameters", "dimensions"])
def test_sizes_have_one_more_one_less_one_and_none(tmp_path, source):
    made = list(size_variants(task(tmp_path, source), random.Random(1), {}))
    shapes = [tuple(variant.inputs.tensors[0].shape) for variant in made]
    assert {(7, 10), (5, 10), (1, 10), (0, 10), (6, 11), (6, 9), (6, 1), (6, 0), (1, 1)} <= set(shapes)
    assert all(variant.inputs.tensors[1].shape[0] == shape[1] for variant, shape in zip(made, shapes, strict=True))


def test_large_inputs_are_made_small(tmp_path):
    large = PARAMETERS.replace("rows=6, columns=10", "rows=4096, columns=2048")
    small = small_inputs(task(tmp_path, large), random.Random(1), {})
    assert small.tensors[0].numel() <= 1 << 15


def test_values_and_strides_vary_alone(tmp_path):
    made = task(tmp_path, PARAMETERS)
    inputs = made.draw(3)
    for variant in value_variants(made, inputs, random.Random(1)):
        assert [t.shape for t in variant.inputs.tensors] == [t.shape for t in inputs.tensors]
        finite = all(bool(tensor.isfinite().all()) for tensor in variant.inputs.tensors)
        assert finite == (variant.kind not in ("nonfinite", "infinity"))
    for variant in stride_variants(made, inputs):
        if "expanded" not in variant.words:
            assert all(torch.equal(a, b) for a, b in zip(inputs.tensors, variant.inputs.tensors, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_has_two_elements_beyond_where_code_clamps(tmp_path, dtype):
    made = task(tmp_path, PARAMETERS.replace("columns)", f"columns, dtype=torch.{dtype})"))
    (variant,) = value_variants(made, made.draw(3), random.Random(2), ("two huge elements in a row",))
    x = variant.inputs.tensors[0].float()
    huge = x.abs() > 100
    assert int(huge.sum()) == 2 and int(huge.any(-1).sum()) == 1 and len(set(x[huge].tolist())) == 2
    assert (x[huge].square() < torch.finfo(getattr(torch, dtype)).max * 1.01).all()
    assert x.max() > (2e4 if dtype != "float16" else 250)


@pytest.mark.parametrize(("dtype", "is_scaled"), [("float16", True), ("bfloat16", False)])
def test_values_in_half_do_not_overflow_inside_of_the_reference(tmp_path, dtype, is_scaled):
    source = f"""
import torch

def gelu_of_product(a, b):
    return torch.nn.functional.gelu(a @ b)

def inputs(rows=32, depth=512):
    return torch.randn(rows, depth).to(torch.{dtype}), torch.randn(depth, rows).to(torch.{dtype})
"""
    (tmp_path / "product.py").write_text(source, encoding="utf-8")
    made = Task(f"{tmp_path / 'product.py'}:gelu_of_product", None, torch.device("cpu"))
    for variant in value_variants(made, made.draw(3), random.Random(1)):
        if variant.kind not in ("nonfinite", "infinity"):
            a, b = variant.inputs.tensors
            assert not is_scaled or ((2 * a.float()) @ (2 * b.float())).abs().max() < 65600, variant.words
        if variant.words == "large values":
            assert (a.abs().max() < 190) == is_scaled


def test_probabilities_stay_probabilities(tmp_path):
    made = task(tmp_path, PARAMETERS.replace("torch.randn(columns)", "torch.rand(columns)"))
    for variant in value_variants(made, made.draw(3), random.Random(1)):
        weight = variant.inputs.tensors[1]
        assert bool(((weight >= 0) & (weight <= 1)).all())


def test_a_draw_follows_its_seed(tmp_path):
    made = task(tmp_path, PARAMETERS)
    assert torch.equal(made.draw(5).tensors[0], made.draw(5).tensors[0])
    assert not torch.equal(made.draw(5).tensors[0], made.draw(6).tensors[0])


def test_a_file_without_inputs_says_what_to_write(tmp_path):
    with pytest.raises(CaseError, match="def inputs"):
        task(tmp_path, PARAMETERS.replace("def inputs", "def draw_them"))


def test_draws_that_are_all_the_same_get_factors(tmp_path):
    seeded = task(
        tmp_path, PARAMETERS.replace("    return torch.randn", "    torch.manual_seed(1)\n    return torch.randn")
    )
    given = seeded.draw(5)
    assert seeded.scale_constants(given, 6)
    first, second = (seeded.draw(seed).tensors[0] for seed in (7, 8))
    assert not torch.equal(first, second) and not torch.equal(first, given.tensors[0])
    drawn = task(tmp_path, PARAMETERS)
    assert not drawn.scale_constants(drawn.draw(5), 6)
