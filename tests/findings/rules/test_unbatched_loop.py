"""Items that a loop handles one at a time, in the ways that people write it; and loops that are none of these."""

import dataclasses
from pathlib import Path

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from nearpeak.findings.rules.unbatched_loop import unbatched_loop
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.memory import PeakMemory

ITEMS, ROWS, WIDTH = 12, 16, 32
RULE = "unbatched-loop"


def appended():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, ITEMS, WIDTH)

    def step():
        out = []
        for k in range(ITEMS):
            out.append(torch.relu(layer(x[:, k])))
        torch.stack(out).sum().backward()

    return step


def summed():
    scores, wanted = torch.randn(ITEMS, ROWS), torch.rand(ITEMS, ROWS)

    def step():
        loss, count = 0.0, 0
        for image in range(ITEMS):
            loss += functional.binary_cross_entropy_with_logits(scores[image], wanted[image], reduction="sum")
            count += (wanted[image] > 0.5).sum()
        return loss / count

    return step


def selected():
    """The number of rows differs from item to item, and nobody knows it before."""
    x, kept = torch.randn(ITEMS, ROWS, WIDTH), torch.rand(ITEMS, ROWS) > 0.3

    def step():
        means = []
        for rows, mask in zip(x, kept, strict=True):
            means.append(rows[mask].square().mean(0))
        return torch.stack(means)

    return step


def by_a_generator():
    weight, x = torch.randn(WIDTH, WIDTH), torch.randn(ITEMS, ROWS, WIDTH)

    def one(item):
        return torch.softmax(item @ weight, -1)

    def step():
        return torch.cat([y[:1] for y in (one(item) for item in x)])

    return step


def into_a_buffer():
    x = torch.randn(ITEMS, ROWS, WIDTH)

    def step():
        out = torch.empty(ITEMS, ROWS, WIDTH)
        for number, item in enumerate(x):
            out[number] = (item - item.mean()) / item.std()
        return out

    return step


def in_place():
    x = torch.randn(ITEMS, ROWS, WIDTH)

    def step():
        for number in range(ITEMS):
            x[number] = x[number].flip(0) * 0.5
        return x.sum()

    return step


def a_layer_for_each():
    heads, x = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(ITEMS)), torch.randn(ROWS, WIDTH)

    def step():
        sum(y.square().mean() for y in [head(x) for head in heads]).backward()

    return step


def by_map():
    weight, x = torch.randn(WIDTH, WIDTH), torch.randn(ITEMS, ROWS, WIDTH)

    def one(item):
        return torch.softmax(item @ weight, -1)[:1]

    def step():
        for _ in range(1):  # a loop around it, as around every step
            scaled = x * 2
            out = torch.cat(list(map(one, scaled)))
        return out

    return step


@pytest.mark.parametrize(
    "build", [by_map, appended, summed, selected, by_a_generator, into_a_buffer, in_place, a_layer_for_each]
)
def test_items_in_a_loop_are_one_finding(build):
    step = examined(build, live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    wastes = list(unbatched_loop(step))
    assert wastes
    assert sum(len(waste.gone) for waste in wastes) > (ITEMS - 1) * len(step.ops) / ITEMS / 2
    saved_s = sum(sum(waste.gains.values()) for waste in wastes)
    assert saved_s > 0.6 * step.profile.kernel_s
    claimed = {index for waste in wastes for index in waste.gains}
    others = [item for item in found_in(step) if item.rule not in (RULE, "partly-used") and set(item.ops) & claimed]
    assert not others  # one waste is one finding; of some results a part is used


def layers():
    blocks, x = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ITEMS)), torch.randn(ROWS, WIDTH)

    def step():
        h = x
        for block in blocks:
            h = h + torch.relu(block(h))
        h.sum().backward()

    return step


def recurrence():
    x, transitions = torch.randn(ROWS, ITEMS, WIDTH), torch.randn(WIDTH, WIDTH)

    def step():
        alpha = x[:, 0]
        for t in range(1, ITEMS):
            alpha = torch.logsumexp(alpha[:, :, None] + transitions, 1) + x[:, t]
        return alpha

    return step


def read_by_the_next():
    x = torch.randn(ITEMS, ROWS)

    def step():
        total, taken = torch.zeros(()), []
        for row in x:
            total = total + row.sum().abs()
            if total.item() > 1e9:
                break
            taken.append(row.exp())
        return taken

    return step


def gradients_accumulated():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ITEMS, ROWS, WIDTH)

    def step():
        for part in x:
            layer(part).square().mean().backward()

    return step


def sizes_of_a_pyramid():
    head = nn.Conv2d(4, 4, 3, padding=1)
    levels = [torch.randn(1, 4, 4 * size, 4 * size) for size in (8, 6, 4, 2, 1)]

    def step():
        return [head(level).relu() for level in levels]

    return step


def three_terms():
    x = torch.randn(3, ROWS)

    def step():
        return sum(row.exp().sum() for row in x)

    return step


