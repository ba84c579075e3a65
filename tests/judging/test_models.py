"""A task whose reference is a class of modules."""

from __future__ import annotations

import torch

from nearpeak.judging.judge import _function_in
from nearpeak.judging.models import Model, make_module, model_content, model_like
from nearpeak.judging.variants import Task

CPU = torch.device("cpu")
REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.linear = torch.nn.Linear(features, width)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(6, 5)]

def get_init_inputs():
    return [5, 3]
"""


class Twin(torch.nn.Module):
    def __init__(self, features, width):
        super().__init__()
        torch.randn(7)  # other numbers than those that the reference drew
        self.linear = torch.nn.Linear(features, width)


class Stranger(torch.nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, features))


def task(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE, encoding="utf-8")
    return Task(f"{tmp_path / 'reference.py'}:Model", None, CPU)


def test_a_class_of_modules_is_made_and_drawn_for(tmp_path):
    made = task(tmp_path)
    (x,) = made.draw(1).args
    assert made.init == [5, 3] and made.function(x).shape == (6, 3)
    exact = made.function(x.double())
    assert exact.dtype == torch.float64 and torch.allclose(exact.float(), made.function(x), atol=1e-6)


def test_weights_of_the_same_names_are_the_references(tmp_path):
    made = task(tmp_path)
    content = model_content(made.model, made.init, made.seed)
    twin, has_same = model_like(content, Twin, CPU)
    assert has_same and torch.equal(twin.linear.weight, made.model.linear.weight)
    assert not twin.linear.weight.requires_grad
    stranger, has_same = model_like(content, Stranger, CPU)
    assert not has_same and torch.equal(stranger.weight, make_module(Stranger, (5, 3), made.seed, CPU).weight)


def test_a_module_in_float64_leaves_the_other_as_it_is():
    module = torch.nn.Linear(4, 4)
    model = Model(module)
    assert model(torch.ones(1, 4).double()).dtype == torch.float64 and module.weight.dtype == torch.float32


def test_the_class_of_a_file_is_found_from_its_text(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE, encoding="utf-8")
    candidate = REFERENCE.replace("class Model", "class ModelNew") + "\nclass Part(torch.nn.Module):\n    pass\n"
    (tmp_path / "candidate.py").write_text(candidate, encoding="utf-8")
    assert _function_in(tmp_path / "reference.py") == "Model"
    assert _function_in(tmp_path / "candidate.py", prefer="Model") == "ModelNew"
