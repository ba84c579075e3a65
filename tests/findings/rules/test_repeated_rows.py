"""Which layers run on rows that are there several times, and what is left of them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from gpu_steps import as_expected, examined, found_in, with_times
from made_up import slow_cpu
from planted import load, planted
from torch import nn

from nearpeak.trace.trace import trace

NAME = "repeated-rows"


def of(compute, *, layers=None, shape=(4096, 1024), trains=False):
    def build():
        model = (layers or (lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))))()
        x = torch.randn(*shape)

        def step():
            with torch.set_grad_enabled(trains):
                out = compute(model, x)
                loss = (out * torch.rand_like(out)).sum()
            if trains:
                loss.backward()
            return loss.detach()

        return step

    return examined(build)


def test_the_corpus():
    module = load("repeated_rows")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("repeated_rows")
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


WAYS = {
    "interleaved": lambda model, x: model(x.repeat_interleave(8, dim=0)),
    "tiled": lambda model, x: model(x.repeat(8, 1)),
    "expanded": lambda model, x: model(x[:, None].expand(-1, 8, -1).flatten(0, 1)),
    "joined": lambda model, x: model(torch.cat([x] * 8)),
    "picked by repeated indices": lambda model, x: model(
        x.index_select(0, torch.arange(4096).repeat_interleave(8)),
    ),
    "with columns of another repetition of the same rows": lambda model, x: model(
        torch.cat([x[:, :512].repeat_interleave(8, dim=0), x[:, 512:].repeat_interleave(8, dim=0)], dim=-1)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trains", [False, True])
def test_layers_on_repeated_rows(way, trains):
    step = of(WAYS[way], trains=trains)
    (finding,) = found_in(step, NAME)
    products = [i for i, op in enumerate(step.ops) if op.packet == "aten.addmm"]
    assert set(products) <= set(finding.ops)
    assert "repeated 8 times" in finding.title
    in_backward = [i for i, op in enumerate(step.ops) if op.phase == "backward" and op.packet == "aten.mm"]
    assert bool(in_backward) == trains
    assert set(in_backward) <= set(finding.ops)


@pytest.mark.parametrize(
    "compute",
    [
        lambda model, x: model(x),
        lambda model, x: model(x).repeat_interleave(8, dim=0),
        lambda model, x: model((y := x.repeat(8, 1)) + 0.1 * torch.randn_like(y)),
        lambda model, x: model(torch.dropout(x.repeat(8, 1), 0.1, train=True)),
        lambda model, x: model(torch.cat([x.repeat_interleave(2, 0)[:, :512], x.repeat(2, 1)[:, 512:]], -1)),
        lambda model, x: model(torch.cat([x, x.flip(0)])),
        lambda model, x: model(x[:, None].expand(-1, 8, -1).cumsum(1).flatten(0, 1)),
    ],
)
def test_rows_that_differ(compute):
    assert not found_in(of(compute), NAME)


def test_the_line_is_where_the_repeated_rows_enter_the_model():
    def build():
        model, head = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), nn.Linear(512, 4)
        x = torch.randn(1024, 512)

        def embedded(rows):
            hidden = model[0](rows)
            return model[1](hidden)

        @torch.no_grad()
        def step():
            rows = x.repeat_interleave(8, dim=0)
            hidden = embedded(rows)  # here
            return head(hidden + torch.randn_like(hidden))

        return step

    (finding,) = found_in(examined(build, live=True), NAME)
    lines = Path(__file__).read_text().splitlines()
    assert finding.source == f"test_repeated_rows.py:{next(n for n, text in enumerate(lines, 1) if '# here' in text)}"


def test_rows_that_the_step_before_has_repeated():
    """A step that begins with a model: the batch of the next one is made at its end."""
    model, rows = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.randn(1024, 512)
    batches = [rows.repeat_interleave(8, dim=0)]

    @torch.no_grad()
    def step():
        hidden = model(batches[-1])
        batches.append(rows.repeat_interleave(8, dim=0))
        return (hidden + torch.randn_like(hidden)).sum()

    traced = trace(step, live=True, next_step=True)
    (finding,) = found_in(with_times(traced, as_expected), NAME)
    assert "repeated 8 times" in finding.title
    assert finding.share > 0.5
    # A machine without tf32 is told so of the ops of the step itself alone.
    following = dataclasses.replace(
        traced.next_step, ops=tuple(dataclasses.replace(op, tf32_products=True) for op in traced.next_step.ops)
    )
    cpu = with_times(dataclasses.replace(traced, next_step=following), as_expected, machine=slow_cpu())
    assert found_in(cpu, NAME)


def test_the_state_of_an_lstm_and_its_last_result_are_repeated_instead():
    def history(model, x):
        hidden, (state, cell) = model(x.repeat_interleave(100, dim=0))
        return torch.cat([hidden[:, -1], state[-1] + torch.randn_like(cell[-1])], dim=-1)

    step = of(history, layers=lambda: nn.LSTM(16, 256, num_layers=2, batch_first=True), shape=(96, 30, 16))
    (finding,) = found_in(step, NAME)
    assert step.ops[finding.ops[-1]].packet == "aten._cudnn_rnn"
    assert "30 x 16" in finding.evidence


def test_an_encoder_with_attention():
    def build():
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, device="cuda")
        tokens = torch.randn(8, 256, 512, device="cuda")
        return lambda: layer(tokens.repeat_interleave(16, dim=0)).square().sum().backward()

    step = examined(build)
    (finding,) = found_in(step, NAME)
    families = {step.costs[i].family for i in finding.ops}
    assert {"matrix", "attention", "normalization", "pointwise"} <= families
    assert finding.share > 0.5


def test_repeated_keys_alone_do_not_repeat_what_attention_writes():
    def build():
        queries, keys = torch.randn(16, 8, 64, 64, device="cuda"), torch.randn(1, 8, 64, 64, device="cuda")
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(queries, keys.repeat(16, 1, 1, 1), keys.repeat(16, 1, 1, 1))

    assert not found_in(examined(build), NAME)