@pytest.mark.parametrize(
    "build", [layers, recurrence, read_by_the_next, gradients_accumulated, sizes_of_a_pyramid, three_terms]
)
def test_loops_that_cannot_be_one_op_are_left_alone(build):
    step = examined(build, live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    assert not list(unbatched_loop(step))


@pytest.mark.parametrize(("capacity", "is_found"), [(1e9, True), (2.5e5, False)])
def test_gradients_are_added_up_part_by_part_only_where_memory_is_short(capacity, is_found):
    step = examined(gradients_accumulated, live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    memory = PeakMemory(
        device="cpu",
        capacity_bytes=capacity,
        peak_bytes=2e5,
        parameters_bytes=0.0,
        gradients_bytes=0.0,
        optimizer_bytes=0.0,
        activations_bytes=2e5,
    )
    step = dataclasses.replace(step, profile=dataclasses.replace(step.profile, memory=memory))
    wastes = list(unbatched_loop(step))
    assert bool(wastes) == is_found
    for waste in wastes:
        sums = {gradient.op for gradient in step.trace.gradients if step.ops[gradient.op].packet == "aten.add_"}
        assert sums and all(waste.gains[index] == step.time(index) for index in sums)  # none is needed
        assert "fits in memory" in waste.remedy


@pytest.mark.parametrize("train", [False, True])
def test_what_a_recurrence_computes_from_its_inputs_alone_can_run_before_it(train):
    def build():
        encoder, cell = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)), nn.Linear(WIDTH, WIDTH)
        frames = torch.randn(ROWS, ITEMS, WIDTH)

        def step():
            state = torch.zeros(ROWS, WIDTH)
            for t in range(ITEMS):
                seen = encoder(frames[:, t])
                state = torch.tanh(cell(state) * seen)
            return state.sum().backward() if train else state

        return step

    step = examined(build, live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    (waste,) = unbatched_loop(step)
    inside = [step.ops[index] for index in waste.gains]
    assert {op.source for op in inside} == {waste.source}
    assert {op.packet for op in inside} >= {"aten.addmm", "aten.relu"} | ({"aten.mm"} if train else set())
    assert "before the loop" in waste.remedy


class Rows(Dataset):
    def __init__(self):
        self.codes, self.amounts = torch.arange(64), torch.randn(64, 4)

    def __len__(self):
        return len(self.codes)

    def __getitem__(self, index):
        return self.codes[index], self.amounts[index]  # one row


def test_rows_that_a_loader_fetches_one_at_a_time_are_the_datasets_line():
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    fetched, asked = (
        f"test_unbatched_loop.py:{next(number for number, text in enumerate(lines, 1) if text.endswith(end))}"
        for end in ("# one row", "# the loader")
    )

    def build():
        loader, weight = DataLoader(Rows(), batch_size=32), torch.randn(4, 4)

        def step():
            for _, amounts in loader:  # the loader
                out = amounts @ weight
            return out

        return step

    step = examined(build, live=True)
    stall = IdleCause(cause="input", seconds=1e-2, count=2, where=asked, what="DataLoader")
    profile = dataclasses.replace(step.profile, idle=(stall,), wall_s=step.profile.wall_s + 1e-2)
    (waste,) = unbatched_loop(dataclasses.replace(step, profile=profile))
    assert waste.source == fetched
    assert waste.idle["input"] > 0.8 * stall.seconds
    assert "BatchSampler" in waste.remedy


def test_items_that_fill_the_machine_gain_nothing():
    def build():
        weight, x = torch.randn(4096, 4096), torch.randn(ITEMS, 65536, 4096)

        def step():
            return [item @ weight for item in x]

        return step

    assert not list(unbatched_loop(examined(build)))


def test_the_line_is_that_of_the_loop_where_functions_are_called():
    module = load("unbatched_loop")
    step = examined(lambda: module.waste("cpu"), live=True, times=lambda op, expected: expected and 4e-6)
    (found,) = found_in(step, RULE)
    assert found.source == planted("unbatched_loop")
    assert found.share > 0.8
    assert not found_in(examined(lambda: module.clean("cpu"), live=True), RULE)


def pooled(at_once):
    layer, x = nn.Linear(WIDTH, 512), torch.randn(48, 96, WIDTH)
    lengths = [96 - 2 * (row % 20) for row in range(48)]
    weights = torch.rand(48, 96, 1)

    def step():
        y = layer(x)
        if at_once:
            means = (y * weights).sum(1)
        else:
            means = torch.stack([y[row, :length].mean(0) for row, length in enumerate(lengths)])
        means.square().sum().backward()

    return step


def members_of_an_ensemble(at_once):
    first, weight = nn.Linear(WIDTH, 256), nn.Parameter(torch.randn(ITEMS, 256, 256))
    bias, x = nn.Parameter(torch.randn(ITEMS, 1, 256)), torch.randn(ITEMS, 2048, WIDTH)

    def step():
        y = torch.relu(first(x))
        if at_once:
            y = torch.baddbmm(bias, y, weight)
        else:
            y = torch.stack([y[i] @ weight[i] + bias[i] for i in range(ITEMS)])
        y.square().sum().backward()

    return step


@pytest.mark.parametrize("build", [pooled, members_of_an_ensemble])
def test_gradients_of_parts_are_one_gradient_when_items_are_computed_at_once(build):
    def times(op, expected):
        return expected and max(expected, 2e-6)

    one_by_one, at_once = (examined(lambda at_once=at_once: build(at_once), times=times) for at_once in (False, True))
    saved_s = one_by_one.profile.kernel_s - at_once.profile.kernel_s
    (waste,) = unbatched_loop(one_by_one)
    assert sum(waste.gains.values()) == pytest.approx(saved_s, rel=0.2)


class Attending(nn.Module):
    """A layer of a decoder with a cache, for one position or several."""

    def __init__(self, *, grows):
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(512, 256), nn.Linear(256, 768)
        self.head = nn.Linear(256, 512)
        self.grows = grows
        self.cache = [torch.randn(1, 4, 0 if grows else 64, 64) for _ in range(2)]

    def forward(self, tokens, start, cache):
        new = tokens.shape[1]
        q, k, v = self.qkv(self.embedding(tokens)).view(1, new, 3, 4, 64).permute(2, 0, 3, 1, 4)
        if self.grows:
            cache = [torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True)]
        else:
            for kept, rows in zip(cache, (k, v), strict=True):
                kept[:, :, start : start + new] = rows
        keys, values = (kept[:, :, : start + new] for kept in cache)
        mask = None
        if new > 1:
            mask = torch.arange(start + new) <= torch.arange(start, start + new)[:, None]
        y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.head(y.transpose(1, 2).reshape(1, new, 256)), cache


