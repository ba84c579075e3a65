"""What the recorder remembers of ops that ran before must not be seen in what it records."""

import gc

import pytest
import torch
from torch import nn

from nearpeak.trace import memo
from nearpeak.trace.fake import fake
from nearpeak.trace.recorder import Recorder
from nearpeak.trace.trace import trace


class Attention(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def training(model, batch, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def step():
        model(batch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps = optimizer.state[next(model.parameters())]["step"]
        return None if settings.get("fused") else steps.item()

    return step


def language(**settings):
    return training(Language().to(torch.bfloat16), torch.zeros(2, 8, dtype=torch.long), **settings)


def faked(build):
    with fake():
        return build()


def image():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(8 * 7 * 7, 4)).to(memory_format=torch.channels_last)
    return training(model, torch.zeros(2, 3, 16, 16).to(memory_format=torch.channels_last), foreach=True)


def odd():
    """In place, views of views, results that alias, indices, numbers that differ in type only, complex numbers."""
    x = torch.zeros(6, 4)

    def run():
        found = []
        for _ in range(3):
            y = (x + 1).t()
            y[1].mul_(2)
            y.unsqueeze_(0)
            flipped = torch.view_as_complex(y.contiguous().view(1, 4, 3, 2)).conj()
            found += [flipped.imag.sum(), flipped * 2, x * 2, x * 2.0, x * True, x.long() + 1, x.long() + 1.0]
            found += [x[torch.zeros(3, dtype=torch.long)], x.max(0), torch.split(x, 2), x.expand(2, 6, 4)[:, 1:]]
            torch.add(x, 1, out=(out := torch.empty(0)))
            found += [out, torch.cat([torch.tensor([]), x.flatten()]), torch.arange(5), torch.arange(5.0)]
            found += [torch.zeros(3, dtype=torch.int8), torch.full((2,), 1), torch._foreach_mul([x, y, x], [1.0, 2, 3])]
            found += [torch.tensor(3.0).view(1) + x, torch.tensor([2]).view(1, 1)[0]]
            target = torch.zeros(2)
            target.data = torch.zeros(6)[1:3]
            found.append(target + 1)
        return found

    return run


def inference():
    model = Language().eval()
    ids = torch.zeros(2, 8, dtype=torch.long)

    def run():
        with torch.inference_mode():
            return model(ids), model(ids)

    return run


CASES = {
    "real": lambda: language(foreach=True),
    "fake": lambda: faked(lambda: language(foreach=True)),
    "fused": lambda: faked(lambda: language(fused=True)),
    "one by one": lambda: faked(lambda: language(foreach=False)),
    "image": lambda: faked(image),
    "odd": odd,
    "inference": inference,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_ops_with_and_without_memory(name, monkeypatch):
    run = CASES[name]()
    monkeypatch.setattr(memo, "recipes", {})
    first, second = trace(run), trace(run)  # the second finds everything that the first learnt
    monkeypatch.setattr(memo, "can_memoize", lambda mode: False)
    asked = trace(run)
    assert first == asked
    assert second == asked


def test_most_ops_are_not_asked_of_torch(monkeypatch):
    asked = []
    original = Recorder._run_with_torch

    def count(self, schema, *rest):
        if not schema.query:
            asked.append(schema.name)
        return original(self, schema, *rest)

    monkeypatch.setattr(Recorder, "_run_with_torch", count)
    step = faked(lambda: language(foreach=True))
    trace(step)
    asked.clear()
    recorded = trace(step)
    by_value = {"aten._local_scalar_dense.default", "aten.lift_fresh.default", "aten._foreach_add_.Tensor"}
    assert len(recorded.ops) > 300
    assert set(asked) - by_value == set()


def test_a_result_that_is_not_the_same_is_not_remembered(monkeypatch):
    monkeypatch.setattr(memo, "recipes", {})
    monkeypatch.setattr(memo, "_equivalent", lambda made, result: False)
    trace(lambda x: x + 1, torch.zeros(3))
    assert list(memo.recipes.values()) == [None]


def test_memory_ends_somewhere(monkeypatch):
    monkeypatch.setattr(memo, "recipes", {})
    monkeypatch.setattr(memo, "MAX_SIGNATURES", 3)
    trace(lambda x: [x + number for number in range(10)], torch.zeros(3))
    assert len(memo.recipes) <= 3


def test_an_error_of_an_op_is_raised_each_time():
    def wrong():
        torch.zeros(3).add_(torch.zeros(4))

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            trace(wrong)


def test_results_have_memory_of_their_own_and_versions_of_their_own():
    def run(x):
        first, second = x.view(-1), x.view(-1)
        a, b = x + 1, x + 1
        a.mul_(2)
        assert (first._version, a._version, b._version) == (0, 1, 0)
        assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert all(type(tensor) is not torch.Tensor for tensor in (first, second, a, b))

    for _ in range(2):
        assert len(trace(run, torch.zeros(3, 2)).ops) == 5


def test_code_that_is_compiled_is_recorded():
    compiled = torch.compile(lambda x: (x + 1).relu(), backend="eager")
    assert "aten.relu.default" in [op.name for op in trace(compiled, torch.zeros(3)).ops]


def test_the_garbage_collector_is_left_as_it_was():
    before = gc.get_threshold()

    def run(x):
        assert gc.get_threshold()[0] > before[0]
        return x + 1

    assert len(trace(run, torch.zeros(2)).ops) == 1
    assert gc.get_threshold() == before


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs weights packed by oneDNN")
def test_ops_beside_packed_weights_on_a_cpu_are_not_of_another_host():
    packed = torch.ones(4, 4).to_mkldnn()
    traced = trace(lambda: (packed.to_dense() + 1).relu(), live=True)
    assert {op.origin for op in traced.ops} == {"torch"}
