"""A whole text as one step: loops that generate without a cache, against the same model with one."""

import dataclasses

import pytest
import torch
from gpu_steps import H200, examined, found_in
from made_up import slow_cpu
from torch import nn
from torch.nn import functional

from nearpeak.machines.machine import LaunchCost

VOCABULARY, BATCH, PROMPT, TOKENS, WIDTH, HEADS, DEPTH = 50, 2, 60, 8, 64, 4, 2
CPU = slow_cpu(host_call=2e-6)


def written_out(query, key, value, mask):
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def added_mask(query, key, value, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
    scores = scores + torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", functional.softmax(scores, -1), value)


def masked(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def causal(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, is_causal=query.shape[-2] > 1)


def unmasked(query, key, value, mask):
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


class Layer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask, cache):
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if cache is not None:
            if cache:
                key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            cache[:] = key, value
        x = x + self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Text(nn.Module):
    def __init__(self, attend=causal):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(DEPTH))
        self.register_buffer("mask", torch.ones(128, 128, dtype=torch.bool).tril())

    def forward(self, ids, caches=None, start=0):
        x = self.embedding(ids)
        end = start + ids.shape[1]
        for number, layer in enumerate(self.layers):
            x = layer(x, self.mask[start:end, :end], None if caches is None else caches[number])
        return self.head(x)

    @torch.no_grad()
    def generate(self, ids, tokens):
        for _ in range(tokens):
            ids = torch.cat([ids, self(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return ids

    @torch.no_grad()
    def generate_cached(self, ids, tokens):
        caches, new = [[] for _ in self.layers], ids
        for _ in range(tokens):
            token = self(new, caches, ids.shape[1] - new.shape[1])[:, -1].argmax(-1, keepdim=True)
            ids, new = torch.cat([ids, token], 1), token
        return ids


class Encoded(Text):
    """The layers are torch's, which run as one operator each in inference."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, ids, caches=None, start=0):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embedding(ids), mask=mask))


def generating(model, *, cached=False):
    def build():
        torch.manual_seed(0)
        text = model().eval()
        prompt = torch.randint(VOCABULARY, (BATCH, PROMPT))
        return lambda: (text.generate_cached if cached else text.generate)(prompt, TOKENS)

    return build


def step_of(build, machine=CPU):
    shortest = 2e-6 if machine.kind == "cpu" else 4e-6
    return examined(build, live=True, machine=machine, times=lambda op, expected: expected and max(expected, shortest))


@pytest.mark.parametrize(
    "attend", [causal, *(pytest.param(each, marks=pytest.mark.slow) for each in (written_out, added_mask, masked))]
)
def test_what_a_cache_saves_is_predicted(attend):
    step = step_of(generating(lambda: Text(attend)))
    (found,) = found_in(step, "no-kv-cache")
    cached = step_of(generating(lambda: Text(attend), cached=True))
    saved_s = step.profile.wall_s - cached.profile.wall_s
    assert found.saving_s == pytest.approx(saved_s, rel=0.2)
    assert found.source.startswith("test_generation_loops.py:")
    assert f"{PROMPT + 1} queries" in found.evidence and f"{TOKENS - 1} turns" in found.evidence


def test_layers_that_are_one_operator_are_seen():
    (found,) = found_in(step_of(generating(Encoded)), "no-kv-cache")
    assert found.share > 0.5


def test_on_a_gpu_the_launches_of_a_token_remain():
    achievable = dataclasses.replace(H200.achievable, launch=LaunchCost(enqueue=5e-6))
    step = step_of(generating(lambda: Text(written_out)), dataclasses.replace(H200, achievable=achievable))
    assert not found_in(step, "no-kv-cache")  # so small a model takes as many launches with a cache


@pytest.mark.parametrize("build", [generating(Text, cached=True), generating(lambda: Text(unmasked))])
def test_a_cache_and_attention_without_a_mask_are_not_named(build):
    assert not found_in(step_of(build), "no-kv-cache")
