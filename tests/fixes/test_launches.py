"""Calls that are replayed: recorded by a stand-in for CUDA graphs that executes what was recorded."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import nearpeak
from nearpeak.fixes import engine
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns import launches
from nearpeak.fixes.patterns.launches import graphed_forward
from tests.fixes.models import registered, speed


class Recording(TorchDispatchMode):
    """Executes operators, notes them, and undoes what they wrote to tensors that were there before."""

    def __init__(self):
        super().__init__()
        self.ops, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func._schema.is_mutable:
            self.before.append((args[0], args[0].clone()))
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.ops:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def recorded(monkeypatch):
    """How many calls were recorded."""
    made = []

    def capture(call, pool):
        made.append(Recording())
        with made[-1]:
            output = call()
        for tensor, value in reversed(made[-1].before):
            tensor.copy_(value)
        return made[-1].replay, output, pool

    monkeypatch.setattr(launches, "capture", capture)
    monkeypatch.setattr(launches, "can_capture", lambda device: True)
    monkeypatch.setattr(launches, "FEWEST_OPERATORS", 2)
    return made


class StaticCache:
    def __init__(self, rows=2, longest=12):
        self.keys = torch.zeros(rows, longest, 4)
        self.length = torch.zeros((), dtype=torch.long)


class Decoder(nn.Module):
    """Attends to what its cache holds, which it writes to in place."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens, cache=None, scale=1.0):
        x = self.embedding(tokens) * scale  # [rows, 1, 4]
        if cache is not None:
            cache.keys.index_copy_(1, cache.length[None], x)
            cache.length.add_(1)
            seen = torch.arange(cache.keys.shape[1]) < cache.length
            x = (cache.keys * seen[None, :, None]).sum(1, keepdim=True) / cache.length
        return {"logits": self.head(x), "cache": cache, "note": None}


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


@contextlib.contextmanager
def graphed(model):
    edits = Edits()
    edits.set_forward(model, graphed_forward(model))
    try:
        with torch.no_grad():
            yield next(iter_graphs(model))
    finally:
        edits.undo()


def iter_graphs(model):
    graphs = model.forward.__func__.graphs
    graphs[model] = launches.CallGraphs()
    yield graphs[model]


def generate(model, cache, count=8):
    tokens = torch.tensor([[1], [2]])
    logits = []
    for _ in range(count):
        output = model(tokens, cache=cache)
        assert output["cache"] is cache
        logits.append(output["logits"])
        tokens = output["logits"].argmax(-1)
    return torch.stack(logits)


def test_a_loop_with_a_static_cache_is_replayed(recorded, decoder):
    with torch.no_grad():
        expected = generate(decoder, StaticCache())
    with graphed(decoder) as graphs:
        first = StaticCache()
        assert torch.equal(generate(decoder, first), expected)
        assert len(recorded) == 1
        assert int(first.length) == 8
        # another cache has other memory: it is recorded at once, since the form is known
        assert torch.equal(generate(decoder, StaticCache()), expected)
        assert len(recorded) == 2
        copied = copy.deepcopy(decoder)
        assert torch.equal(generate(copied, StaticCache()), expected)
        assert len(recorded) == 3
        assert graphs.refusals() == []


def test_outputs_are_not_overwritten_by_later_calls(recorded, decoder):
    with graphed(decoder):
        outputs = [decoder(torch.tensor([[number], [0]]))["logits"] for number in range(5)]
    assert len(recorded) == 1
    for number, output in enumerate(outputs):
        torch.testing.assert_close(output, decoder(torch.tensor([[number], [0]]))["logits"])


def test_other_shapes_settings_and_modes_are_other_calls(recorded, decoder):
    tokens = torch.tensor([[1], [2]])
    with graphed(decoder):
        for _ in range(3):
            decoder(tokens)
        for other in (tokens[:1], tokens.repeat(2, 1)):
            torch.testing.assert_close(decoder(other)["logits"], Decoder.forward(decoder, other)["logits"])
        torch.testing.assert_close(
            decoder(tokens, scale=2.0)["logits"], Decoder.forward(decoder, tokens, scale=2.0)["logits"]
        )
        assert len(recorded) == 1
        with torch.enable_grad():
            decoder(tokens)["logits"].sum().backward()
        assert decoder.head.weight.grad is not None


def test_a_model_that_has_changed_is_recorded_again(recorded, decoder):
    tokens, seen = torch.tensor([[1], [2]]), []
    with graphed(decoder):
        for _ in range(4):
            decoder(tokens)
        decoder.head.weight.data = decoder.head.weight.data * 2
        torch.testing.assert_close(decoder(tokens)["logits"], Decoder.forward(decoder, tokens)["logits"])
        decoder.head.register_forward_hook(lambda *args: seen.append(args))
        decoder(tokens)
        assert seen


class Growing(StaticCache):
    pass


class GrowingDecoder(Decoder):
    def forward(self, tokens, cache):
        x = self.embedding(tokens)
        cache.keys = torch.cat([cache.keys, x], 1)
        return {"logits": self.head(cache.keys.mean(1, keepdim=True)), "cache": cache}


