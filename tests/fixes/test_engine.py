"""One fix at a time: kept if it is right and faster, else rolled back; whatever happens, the model can be undone."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import sys
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.fixes import engine, record
from nearpeak.fixes.arguments import ArgumentState
from nearpeak.fixes.engine import refuse_patched, time_in_turns
from nearpeak.fixes.registry import OPTIMIZER, Site, forget_fix, observe
from nearpeak.fixes.registry import fix as register
from tests.fixes.models import Model, make_batch, make_model, registered, speed


def torch_norm(self, x):
    return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def wrong_norm(self, x):
    return 1.01 * torch_norm(self, x)


@pytest.fixture
def faster(monkeypatch):
    """Every change halves the time of the step."""
    monkeypatch.setattr(engine, "time_in_turns", lambda step, way, pairs, device, **_: dict.fromkeys(pairs, speed(0.5)))


def state_of(model: nn.Module) -> list:
    return [(path, set(vars(part)), vars(part).get("forward")) for path, part in model.named_modules()]


def test_a_right_and_faster_fix_is_kept_and_undone(faster):
    model, batch = make_model(), make_batch()
    before, expected = state_of(model), model(*batch)
    shared = Model.forward, functional.rms_norm, functional.cross_entropy
    with registered("norm", torch_norm) as id:
        fixed = nearpeak.fix(model, *batch, only=[id])
        assert (Model.forward, functional.rms_norm, functional.cross_entropy) == shared
        assert "forward" not in vars(make_model().norm)
        with pytest.raises(UsageError, match="has fixed this model before"):
            nearpeak.fix(model, *batch, only=[id])
    (site,) = fixed.report.sites
    assert (site.status, site.path, site.what) == ("replaced", "norm", "test of norm")
    assert "aten.rsqrt.default" in site.kernels
    assert fixed.report.speed is not None and fixed.report.speed.ratio == 0.5
    assert all(error.is_within for error in fixed.report.errors)
    assert model.norm.forward.__func__.__code__ is torch_norm.__code__
    torch.testing.assert_close(model(*batch), expected)
    fixed.undo()
    fixed.undo()
    assert state_of(model) == before
    assert torch.equal(model(*batch), expected)


def test_sites_are_proven_as_modules_where_a_wrong_eps_shows(faster):
    def other_eps(self, x):  # which the batch does not show: its rows are large
        return functional.rms_norm(x, x.shape[-1:], self.weight, 10 * self.eps)

    model, batch = make_model(), make_batch()
    with torch.no_grad():
        model.embedding.weight.mul_(100)
    for forward, status in ((torch_norm, "kept"), (other_eps, "rolled back")):
        with registered("norm", forward) as id, nearpeak.fixed(model, *batch, only=[id]) as fixed:
            (result,) = fixed.report.fixes
        assert result.status == status
        assert any("inputs times 0.001" in error.what for error in result.errors)


def test_a_wrong_fix_is_rolled_back(faster):
    model = make_model()
    before = state_of(model)
    with registered("norm", wrong_norm) as id:
        report = nearpeak.fix(model, *make_batch(), only=[id]).report
    (fix,) = report.fixes
    assert (fix.status, fix.speed) == ("rolled back", None)
    assert fix.why.startswith("wrong: ")
    assert [site.status for site in report.sites] == ["rolled back"]
    assert state_of(model) == before


@pytest.mark.parametrize(("ratio", "words"), [(1.2, "slower: 1.200 x"), (1.0, "not faster: 1.000 x")])
def test_a_fix_that_is_not_faster_is_rolled_back_with_its_figure(ratio, words, monkeypatch):
    monkeypatch.setattr(
        engine, "time_in_turns", lambda step, way, pairs, device, **_: dict.fromkeys(pairs, speed(ratio))
    )
    model = make_model()
    before = state_of(model)
    with registered("norm", torch_norm) as id:
        report = nearpeak.fix(model, *make_batch(), only=[id]).report
    assert report.fixes[0].why.startswith(words)
    assert report.speed is None
    assert "nothing helps" in repr(report)
    assert state_of(model) == before


def test_a_large_batch_is_proven_on_a_part_and_compared_in_full(faster):
    model, batch = make_model(), make_batch(rows=3, length=150)
    labels = torch.randint(50, (3, 150))
    with registered("norm", torch_norm) as id:
        report = nearpeak.fix(
            model, *batch, only=[id], loss=lambda logits: functional.cross_entropy(logits.transpose(1, 2), labels)
        ).report
    references = {error.what.partition(", ")[2]: error.reference for error in report.errors}
    assert references["the batch"] == "float64"
    assert references["all of the batch"] == "original"


def test_all_of_a_large_batch_is_judged_by_the_rounding_of_the_original(faster):
    """Which repeats itself bitwise: its errors are known from the part that has a wide reference."""
    model, batch = make_model().bfloat16(), make_batch(rows=3, length=150)
    labels = torch.randint(50, (3, 150))

    def in_other_order(self, x):
        return (x.float() * self.weight.float() / (x.float().square().mean(-1, True) + self.eps).sqrt()).to(x.dtype)

    def only_up_to_128_positions(self, x):
        return in_other_order(self, x) * (torch.arange(x.shape[1])[:, None] < 128)

    def fix_of(forward):
        with registered("norm", forward) as id, nearpeak.fixed(model, *batch, only=[id], loss=loss) as fixed:
            return fixed.report.fixes[0]

    def loss(logits):
        return functional.cross_entropy(logits.float().transpose(1, 2), labels)

    assert (fix_of(in_other_order).status, fix_of(in_other_order).why) == ("kept", "")
    assert "all of the batch" in fix_of(only_up_to_128_positions).why


def test_compiled_code_sees_the_whole_batch_alone(faster):
    """A compiler that has seen a part of it as well compiles for all sizes from then on."""
    rows = []

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    def backend(graph, inputs):
        rows.append(inputs[-1].shape[0])
        return graph.forward

    model = Layer(8, 8)

    def compiled(run):
        change = torch.compile(model._call_impl, backend=backend)
        yield Site(call=run.calls[0], what="all", change=lambda edits: edits.set(model, "_compiled_call_impl", change))

    register("planted", "compiled code", compiles=True)(compiled)
    try:
        report = nearpeak.fix(model, torch.randn(300, 8), only=["planted"]).report
    finally:
        forget_fix("planted")
    assert report.fixes[0].status == "kept"
    assert "all of the batch" in report.fixes[0].errors[-1].what
    assert rows == [300]


def test_why_a_saving_is_not_predicted_is_noted(faster, monkeypatch):
    def refuse(*args, **kwargs):
        raise UsageError("the code asks for the memory of a tensor")

    monkeypatch.setattr(engine, "trace", refuse)
    monkeypatch.setattr(engine, "known_machine", lambda: nearpeak.machine("h200-sxm"))
    monkeypatch.setattr(engine._Engine, "_note_kernels", lambda self: None)
    with registered("norm", torch_norm) as id:
        report = nearpeak.fix(make_model(), *make_batch(), only=[id]).report
    assert (report.fixes[0].status, report.fixes[0].predicted_s) == ("kept", None)
    assert report.notes == (
        "What planted saves is not predicted: it raised UsageError: the code asks for the memory of a tensor.",
    )


def test_a_saving_is_predicted_in_the_step(faster, monkeypatch):
    """Alone, a small module takes as long as the host needs for its launches; in a step the device may be behind."""
    machine = nearpeak.machine("h200-sxm")
    monkeypatch.setattr(engine, "known_machine", lambda: machine)
    monkeypatch.setattr(engine._Engine, "_note_kernels", lambda self: None)
    model, batch = make_model(), make_batch()

    def expected():
        return engine._estimate(model, batch, {}, True, machine).expected_s

    before = expected()
    with registered("norm", torch_norm) as id:
        fixed = nearpeak.fix(model, *batch, only=[id])
    (fix,) = fixed.report.fixes
    assert fix.predicted_s == pytest.approx(before - expected())


def test_an_optimizer_is_proven_on_one_parameter_of_each_size(faster):
    """A wide copy of all would not fit beside a large model; and what is no optimizer is none of its business."""

    class Counting(torch.optim.SGD):
        counts: ClassVar[set[int]] = set()

        def step(self, closure=None):
            self.counts.add(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)), nn.Linear(8, 4, bias=False))
    optimizer = Counting(model.parameters(), 0.1, momentum=0.9, foreach=False)
    owned = optimizer.param_groups[0]["params"]

    def changes(path):
        return Site(what="a setting", path=path, change=lambda edits: edits.set_item(optimizer.defaults, "x", 1))

    for path, proven in (("a configuration", False), (OPTIMIZER, True)):
        register("planted", "a fix of a test")(lambda run, path=path: [changes(path)])
        try:
            report = nearpeak.fix(model, torch.randn(3, 8), optimizer=optimizer, only=["planted"]).report
        finally:
            forget_fix("planted")
        assert any("optimizer" in error.what for error in report.fixes[0].errors) == proven
    assert Counting.counts == {2, 6}
    assert optimizer.param_groups[0]["params"] is owned and len(owned) == 6 and not optimizer.state


class Cache:
    def __init__(self):
        self.layers = [{"keys": torch.ones(1, 3, 4)}]
        self.length = torch.zeros((), dtype=torch.long)
        self.calls = 0


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x, cache):
        keys = torch.cat([cache.layers[0]["keys"], x[:, None]], 1)
        cache.layers[0]["keys"] = keys
        cache.layers.append(None)
        cache.length += 1
        cache.calls += 1
        return self.project(keys.mean(1)) + cache.length


def test_a_cache_among_the_arguments_is_as_it_was(faster):
    torch.manual_seed(0)
    model, cache, x = Decoder().eval(), Cache(), torch.randn(1, 4)
    keys, length = cache.layers[0]["keys"], cache.length
    state = ArgumentState((x, cache), {})
    model(x, cache)
    assert state.changes() == "Cache.calls changes from 0 to 1"
    state.restore()
    assert state.changes() == ""
    assert state.holds()
    with registered("project", same_forward) as id:
        fixed = nearpeak.fix(model, x, cache, only=[id])
    assert fixed.report.fixes[0].status == "kept"
    assert (cache.calls, len(cache.layers), int(length)) == (0, 1, 0)
    assert cache.layers[0]["keys"] is keys
    assert cache.length is length


@pytest.mark.slow
def test_as_fast_with_less_memory_is_kept(monkeypatch):
    less = dataclasses.replace(speed(1.0), memory_before=10e9, memory_after=6e9)
    monkeypatch.setattr(engine, "time_in_turns", lambda step, way, pairs, device, **_: dict.fromkeys(pairs, less))
    with registered("norm", torch_norm) as id, nearpeak.fixed(make_model(), *make_batch(), only=[id]) as fixed:
        assert fixed.report.fixes[0].status == "kept"


def test_a_fix_that_is_wrong_only_in_the_whole_model_is_rolled_back_there(faster):
    """It is right on the batch, and looks at later tokens on a longer one."""

    def leaking(self, tokens, mask=None):
        logits = type(self).forward(self, tokens, mask)
        return logits if tokens.shape[0] > 1 else logits * 1.1

    model = make_model()
    with registered("", leaking) as id:
        report = nearpeak.fix(model, *make_batch(), only=[id]).report
    assert "wrong in the whole model: " in report.fixes[0].why
    assert "forward" not in vars(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_as_it_was_after_an_error_at_any_moment(error, faster, monkeypatch):
    model, batch = make_model(), make_batch()
    before = state_of(model)
    calls = []

    def failing(*args):
        calls.append(args)
        raise error

    monkeypatch.setattr(engine._Engine, "_verify_together", failing)
    with registered("norm", torch_norm) as id, pytest.raises(error):
        nearpeak.fix(model, *batch, only=[id])
    assert calls
    assert state_of(model) == before


def test_a_site_that_cannot_be_replaced_is_listed_and_required(faster):
    @register("refusing", "a fix of a test")
    def refusing(run):
        def change(edits):
            edits.set_forward(run.model.norm, torch_norm)
            raise UsageError("it has no kernel here")

        yield Site(call=run.call("norm"), what="a norm", change=change)
        yield Site(call=run.call("mlp"), what="a network", change=change, skip="it is too small")

    model, batch = make_model(), make_batch()
    try:
        report = nearpeak.fix(model, *batch, only=["refusing"]).report
        assert [(site.status, site.why) for site in report.sites] == [
            ("skipped", "it has no kernel here"),
            ("skipped", "it is too small"),
        ]
        assert "forward" not in vars(model.norm)
        with pytest.raises(UsageError, match=r"2 sites were found and not replaced: refusing at norm \(it has no"):
            nearpeak.fix(model, *batch, only=["refusing"], require=True)
    finally:
        forget_fix("refusing")


@pytest.mark.slow
def test_training_goes_on_from_the_same_state(faster):
    """Weights, gradients, buffers, random numbers and the optimizer are as before; the fused step continues them."""
    batch = make_batch()[0]
    models = [make_model(), make_model()]
    losses: list[list[float]] = [[], []]
    for place, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(6):
            if place and number == 2:
                fixed = nearpeak.fix(model, batch, optimizer=optimizer, only=["fused-optimizer"])
                assert optimizer.param_groups[0]["fused"] is True
            if place and number == 4:
                fixed.undo()
                assert optimizer.param_groups[0]["fused"] is None
            loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[place].append(loss.item())
        assert optimizer.state[model.head.weight]["step"].item() == 6
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    assert losses[1][:3] == losses[0][:3]


@pytest.mark.slow
def test_channels_last_is_undone_to_the_same_parameters(faster):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 3, 12, 12)
    weight, strides, expected = net.first.weight, net.first.weight.stride(), net(x)
    fixed = nearpeak.fix(net, x, only=["channels-last"])
    assert fixed.report.fixes[0].status == "kept"
    assert net.first.weight.is_contiguous(memory_format=torch.channels_last)
    fixed.undo()
    assert net.first.weight is weight
    assert weight.stride() == strides
    assert torch.equal(net(x), expected)


def test_a_model_where_nothing_applies_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4))
    report = nearpeak.fix(model, torch.randn(2, 4), without=["torch-compile"]).report
    assert not list(report.replaced())
    assert "nothing helps Sequential" in report.report()


def test_a_model_that_does_not_take_the_batch_is_a_usage_error():
    with pytest.raises(UsageError, match="cannot be run on this batch: it raised IndexError"):
        nearpeak.fix(make_model(), torch.full((2, 3), 99), only=["channels-last"])


def test_a_model_that_another_patcher_changed_is_refused():
    model = make_model()
    model.norm.forward = lambda x: x
    with pytest.raises(UsageError, match=r"the forward of norm \(Norm\) was replaced on this object by .*test_engine"):
        refuse_patched(model)
    layer = type("Layer", (nn.Linear,), {"__module__": "somewhere.modeling", "forward": torch_norm})(2, 2)
    with pytest.raises(UsageError, match=r"replaced in its class by .*test_engine, where the class is of somewhere"):
        refuse_patched(layer)
    refuse_patched(make_model())


def test_a_certificate_is_applied_without_measuring(faster, tmp_path, monkeypatch):
    file = tmp_path / "fix.json"
    batch = make_batch()
    with registered("norm", torch_norm) as id:
        report = nearpeak.fix(make_model(), *batch, only=[id]).report
        report.save(file)
        assert record.read(file) == report
        monkeypatch.setattr(engine._Engine, "_measure", None)
        model = make_model()
        with nearpeak.fix_from(file, model, *batch):
            assert "forward" in vars(model.norm)
        assert "forward" not in vars(model.norm)
        other = make_model()
        other.norm.eps = 1e-3
        with pytest.raises(UsageError, match="computes something else in this model"):
            nearpeak.fix_from(file, other, *batch)
        assert "forward" not in vars(other.norm)


@pytest.mark.slow
def test_a_certificate_that_this_machine_does_not_confirm(faster):
    with registered("norm", torch_norm) as id:
        good = nearpeak.fix(make_model(), *make_batch(), only=[id]).report
    with registered("norm", wrong_norm) as id:
        bad = nearpeak.fix(make_model(), *make_batch(), only=[id]).report
    assert record.differences(good, good) == []
    assert record.differences(good, bad)[0].startswith("planted is wrong here: ")
    assert record.differences(good, dataclasses.replace(bad, sites=())) == [
        "planted at norm is not there here.",
        record.differences(good, bad)[0],
    ]


def test_damaged_certificates_are_refused(tmp_path):
    file = tmp_path / "fix.json"
    file.write_text('{"kind": "nearpeak fix", "schema": 1, "model": 3}')
    with pytest.raises(UsageError, match=r"FixReport\.model"):
        record.read(file)
    file.write_text("[]")
    with pytest.raises(UsageError, match="no certificate"):
        record.read(file)


def test_what_a_run_shows():
    run = observe(make_model(), make_batch(), {}, trains=True)
    assert [call.path for call in run.calls][:3] == ["", "embedding", "norm"]
    norm = run.call("norm")
    assert norm.ops[0] == "aten.pow.Tensor_Scalar"
    assert norm.source.startswith("models.py:")
    graph = norm.graph()
    places = [node.meta.get("input") or node.meta.get("parameter") for node in graph.graph.find_nodes(op="placeholder")]
    assert places == ["0", "weight"]
    assert run.call("mlp").children == ["mlp.gate", "mlp.up", "mlp.down"]
    assert run.call("mlp").args[0].requires_grad


@pytest.fixture
def turns(monkeypatch):
    """A clock that only steps move, by the seconds of the way that they run in; the ways in their order."""
    clock, ways = [0.0], []
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(engine.time, name, lambda: clock[0])

    class Turns:
        seconds: ClassVar = {0: 0.4, 1: 0.2, 2: 0.2, 3: 0.1}
        run = ways

        @contextlib.contextmanager
        def way(self, number):
            ways.append(number)
            yield

        def step(self):
            clock[0] += self.seconds[ways[-1]]

    return Turns()


def test_turns_of_a_step_are_told_apart(turns):
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
    speeds = time_in_turns(turns.step, turns.way, pairs, torch.device("cpu"))
    assert [speeds[pair].verdict for pair in pairs] == ["FASTER", "EQUIVALENT", "FASTER", "FASTER"]
    assert speeds[0, 1].ratio == pytest.approx(0.5)
    assert speeds[0, 3].saved_s == pytest.approx(0.3)
    # twice to warm up, and once in every turn, whatever the number of pairs that a way is in
    assert [turns.run.count(number) for number in range(4)] == [2 + engine.LOOKS[0]] * 4


def test_ways_of_decided_pairs_are_no_longer_run(turns, monkeypatch):
    chance = random.Random(1)
    monkeypatch.setattr(turns, "seconds", {0: 0.4, 1: 0.2})
    plain = turns.step

    def step():
        if turns.run[-1] == 2:
            turns.seconds[2] = chance.choice((0.15, 0.25))
        plain()

    monkeypatch.setattr(engine, "MAX_SECONDS", math.inf)
    speeds = time_in_turns(step, turns.way, [(0, 1), (1, 2)], torch.device("cpu"))
    assert speeds[0, 1].pairs == engine.LOOKS[0]
    assert speeds[1, 2].pairs > engine.LOOKS[0]
    assert turns.run.count(0) == 2 + engine.LOOKS[0]


CHAIN = [(place, place + 1) for place in range(7)]
"""Seven fixes of a step of a quarter of a second: five save much, the third 0.9 % and the sixth nothing."""


def chained_speeds(turns, monkeypatch, pace):
    """The speeds of `CHAIN` where `pace()` multiplies the time of each step."""
    savings = [0.06, 0.07, 0.009, 0.13, 0.04, 0.0, 0.05]
    seconds = {place: 0.34 * math.prod(1.0 - saving for saving in savings[:place]) for place in range(8)}
    monkeypatch.setattr(turns, "seconds", seconds)
    plain = turns.step

    def step():
        base = turns.seconds[turns.run[-1]]
        turns.seconds[turns.run[-1]] = base * pace()
        plain()
        turns.seconds[turns.run[-1]] = base

    return time_in_turns(step, turns.way, CHAIN, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(431, 439))
def test_a_small_saving_is_measured_until_it_is_seen(turns, monkeypatch, seed):
    """As on a GPU whose steps differ by a percent: ten turns of eight ways had spent all the time there was."""
    chance = random.Random(seed)
    speeds = chained_speeds(turns, monkeypatch, lambda: chance.gauss(1.0, 0.008))
    assert speeds[2, 3].verdict == "FASTER"
    assert speeds[5, 6].verdict != "FASTER"


@pytest.mark.parametrize("seed", [434, 435, 436])
def test_a_slow_drift_hides_no_saving(turns, monkeypatch, seed):
    """As of the clock of a GPU that gets hot: the two steps of a pair follow each other."""
    chance, level = random.Random(seed), [1.0]

    def drift():
        level[0] += chance.gauss(0.0, 0.006)
        return level[0]

    speeds = chained_speeds(turns, monkeypatch, drift)
    assert speeds[2, 3].verdict == "FASTER"
    assert speeds[5, 6].verdict == "EQUIVALENT"


def test_a_saving_within_a_percent_counts_if_it_is_certain(turns, monkeypatch):
    monkeypatch.setattr(turns, "seconds", {0: 0.25, 1: 0.25 * 0.997})
    assert time_in_turns(turns.step, turns.way, [(0, 1)], torch.device("cpu"))[0, 1].verdict == "FASTER"


@contextlib.contextmanager
def three_fixes(ratios, monkeypatch):
    """Of the norm, the MLP and the attention, with the time of each as a share of that without it; what was timed."""
    timed = []

    def time_pairs(step, way, pairs, device, **_):
        timed.append(pairs)
        names = list(ratios)[: max(after for _, after in pairs)] if len(timed) == 1 else None
        return {
            pair: speed(ratios[names[pair[0]]] if names and pair[1] == pair[0] + 1 else 0.5) for pair in pairs
        }  # together they are faster

    monkeypatch.setattr(engine, "time_in_turns", time_pairs)
    paths = {"first": "norm", "second": "mlp", "third": "attention"}
    with contextlib.ExitStack() as stack:
        for order, (id, path) in enumerate(paths.items()):
            forward = torch_norm if path == "norm" else same_forward
            stack.enter_context(registered(path, forward, id=id, order=order))
        yield timed


def same_forward(self, *args):
    return type(self).forward(self, *args)


def test_what_is_not_faster_is_taken_out_of_the_middle(monkeypatch):
    model, batch = make_model(), make_batch()
    before = state_of(model)
    ratios = {"first": 0.5, "second": 1.2, "third": 0.9}
    with three_fixes(ratios, monkeypatch) as timed:
        fixed = nearpeak.fix(model, *batch, only=list(ratios))
        statuses = {each.id: (each.status, each.speed.ratio) for each in fixed.report.fixes}
        assert statuses == {"first": ("kept", 0.5), "second": ("rolled back", 1.2), "third": ("kept", 0.9)}
        assert timed == [[(0, 1), (1, 2), (2, 3), (0, 3)], [(0, 2)]]
        assert [site.path for site in fixed.report.replaced()] == ["norm", "attention"]
        assert [path for path, part in model.named_modules() if "forward" in vars(part)] == ["norm", "attention"]
    fixed.undo()
    assert state_of(model) == before


def test_the_first_of_the_turns_need_not_be_measured_again(monkeypatch):
    ratios = {"first": 0.9, "second": 1.2, "third": 1.0}
    with three_fixes(ratios, monkeypatch) as timed:
        report = nearpeak.fix(make_model(), *make_batch(), only=list(ratios)).report
    assert len(timed) == 1
    assert report.speed is not None
    assert report.speed.ratio == 0.9


def test_a_fused_optimizer_of_channels_last_weights_is_right(faster):
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = ["channels-last", "fused-optimizer"]
    report = nearpeak.fix(model, images, optimizer=optimizer, only=ids).report
    assert [(each.id, each.status, each.why) for each in report.fixes] == [(id, "kept", "") for id in ids]


def test_a_fix_of_the_same_place_is_tried_when_the_first_one_is_not_faster(monkeypatch):
    """A foreach optimizer, where a fused one does not help."""
    verdicts = iter([1.3, 0.5])
    monkeypatch.setattr(
        engine, "time_in_turns", lambda step, way, pairs, device, **_: {pairs[0]: speed(next(verdicts))}
    )
    model, batch = make_model(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = ["fused-optimizer", "foreach-optimizer"]
    report = nearpeak.fix(model, *batch, optimizer=optimizer, only=ids).report
    assert [(each.id, each.status) for each in report.fixes] == [(ids[0], "rolled back"), (ids[1], "kept")]
    assert optimizer.param_groups[0]["foreach"] is True
    assert not optimizer.param_groups[0]["fused"]


def test_a_fix_whose_step_fails_when_it_is_measured_is_rolled_back(monkeypatch):
    """It is right on a part of the batch."""

    def failing(self, tokens, mask=None):
        if tokens.shape[1] > 128 and torch.is_grad_enabled():
            raise RuntimeError("too long")
        return type(self).forward(self, tokens, mask)

    model, batch = make_model(), make_batch(rows=2, length=150)
    with registered("", failing) as id:
        report = nearpeak.fix(model, *batch, only=[id]).report
    assert report.fixes[0].why.endswith("RuntimeError: too long")
    assert report.fixes[0].status == "rolled back"
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_a_fixed_model_can_be_copied_and_trained(faster):
    model, batch = make_model(), make_batch()
    with registered("norm", torch_norm) as id, nearpeak.fixed(model, *batch, only=[id]):
        copied = copy.deepcopy(model)
        assert torch.equal(copied(*batch), model(*batch))
        copied(*batch).sum().backward()
        assert copied.norm.weight.grad is not None
        assert model.norm.weight.grad is None


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A process group of this process alone."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the group replaces, and does not put back
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_fixed_model_trains_under_ddp(faster, world):
    torch.manual_seed(0)
    model, batch = make_model(), make_batch()
    parallel = nn.parallel.DistributedDataParallel(model)
    with registered("norm", torch_norm) as id, nearpeak.fixed(parallel, *batch, only=[id]) as fixed:
        assert fixed.report.fixes[0].status == "kept"
        parallel(*batch).sum().backward()
        gradient = model.norm.weight.grad.clone()
    model.zero_grad()
    parallel(*batch).sum().backward()
    torch.testing.assert_close(model.norm.weight.grad, gradient)


class Adapter(nn.Module):
    """A linear layer with an update of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Checkpointed(Model):
    def forward(self, tokens, mask=None):
        x = self.embedding(tokens)
        x = x + checkpoint(self.attention, self.norm(x), mask, use_reentrant=False)
        return self.head(x + checkpoint(self.mlp, x, use_reentrant=False))


def test_a_fix_of_a_model_with_adapters_checkpoints_and_hooks(faster):
    torch.manual_seed(0)
    model, batch, seen = Checkpointed(), make_batch(), []
    model.mlp.gate, model.mlp.up = Adapter(model.mlp.gate), Adapter(model.mlp.up)
    model.mlp.gate.base_layer.register_forward_hook(lambda *_: seen.append("gate"))
    keys = list(model.state_dict())

    def gradients():
        model.zero_grad()
        model(*batch).sum().backward()
        return [each.grad for each in model.parameters() if each.requires_grad]

    expected = gradients()
    seen.clear()
    with registered("mlp", same_forward) as id, nearpeak.fixed(model, *batch, only=[id]) as fixed:
        assert fixed.report.fixes[0].status == "kept"
        seen.clear()
        torch.testing.assert_close(gradients(), expected)
        assert seen == ["gate", "gate"]  # again in the backward pass
        assert list(model.state_dict()) == keys
