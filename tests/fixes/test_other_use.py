"""The program does with its model what nobody foresaw: before, while, and after it is fixed."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import signal
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.fixes import arguments, engine
from nearpeak.fixes.arguments import ArgumentState, preserve_module_state
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns import attention, launches, loss, mlp, norms
from nearpeak.fixes.registry import ModelRun, Site, forget_fix, observe
from nearpeak.fixes.registry import fix as register
from nearpeak.fixes.script import _ProgramWatch
from tests.fixes.models import Norm, make_batch, make_model, registered, speed


@pytest.fixture
def faster(monkeypatch):
    """Every change halves the time of the step, which runs once."""

    def turns(step, way, pairs, device, **_):
        step()
        return dict.fromkeys(pairs, speed(0.5))

    monkeypatch.setattr(engine, "time_in_turns", turns)


def own_norm(self, x):
    return Norm.forward(self, x)


def run_of(model: nn.Module, *args: Any) -> ModelRun:
    return observe(model, args, {})


def changed(find: Any, model: nn.Module, *args: Any) -> nn.Module:
    """A copy without the change, of a model that gets it."""
    original = copy.deepcopy(model)
    (site,) = find(run_of(model, *args))
    assert not site.skip or "needs a CUDA device" in site.skip
    site.change(Edits())
    return original


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.batch_norm, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4), Norm(4)
        self.register_buffer("mean", torch.zeros(()))
        self.calls, self._calls, self.seen, self.sums = 0, 0, [], torch.zeros(2)

    def forward(self, x):
        self.calls += 1
        self._calls += 1
        self.seen.append(x.sum())
        self.sums[0] += 1.0
        self.last = x
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.norm(self.batch_norm(self.linear(x)))


def test_what_a_call_notes_in_its_modules_is_as_it_was(faster):
    model, x = Stateful(), torch.randn(6, 4)
    mean, state = model.mean, copy.deepcopy(model.state_dict())
    with registered("norm", own_norm) as id:
        nearpeak.fix(model, x, only=[id])
    assert (model.calls, model._calls, model.seen, model.sums.tolist()) == (0, 0, [], [0.0, 0.0])
    assert "last" not in vars(model)
    assert model.mean is mean
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


noted: list[Tensor] = []


def test_what_hooks_and_forwards_collect_is_as_it_was(faster):
    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm(4)

        def forward(self, x):
            noted.append(x)
            return self.norm(x)

    model, seen, recent = Collecting(), {"outputs": []}, deque(maxlen=2)
    outputs = seen["outputs"]

    def hook(module, args, output):
        outputs.append(output)
        recent.append(output)

    model.norm.register_forward_hook(hook)
    with registered("norm", own_norm) as id:
        nearpeak.fix(model, torch.zeros(2, 4), only=[id])
    assert (noted, outputs, list(recent)) == ([], [], [])


def test_a_batch_that_a_call_writes_to_is_as_it_was(faster):
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm(4)

        def forward(self, x):
            return self.norm(x.add_(1.0))

    x = torch.zeros(2, 4)
    with registered("norm", own_norm) as id:
        nearpeak.fix(Writing(), x, only=[id])
    assert torch.equal(x, torch.zeros(2, 4))


def test_members_of_a_set_among_the_arguments_are_as_they_were():
    seen = {1}
    state = ArgumentState((SimpleNamespace(seen=seen),), {})
    seen.add(2)
    assert "has other members" in state.changes()
    assert not state.holds()
    state.restore()
    assert seen == {1}


def test_options_of_an_optimizer_that_its_step_changes_are_as_they_were(faster):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    model = make_model()
    optimizer = Counting(model.parameters(), 0.1)
    group = optimizer.param_groups[0]
    options = {**group}
    with registered("norm", own_norm) as id:
        nearpeak.fix(model, *make_batch(), only=[id], optimizer=optimizer)
    assert optimizer.param_groups[0] is group
    assert group == options


def test_hooks_of_an_optimizer_see_no_step_that_is_measured(faster):
    model, seen = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *args: seen.append("own"))
    handle = register_optimizer_step_post_hook(lambda *args: seen.append("all"))
    try:
        with registered("norm", own_norm) as id:
            report = nearpeak.fix(model, *make_batch(), only=[id], optimizer=optimizer).report
        assert list(report.kept()) and not seen
        optimizer.step()
    finally:
        handle.remove()
    assert seen == ["own", "all"]


def test_an_optimizer_whose_step_calls_the_model_is_left_out(faster):
    model = make_model()
    with registered("norm", own_norm) as id:
        optimizer = torch.optim.LBFGS(model.parameters())
        report = nearpeak.fix(model, *make_batch(), only=[id], optimizer=optimizer).report
    assert list(report.kept())
    assert any("LBFGS calls the model itself" in note for note in report.notes)


def test_weights_whose_memory_others_have_stay_there(faster):
    models = [nn.Sequential(nn.Conv2d(3, 4, 3)) for _ in range(2)]
    models[0].share_memory()
    rows = torch.randn(2, 4, 3, 3, 3)
    models[1][0].weight.data = rows[0]
    for model in models:
        pointer = model[0].weight.data_ptr()
        assert not nearpeak.fix(model, torch.randn(1, 3, 8, 8), only=["channels-last"]).report.sites
        assert model[0].weight.data_ptr() == pointer


def test_a_change_that_raises_is_undone_and_listed(faster):
    values = []

    def change(edits):
        values.append(1)
        raise ValueError("no")

    @register("failing-change", "a fix of a test")
    def sites(run):
        yield Site(call=run.call("norm"), what="norm", change=lambda edits: edits.do(lambda: change(edits), values.pop))

    try:
        (site,) = nearpeak.fix(make_model(), *make_batch(), only=["failing-change"]).report.sites
    finally:
        forget_fix("failing-change")
    assert (site.status, site.why) == ("skipped", "it could not be changed: it raised ValueError: no")
    assert values == []


def test_a_certificate_of_what_cannot_be_replaced_here_is_refused(faster):
    model, reasons = make_model(), []

    @register("here", "a fix of a test")
    def sites(run):
        call = run.call("norm")
        yield Site(
            call=call, what="norm", skip="".join(reasons), change=lambda edits: edits.set_forward(call.module, own_norm)
        )

    try:
        fixed = nearpeak.fix(model, *make_batch(), only=["here"])
        fixed.undo()
        reasons.append("it computes something else")
        with pytest.raises(UsageError, match="which cannot be replaced here: it computes something else"):
            nearpeak.fix_from(fixed.report, model, *make_batch())
    finally:
        forget_fix("here")
    assert "forward" not in vars(model.norm)


def test_changes_that_cannot_be_made_again_leave_nothing_behind():
    model, edits, fails = make_model(), Edits(), []

    def change():
        if fails:
            raise ValueError("no")

    edits.set_forward(model.norm, own_norm)
    edits.do(change, lambda: None)
    with pytest.raises(ValueError), edits.suspended():
        fails.append(True)
    edits.undo()
    assert "forward" not in vars(model.norm)


def test_an_interruption_waits_until_everything_is_put_back(monkeypatch):
    source = "def refill(*args):\n    signals and os.kill(os.getpid(), signals.pop())\n    original(*args)\n"
    space: dict[str, Any] = {"os": os, "signals": [signal.SIGINT], "original": arguments._refill}
    exec(compile(source, arguments.__file__, "exec"), space)  # as if in the code of nearpeak
    monkeypatch.setattr(arguments, "_refill", space["refill"])
    model = Stateful()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with &
    try:
        with pytest.raises(KeyboardInterrupt), preserve_module_state(model):
            model(torch.randn(3, 4))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (model.calls, model.seen, model.mean.item()) == (0, [], 0.0)


def test_a_pickled_model_can_be_fixed(faster):
    model = make_model()
    with registered("norm", own_norm) as id:
        nearpeak.fix(model, *make_batch(), only=[id])
        again = pickle.loads(pickle.dumps(model))
        assert nearpeak.fix(again, *make_batch(), only=[id]).report.sites


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale: Any = 2.0
        self._factor, self.config, self.options = 1.0, SimpleNamespace(shift=0.0), {"power": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.gate(x)) * self.up(x) * self._factor + self.config.shift
        return y * self.scale * self.options["power"][0]


def set_item(mapping: dict, key: str, value: Any) -> None:
    mapping[key] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "_factor", 3.0),
        lambda model: setattr(model.config, "shift", 3.0),
        lambda model: setattr(model, "config", SimpleNamespace(shift=3.0)),
        lambda model: set_item(model.options, "power", [3.0]),
        lambda model: operator.setitem(model.options["power"], 0, 3.0),
        lambda model: setattr(model, "scale", torch.linspace(1.0, 2.0, 8)),
    ],
)
def test_a_setting_that_is_changed_later_counts(change):
    model, x = Gated(), torch.randn(2, 3, 8)
    original = changed(mlp.gated_activations, model, x)
    torch.testing.assert_close(model(x), original(x))
    for each in (model, original):
        change(each)
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.slow
def test_modules_with_other_private_settings_are_of_other_kinds():
    class Private(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self._eps, self.weight = eps, nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self.weight

    found = norms.norms(run_of(nn.Sequential(Private(1e-6), Private(1e-2)), torch.randn(2, 8)))
    assert [site.what for site in found] == ["RMSNorm of 8, eps 1e-06", "RMSNorm of 8, eps 0.01"]


class SumNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), Norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.linear(x))


def test_a_child_that_is_not_called_any_more_is_called_when_it_changes():
    model, x, calls = SumNorm(), torch.randn(2, 8), []
    original = changed(norms.add_norms, model, x)
    for each in (model, original):
        each.norm.eps = 0.5
    torch.testing.assert_close(model(x), original(x))
    for each in (model, original):
        each.norm.eps = 1e-6
        each.norm.forward = lambda x: x.sin()
    torch.testing.assert_close(model(x), original(x))
    del model.norm.forward
    model.norm.register_full_backward_hook(lambda *args: calls.append(args))
    model(x).sum().backward()
    assert calls


def test_a_norm_of_other_dimensions():
    class Channels(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)

    model, x = nn.Sequential(Channels()), torch.randn(4, 8)
    original = changed(norms.norms, model, x)
    for other in (x, torch.randn(2, 5, 8), torch.randn(2, 5, 3, 8)):
        torch.testing.assert_close(model(other), original(other))


class CastNorm(nn.Module):
    def __init__(self, is_cast_back: bool):
        super().__init__()
        self.linear, self.weight, self.is_cast_back = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), is_cast_back

    def forward(self, x):
        hidden = self.linear(x)
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide.to(hidden.dtype) if self.is_cast_back else wide) + 1.0


@pytest.mark.parametrize("is_cast_back", [False, True])
def test_an_inline_norm_in_another_dtype(is_cast_back):
    model, x = CastNorm(is_cast_back), torch.randn(2, 3, 8)
    original = changed(norms.inline_norms, model, x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), original(x), rtol=2e-2, atol=2e-2)
    model.bfloat16(), original.bfloat16()
    torch.testing.assert_close(model(x.bfloat16()), original(x.bfloat16()), rtol=2e-2, atol=2e-2)


def test_a_mask_that_is_changed_later_counts():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)
            self.register_buffer("mask", torch.ones(6, 6).tril())

        def forward(self, x):
            length = x.shape[1]
            q, k, v = self.project(x).split(8, 2)
            scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(self.mask[:length, :length] == 0, float("-inf"))
            return scores.softmax(-1) @ v

    model, x = Causal(), torch.randn(2, 6, 8)
    original = changed(attention.attentions, model, x)
    torch.testing.assert_close(model(x), original(x))
    torch.testing.assert_close(copy.deepcopy(model)(x[:, :4]), original(x[:, :4]))
    for each in (model, original):
        each.mask.triu_(-1)
    torch.testing.assert_close(model(x), original(x))


def test_an_activation_of_integers():
    class Written(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    model = Written()
    original = changed(mlp.activations, model, torch.randn(3))
    torch.testing.assert_close(model(torch.arange(3)), original(torch.arange(3)))


class Noting(Gated):
    def forward(self, x):
        gate = functional.silu(self.gate(x)) * self.up(x)
        self.last = gate.detach()
        return gate


class Appending(Gated):
    def forward(self, x):
        self.options.setdefault("seen", gate := functional.silu(self.gate(x)) * self.up(x))
        return gate


class NotingInChild(Gated):
    def forward(self, x):
        self.gate.last = functional.silu(self.gate(x)) * self.up(x)
        return self.gate.last


class Checkpointed(Gated):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class WithoutAutocast(Gated):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class WithoutGradients(Gated):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    "kind", [Noting, Appending, NotingInChild, Checkpointed, WithoutAutocast, WithoutGradients, Gated]
)
def test_what_a_graph_has_not_is_not_traced(kind):
    model = kind()
    before = [{**vars(module)} for module in model.modules()]
    found = list(mlp.gated_activations(run_of(model, torch.randn(2, 3, 8))))
    assert len(found) == (kind is Gated)
    assert [{**vars(module)} for module in model.modules()] == before
    assert model.options == {"power": [1.0]}


class Listed(Gated):
    def forward(self, x, others):
        for other in others:
            x = x + other
        return functional.silu(self.gate(x)) * self.up(x)


class Shifted(Gated):
    def forward(self, x, others):
        x = x if others[0] is None else x + others[0]
        return functional.silu(self.gate(x)) * self.up(x)


class Held(Gated):
    def forward(self, x, others):
        x = x if others.first is None else x + others.first
        return functional.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        (Listed, [torch.ones(8)], [[torch.ones(8)] * 3, []]),
        (Shifted, (torch.ones(8),), [(torch.zeros(8),), (None,)]),
        (Held, SimpleNamespace(first=torch.ones(8)), [SimpleNamespace(first=None)]),
    ],
)
def test_arguments_of_another_form(kind, first, others):
    model, x = kind(), torch.randn(2, 3, 8)
    original = copy.deepcopy(model)
    for site in mlp.gated_activations(run_of(model, x, first)):
        site.change(Edits())
    for each in (first, *others):
        torch.testing.assert_close(model(x, each), original(x, each))


class Chunked(Gated):
    def forward(self, x):
        return torch.cat([functional.silu(self.gate(part)) * self.up(part) for part in x.split(2, dim=1)], 1)


class Steps(Gated):
    def forward(self, x):
        return torch.stack([functional.silu(self.gate(row)) * self.up(row) for row in x.unbind(1)], 1)


@pytest.mark.parametrize("kind", [Chunked, Steps])
def test_a_batch_of_more_parts(kind):
    model, x = kind(), torch.randn(2, 4, 8)
    original = copy.deepcopy(model)
    for site in mlp.gated_activations(run_of(model, x)):
        site.change(Edits())
    for length in (4, 6, 3):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(model(x), original(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 40)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def deferring(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    model = Classifier().to(dtype)
    original = copy.deepcopy(model)
    Edits().set_forward(model.head, loss.deferred_forward(model.head, "weight", "bias", []))
    return model, original


def test_logits_that_are_read_after_the_step():
    x, target = torch.randn(6, 8), torch.randint(40, (6,))
    results = []
    for model in deferring():
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        logits = model(x)
        functional.cross_entropy(logits, target).backward()
        optimizer.step()
        results.append([functional.cross_entropy(logits, target).detach(), logits.detach().clone()])
    torch.testing.assert_close(*results)


def test_logits_that_are_read_after_another_change_are_refused():
    model, _ = deferring()
    logits = model(torch.randn(6, 8))
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="leave out the fix linear-cross-entropy"):
        logits.sum()


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, logits: torch.autograd.grad(loss, logits),
        lambda loss, logits: logits.retain_grad(),
        lambda loss, logits: logits.register_hook(print),
    ],
)
def test_a_gradient_of_logits_that_the_loss_did_not_need_is_refused(ask):
    model, _ = deferring()
    logits = model(torch.randn(6, 8))
    loss = functional.cross_entropy(logits, torch.randint(40, (6,)))
    with pytest.raises(RuntimeError, match="Ask for it before the loss"):
        ask(loss, logits)


def test_a_gradient_of_logits_that_is_asked_for_before_the_loss():
    x, target, results = torch.randn(6, 8), torch.randint(40, (6,)), []
    for model in deferring():
        logits = model(x)
        logits.retain_grad()
        functional.cross_entropy(logits, target).backward()
        results.append(logits.grad)
    torch.testing.assert_close(*results)


def test_what_is_written_to_logits_stays():
    x, results = torch.randn(2, 6, 8, dtype=torch.bfloat16), []
    for model in deferring(torch.bfloat16):
        with torch.no_grad():
            logits = model(x)
            wide, part = logits.float(), logits[:, :-1].contiguous()
            wide[..., 3] = -9.0
            part[..., 4] = -8.0
            results.append([wide + 0, part + 0, logits + 0])
    torch.testing.assert_close(*results)


def test_a_graph_is_of_the_modules_and_settings_that_it_was_recorded_with():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)).eval()
    model.config = SimpleNamespace(scale=1.0)
    state = launches._ModelState(model)
    assert state.holds() and state.holds()
    model.note = object()
    assert state.holds()
    model.config = SimpleNamespace(scale=1.0)
    assert state.holds()
    for owner, name, value in (
        (model.config, "scale", 2.0),
        (model[2], "eps", 0.1),
        (model[1], "approximate", "tanh"),
        (model, "0", nn.Linear(4, 4)),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        assert not state.holds()
        setattr(owner, name, before)
        assert state.holds()


def test_a_program_with_hooks_of_steps_of_its_own():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fixed = []
    watch = _ProgramWatch(
        lambda *args, **options: fixed.append(args) or SimpleNamespace(report=None), print, stop=False
    )
    with watch.watching():
        handle = register_optimizer_step_post_hook(lambda *args: None)
        try:
            for _ in range(5):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
        finally:
            handle.remove()
    assert len(fixed) == 1