class WaitingDecoder(Decoder):
    def forward(self, tokens):
        return self.head(self.embedding(tokens)) * (1 if tokens.sum().item() else 2)


class CountingDecoder(Decoder):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        return self.head(self.embedding(tokens)) * self.calls


@pytest.mark.parametrize(
    ("kind", "cache", "why"),
    [
        (GrowingDecoder, True, "Growing.keys grows from [2, 12, 4] to [2, 13, 4]"),
        (WaitingDecoder, False, "it cannot be recorded: RuntimeError: operation not permitted"),
        (CountingDecoder, False, "a call changes attributes of modules"),
    ],
)
def test_what_cannot_be_replayed_runs_as_it_is(kind, cache, why, recorded):
    torch.manual_seed(0)
    model = kind().eval()
    tokens = torch.tensor([[1], [2]])

    def results():
        model.calls = 0
        given = (Growing(),) if cache else ()
        return [pytree.tree_leaves(model(tokens, *given))[0] for _ in range(4)]

    with torch.no_grad():
        expected = results()
    with graphed(model) as graphs:
        for one, other in zip(results(), expected, strict=True):
            torch.testing.assert_close(one, other)
        assert graphs.refusals()[0].startswith(why)
        model.calls = 0


def test_a_graph_goes_with_its_cache(recorded, decoder):
    with graphed(decoder) as graphs:
        cache = StaticCache()
        generate(decoder, cache)
        (form,) = graphs._forms.values()
        assert form.graphs
        del cache
        gc.collect()
        assert not form.graphs


def test_a_small_cache_is_copied_so_that_another_one_is_replayed(recorded, decoder, monkeypatch):
    monkeypatch.setattr(launches, "MOST_COPIED", 10.0)
    with torch.no_grad():
        expected = generate(decoder, StaticCache())
    with graphed(decoder) as graphs:
        for _ in range(3):
            cache = StaticCache()
            keys = weakref.ref(cache.keys)
            assert torch.equal(generate(decoder, cache), expected)
            assert int(cache.length) == 8
            del cache
            gc.collect()
            assert keys() is None
        assert len(recorded) == 1
        assert torch.equal(generate(decoder, StaticCache(longest=14)), expected)  # it is recorded anew
        assert len(recorded) == 2
        assert graphs.refusals() == []


def test_copied_caches_in_turns_and_written_by_others(recorded, decoder, monkeypatch):
    monkeypatch.setattr(launches, "MOST_COPIED", 10.0)

    def results():
        first, second = StaticCache(), StaticCache()
        kept, logits = first.keys, []
        for number in range(6):
            cache = (first, second)[number % 2]
            logits.append(decoder(torch.tensor([[number], [2]]), cache=cache)["logits"])
            if number == 2:
                second.keys.mul_(2)
            if number == 4:
                first.keys = first.keys.flip(0)
        return torch.stack(logits), first.keys, second.keys, kept

    with torch.no_grad():
        expected = results()
    with graphed(decoder):
        for _ in range(2):
            for one, other in zip(results(), expected, strict=True):
                torch.testing.assert_close(one, other)
    assert len(recorded) == 1


def test_ways_of_a_model_have_graphs_of_their_own(recorded, decoder):
    """A fix that is switched on and off, as it is to be measured, is recorded once each way."""
    tokens = torch.tensor([[1], [2]])
    with graphed(decoder):
        decoder(tokens)
        edits = Edits()
        edits.set_forward(decoder.head, lambda self, x: nn.Linear.forward(self, x) * 2)
        twice = decoder(tokens)["logits"]
        for _ in range(3):
            with edits.suspended():
                once = decoder(tokens)["logits"]
            torch.testing.assert_close(decoder(tokens)["logits"], 2 * once)
        torch.testing.assert_close(twice, 2 * once)
        assert len(recorded) == 2


def test_calls_that_always_have_another_cache_are_no_longer_recorded(recorded, decoder):
    with graphed(decoder) as graphs:
        caches = [StaticCache() for _ in range(8)]
        for cache in caches:
            decoder(torch.tensor([[1], [2]]), cache=cache)
        assert len(recorded) == launches.MOST_WASTED + 1
        assert graphs.refusals() == ["every call has other objects"]


@pytest.fixture
def faster(monkeypatch):
    monkeypatch.setattr(engine, "time_in_turns", lambda step, way, pairs, device, **_: dict.fromkeys(pairs, speed(0.5)))


def test_the_fix_is_proven_on_calls_in_a_row(recorded, decoder, faster):
    tokens = torch.tensor([[1], [2], [3]])
    fixed = nearpeak.fix(decoder, tokens, only=["cuda-graphs"], trains=False)
    (fix,) = fixed.report.fixes
    assert fix.status == "kept"
    assert any("4 calls in a row" in error.what for error in fix.errors)
    assert recorded
    fixed.undo()
    assert "forward" not in vars(decoder)


