"""The undo log puts back the same objects, whatever the order."""

from __future__ import annotations

import copy
import gc
import io
import random
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from nearpeak.errors import UsageError
from nearpeak.fixes.edits import Edits


def rotate(x):
    return x + 1


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return functional.relu(rotate(x)) * self.weight


def doubled(self, x):
    return 2 * x * self.weight


X = torch.tensor([1.0, -3.0, 2.0])


def test_a_forward_is_that_of_one_object():
    first, second = Part(), Part()
    edits = Edits()
    edits.set_forward(first, doubled)
    assert torch.equal(first(X), 2 * X)
    assert torch.equal(second(X), Part()(X))
    edits.undo()
    assert "forward" not in vars(first)
    assert torch.equal(first(X), second(X))


def test_hooks_parameters_and_state_dict_stay():
    part, seen = Part(), []
    part.register_forward_hook(lambda module, args, output: seen.append(output))
    before, weight = list(part.state_dict()), part.weight
    Edits().set_forward(part, doubled)
    part(X)
    assert len(seen) == 1
    assert list(part.state_dict()) == before
    assert part.weight is weight


def test_a_deep_copy_of_a_fixed_module_computes_on_its_own_parameters():
    part = Part()
    Edits().set_forward(part, doubled)
    copied = copy.deepcopy(part)
    with torch.no_grad():
        copied.weight.zero_()
    assert torch.equal(copied(X), torch.zeros(3))
    assert torch.equal(part(X), 2 * X)


def test_a_saved_module_has_the_forward_of_its_class():
    part = Part()
    expected = part(X)
    Edits().set_forward(part, doubled)
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), expected)


def test_functions_are_replaced_for_one_object_and_add_up():
    part, other = Part(), Part()
    relu = functional.relu
    edits = Edits()
    edits.set_functions(part, {"rotate": lambda x: x})
    edits.set_functions(part, {"functional.relu": lambda x: -x})
    assert torch.equal(part(X), -X)
    assert torch.equal(other(X), torch.relu(X + 1))
    assert functional.relu is relu
    edits.undo()
    assert torch.equal(part(X), other(X))


class Choosing(Part):
    """Compares functions, which stay what they are."""

    function = staticmethod(rotate)

    def forward(self, x):
        if self.function is rotate:
            x = rotate(x)
        return functional.relu(x if self.function is not rotate else rotate(x)) * self.weight


def test_a_function_that_is_compared_too_is_replaced_where_it_is_called():
    part = Choosing()
    edits = Edits()
    edits.set_functions(part, {"rotate": lambda x: x + 3})
    assert torch.equal(part(X), torch.relu(X + 6))
    edits.set_functions(part, {"rotate": lambda x: x + 5})
    assert torch.equal(torch.compile(part, backend="eager")(X), torch.relu(X + 10))
    edits.undo()
    assert torch.equal(part(X), torch.relu(X + 2))


def test_functions_of_a_decorated_forward_are_replaced():
    import functools

    def decorator(function):
        @functools.wraps(function)
        def wrapped(self, *args):
            return function(self, *args) + 100

        return wrapped

    class Decorated(Part):
        forward = decorator(Part.forward)

    part = Decorated()
    edits = Edits()
    edits.set_functions(part, {"rotate": lambda x: x})
    assert torch.equal(part(X), torch.relu(X) + 100)


def test_replaced_functions_are_compiled():
    part = Part()
    Edits().set_functions(part, {"rotate": lambda x: x - 1})
    compiled = torch.compile(part, backend="eager")
    assert torch.equal(compiled(X), torch.relu(X - 1))


counter = 0


class Counting(nn.Module):
    def forward(self, x):
        global counter
        counter += 1
        return rotate(x)


def test_a_forward_that_sets_globals_is_refused():
    with pytest.raises(UsageError, match="sets global variables"):
        Edits().set_functions(Counting(), {"rotate": torch.neg})


def test_what_somebody_else_set_meanwhile_is_left_alone():
    part, edits = Part(), Edits()
    edits.set_forward(part, doubled)
    theirs = part.forward = lambda x: x
    edits.undo()
    assert part.forward is theirs
    assert edits.foreign


def test_suspended_changes_are_in_force_again():
    part, edits, settings = Part(), Edits(), []
    edits.set_forward(part, doubled)
    edits.do(lambda: settings.append("on"), lambda: settings.append("off"))
    forward = part.forward
    with edits.suspended():
        assert "forward" not in vars(part)
    assert part.forward is forward
    assert settings == ["on", "off", "on"]


def test_a_changed_model_that_nobody_uses_is_freed():
    part, edits = Part(), Edits()
    edits.set_forward(part, doubled)
    gone = weakref.ref(part)
    del part, edits
    gc.collect()
    assert gone() is None


def test_undo_to_a_mark():
    registry, edits = {"a": 1}, Edits()
    edits.set_item(registry, "a", 2)
    mark = edits.mark()
    edits.set_item(registry, "b", 3)
    edits.undo(mark)
    assert registry == {"a": 2}
    edits.undo()
    assert registry == {"a": 1}


@pytest.mark.parametrize("seed", range(50))
def test_any_order_of_fixing_and_undoing_leaves_everything_as_it_was(seed):
    """Several models, a registry and a namespace that they share."""
    chance = random.Random(seed)
    models = [Part() for _ in range(4)]
    registry, space = {"sdpa": object()}, types.SimpleNamespace(name="before")
    before = [dict(vars(model)) for model in models], dict(registry), dict(vars(space))
    outputs = [model(X) for model in models]
    open_logs: list[Edits] = []
    for _ in range(30):
        if open_logs and chance.random() < 0.5:
            open_logs.pop(chance.randrange(len(open_logs))).undo()
            continue
        edits = Edits()
        model = chance.choice(models)
        edits.set_forward(model, doubled)
        edits.set_item(registry, chance.choice(["sdpa", "ours"]), object())
        edits.set(space, chance.choice(["name", "other"]), object())
        open_logs.append(edits)
    chance.shuffle(open_logs)
    for edits in open_logs:
        edits.undo()
        assert not edits.foreign
    assert [dict(vars(model)) for model in models] == before[0]
    assert registry == before[1]
    assert dict(vars(space)) == before[2]
    assert all(torch.equal(model(X), output) for model, output in zip(models, outputs, strict=True))