def known_positions(grows, at_once=False):
    model, tokens = Attending(grows=grows).eval(), torch.randint(512, (1, ITEMS))

    @torch.inference_mode()
    def step():
        cache = model.cache
        if at_once:
            return model(tokens, 0, cache)[0]
        logits = []
        for i in range(ITEMS):
            y, cache = model(tokens[:, i : i + 1], i, cache)
            logits.append(y)
        return torch.cat(logits, 1)

    return step


@pytest.mark.parametrize("grows", [False, True])
def test_positions_that_are_known_before_run_in_one_call_though_they_attend_to_each_other(grows):
    def times(op, expected):
        return expected and max(expected, 3e-6)

    singly, at_once = (
        examined(lambda at_once=at_once: known_positions(grows, at_once), live=True, times=times)
        for at_once in (False, True)
    )
    (waste,) = unbatched_loop(singly)
    assert "positions of a sequence" in waste.title
    assert "mask" in waste.remedy
    assert sum(waste.gains.values()) == pytest.approx(singly.profile.kernel_s - at_once.profile.kernel_s, rel=0.1)
    (found,) = (item for item in found_in(singly) if item.share > 0.3)
    assert found.rule == RULE
    assert not list(unbatched_loop(at_once))


def sampled(how, grows=False):
    """Each token comes from the position before: on the device, or by way of the host."""
    model = Attending(grows=grows).eval()

    @torch.inference_mode()
    def step():
        token, cache, texts = torch.tensor([[3]]), model.cache, []
        for i in range(ITEMS):
            logits, cache = model(token, i, cache)
            token = logits[:, -1:].argmax(-1)
            if how == "number":
                token = torch.tensor([[token.item()]])
            elif how == "array":
                token = torch.from_numpy(logits[:, -1].numpy().argmax(-1)[None])
            elif how == "filled":
                token = torch.full((1, 1), int(logits.numpy().argmax()))
            texts.append(token)
        return texts

    return step


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("how", ["tensor", "number", "array", "filled"])
def test_positions_that_come_from_those_before_need_each_other(how, grows):
    step = examined(lambda: sampled(how, grows), live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    assert not list(unbatched_loop(step))


def checked_until_one_differs():
    model, tokens = Attending(grows=False).eval(), torch.randint(512, (1, ITEMS))

    @torch.inference_mode()
    def step():
        for i in range(ITEMS):
            logits, _ = model(tokens[:, i : i + 1], i, model.cache)
            if logits.argmax().item() == 600:
                break
        return logits

    return step


def sums_of_rows_so_far():
    """No attention: which rows each turn reads is no mask that an op knows."""
    x, kept, weight = torch.randn(ITEMS, 1, WIDTH), torch.zeros(ITEMS, WIDTH), torch.randn(WIDTH, WIDTH)

    def step():
        means = []
        for i in range(ITEMS):
            kept[i : i + 1] = x[i] @ weight
            means.append(kept[: i + 1].mean(0))
        return torch.stack(means)

    return step


@pytest.mark.parametrize("build", [checked_until_one_differs, sums_of_rows_so_far])
def test_what_reads_the_turns_before_in_other_ways_is_left_alone(build):
    step = examined(build, live=True, times=lambda op, expected: expected and max(expected, 3e-6))
    assert not [waste for waste in unbatched_loop(step) if "one at a time" in waste.title]