def test_a_wrong_recording_is_seen(recorded, decoder, faster, monkeypatch):
    """It leaves out the product, whose result stays that of the first call."""
    right = launches.capture

    def wrong(call, pool):
        replay, output, pool = right(call, pool)
        recorded[-1].ops = [each for each in recorded[-1].ops if each[0] is not torch.ops.aten.addmm.default]
        return replay, output, pool

    monkeypatch.setattr(launches, "capture", wrong)
    report = nearpeak.fix(decoder, torch.tensor([[1], [2], [3]]), only=["cuda-graphs"], trains=False).report
    assert report.fixes[0].why.startswith("wrong: output")


def test_a_cache_that_grows_is_said_to(recorded):
    torch.manual_seed(0)
    model = GrowingDecoder().eval()
    report = nearpeak.fix(model, torch.tensor([[1], [2]]), Growing(), only=["cuda-graphs"], trains=False).report
    (site,) = report.sites
    assert site.status == "skipped"
    assert site.why.endswith("Growing.keys grows from [2, 12, 4] to [2, 13, 4]")


class Generator(GrowingDecoder):
    """Generates as models of transformers do, with a setting for a cache that does not grow."""

    def __init__(self):
        super().__init__()
        self.generation_config = type("GenerationConfig", (), {})()
        self.generation_config.cache_implementation = None
        self.generation_config.disable_compile = False
        self.lie = 0

    def forward(self, tokens, cache):
        if isinstance(cache, Growing):
            return super().forward(tokens, cache)
        output = Decoder.forward(self, tokens, cache)
        return {**output, "logits": output["logits"] + self.lie}

    def generate(self, input_ids, attention_mask, max_new_tokens, min_new_tokens, do_sample):
        is_static = self.generation_config.cache_implementation == "static"
        rows = len(input_ids)
        cache = StaticCache(rows, 64) if is_static else Growing(rows, 0)
        self.noted = 3
        tokens, made = input_ids[:, :1], []
        for number in range(max_new_tokens):
            logits = self(tokens, cache)["logits"]
            tokens = logits.argmax(-1) if number else input_ids[:, 1:2]
            made.append(tokens)
        return torch.cat([input_ids, *made], 1)


def test_generation_with_a_growing_cache_gets_a_static_one(recorded, faster):
    torch.manual_seed(0)
    model = Generator().eval()
    cache, tokens = Growing(), torch.tensor([[1], [2]])
    fixed = nearpeak.fix(model, tokens, cache, only=["static-cache"], trains=False)
    (fix,) = fixed.report.fixes
    assert fix.status == "kept"
    assert [error.fixed for error in fix.errors if "loop" in error.what] == [0.0]
    assert fix.speed.before_s == fixed.report.speed.before_s == 1.0 / launches.LOOP_TOKENS  # of one call of the loop
    assert model.generation_config.cache_implementation == "static"
    assert recorded
    assert "noted" not in vars(model)
    fixed.undo()
    assert model.generation_config.cache_implementation is None
    assert "forward" not in vars(model)


def test_other_fixes_are_measured_with_the_static_cache_in_force(recorded, monkeypatch):
    """In the loop, and with one graph for each way."""
    torch.manual_seed(0)
    model = Generator().eval()
    ways, looped = {}, []

    def in_turns(step, way, pairs, device, **_):
        looped.append(pairs)
        for _ in range(2):
            for number in sorted({number for pair in pairs for number in pair}):
                before = len(recorded)
                with way(number):
                    step()
                    is_static = model.generation_config.cache_implementation == "static"
                    ways.setdefault(number, []).append(
                        (is_static, "forward" in vars(model.head), len(recorded) - before)
                    )
        return dict.fromkeys(pairs, speed(0.5))

    monkeypatch.setattr(launches, "MOST_COPIED", 1e6)
    monkeypatch.setattr(engine, "time_in_turns", in_turns)
    with registered("head", lambda self, x: nn.functional.linear(x, self.weight, self.bias)) as id:
        fixed = nearpeak.fix(model, torch.tensor([[1], [2]]), Growing(), only=[id, "static-cache"], trains=False)
    assert [fix.status for fix in fixed.report.fixes] == ["kept", "kept"]
    assert looped == [[(0, 1), (1, 2), (0, 2)]]
    assert [each[:2] for number in range(3) for each in ways[number]] == [
        *[(False, False)] * 2, *[(True, False)] * 2, *[(True, True)] * 2,
    ]  # fmt: skip
    assert [ways[number][1][2] for number in range(3)] == [0, 0, 0]
    assert ways[1][0][2] > 0
    fixed.undo()


def test_a_static_cache_that_gives_other_tokens_is_rolled_back(recorded, faster):
    torch.manual_seed(0)
    model = Generator().eval()
    model.lie = torch.linspace(0, 5, 9).roll(4)
    report = nearpeak.fix(model, torch.tensor([[1], [2]]), Growing(), only=["static-cache"], trains=False).report
    assert report.fixes[0].why.startswith("wrong: results of a loop in float32")
    assert model.generation_config.cache_implementation is None
