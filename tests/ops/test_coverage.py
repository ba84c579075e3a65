"""Every operator that usual models dispatch in a training step has a formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from nearpeak.ops.cost import cost_of

PRODUCTS = ("matrix", "convolution", "attention", "recurrent")
"""Families whose float32 products run on the vector units where tf32 is not allowed."""

HIDDEN_WRITES = {"aten.native_batch_norm": ("running_mean", "running_var")}
"""Arguments that an operator writes although its schema does not say so."""


class Attention(nn.Module):
    """A pre-norm block with rotary positions, grouped heads and a gated MLP, as in today's language models."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.pair = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        batch, length, width = x.shape
        size = width // self.heads
        normed = self.norm(x)
        query = self._rotate(self.query(normed).view(batch, length, self.heads, size).transpose(1, 2))
        key, value = self.pair(normed).view(batch, length, 2, self.heads // 2, size).permute(2, 0, 3, 1, 4)
        key, value = (item.repeat_interleave(2, 1) for item in (self._rotate(key), value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.after(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _rotate(self, x):
        half = x.shape[-1] // 2
        frequencies = 1.0 / 10000.0 ** (torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), frequencies)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class ExplicitAttention(nn.Module):
    """Attention by products and a softmax, with a mask, a relative bias and dropout."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(8, 4)
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        length = x.shape[1]
        query, key, value = self.project(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(length)
        distance = (places[None] - places[:, None]).abs().clamp(max=7)
        scores = query @ key.transpose(-1, -2) / 2.0 + self.bias(distance).permute(2, 0, 1)
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = functional.dropout(scores.softmax(-1, dtype=torch.float32), 0.1).to(query.dtype)
        return torch.einsum("bhqk,bhkd->bqhd", weights, value).flatten(2)


class Experts(nn.Module):
    """Tokens routed to two of four experts, gathered, computed and added back."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        tokens = x.reshape(-1, 16)
        weights, chosen = torch.topk(functional.softmax(self.router(tokens), dim=-1, dtype=torch.float), 2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(tokens)
        counts = torch.zeros(4).scatter_add_(0, chosen.view(-1), torch.ones(chosen.numel()))
        routed = torch.zeros(len(tokens), 4).scatter(1, chosen, weights)
        mask = functional.one_hot(chosen, 4).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            rank, token = torch.where(mask[number])
            result.index_add_(0, token, expert(tokens[token]) * weights[token, rank, None])
        order = chosen.view(-1).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        sorted_tokens = tokens[order // 2].index_select(0, back)
        extra = (routed.mean(0) * counts / counts.sum()).sum() + sorted_tokens.square().mean()
        return result.view_as(x) + extra + routed.gather(1, chosen[:, :1]).view(*x.shape[:2], 1)


class UNet(nn.Module):
    """Down, up and across, with group norm, time embedding, nearest and bilinear resizing."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.time, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)
        self.up, self.last = (
            nn.ConvTranspose2d(8, 8, 2, stride=2),
            nn.Conv2d(16, 3, 3, padding=1, padding_mode="reflect"),
        )

    def forward(self, x):
        first = functional.silu(self.norm(self.first(x)))
        angle = torch.arange(len(x))[:, None] * torch.exp(-torch.arange(4) / 4.0)
        low = self.down(first) + self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        low = functional.interpolate(functional.avg_pool2d(low, 2), scale_factor=2.0, mode="nearest")
        high = functional.interpolate(self.up(low), size=first.shape[-2:], mode="bilinear")
        return self.last(functional.pad(torch.cat([high, first], 1), (1, 1, 0, 0)))


class Scan(nn.Module):
    """A selective scan as state-space models write it without their kernels."""

    def __init__(self):
        super().__init__()
        self.project, self.mix = nn.Linear(16, 32), nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.decay, self.step = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        inner, gate = self.project(x).chunk(2, -1)
        inner = functional.silu(self.mix(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step = functional.softplus(inner + self.step)
        decays = torch.cumsum(step * -torch.exp(self.decay), 1)
        segments = (decays[:, :, None] - decays[:, None]).tril().exp()
        return torch.einsum("bijd,bjd->bid", segments, inner * step) * torch.sigmoid(gate)


class Recurrent(nn.Module):
    """LSTM, GRU and a plain recurrence."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True), nn.RNN(16, 16)]
        )

    def forward(self, x):
        for part in self.parts:
            x, _ = part(x)
        return x


def sequence():
    """Two sequences of six tokens of width 16."""
    return torch.randn(2, 6, 16)


def image():
    """Two small images."""
    return torch.randn(2, 3, 16, 16)


def language_model():
    """Embedding, blocks and cross-entropy; the table is the head too."""
    table, block, position = nn.Embedding(32, 16, padding_idx=0), Attention(), nn.Embedding(6, 16)
    model = nn.ModuleList([table, block, position])
    ids = torch.randint(0, 32, (2, 6))

    def loss():
        hidden = block(table(ids) + position(torch.arange(6)))
        logits = functional.linear(hidden, table.weight)
        return functional.cross_entropy(logits[:, :-1].reshape(-1, 32), ids[:, 1:].reshape(-1), ignore_index=-100)

    return model, loss


def simple(model, data, **options):
    """A model and the mean of its squared outputs as a loss."""

    def loss():
        output = model(data, **options)
        return functional.mse_loss(output, torch.zeros_like(output))

    return model, loss


def checkpointed():
    """A block that is computed again in the backward."""
    model, data = Attention(), sequence().requires_grad_()
    return model, lambda: checkpoint(model, data, use_reentrant=False).sum()


def autocast():
    """A block under automatic mixed precision."""
    model, data = Attention(), sequence()

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(data).float().pow(2).mean()

    return model, loss


def vision():
    """Patches, a class token and a classifier."""
    patch, encoder = nn.Conv2d(3, 16, 4, stride=4), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
    token = nn.ParameterList([torch.zeros(1, 1, 16)])
    data, labels = image(), torch.tensor([1, 2])

    def loss():
        tokens = patch(data).flatten(2).transpose(1, 2)
        tokens = encoder(torch.cat([token[0].expand(2, -1, -1), tokens], 1))
        return functional.cross_entropy(head(tokens[:, 0]), labels, label_smoothing=0.1)

    return nn.ModuleList([patch, encoder, head, token]), loss


def contrastive():
    """Two towers, normalized, with a temperature and losses of several kinds."""
    left, right = nn.Linear(16, 8), nn.Linear(16, 8)
    scale = nn.ParameterList([torch.tensor(2.0)])
    data = sequence()[:, 0]

    def loss():
        a, b = functional.normalize(left(data), dim=-1), functional.normalize(right(data), dim=-1)
        logits = scale[0].exp().clamp(max=100) * a @ b.t()
        pairs = torch.arange(2)
        other = functional.binary_cross_entropy_with_logits(logits, torch.eye(2))
        softened = functional.kl_div(logits.log_softmax(-1), torch.eye(2), reduction="batchmean")
        near = functional.smooth_l1_loss(a, b) + functional.l1_loss(a, b) + functional.huber_loss(a, b)
        likely = functional.nll_loss(logits.log_softmax(-1), pairs)
        return functional.cross_entropy(logits, pairs) + other + softened + near + likely

    return nn.ModuleList([left, right, scale]), loss


def decoder():
    """Encoder and decoder with cross attention."""
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    source, target = sequence(), sequence()
    return model, lambda: model(source, target, tgt_mask=mask).mean()


def convolutions():
    """Batch norm, pooling of three kinds, depth-wise convolution and dropout."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 7, padding=3, groups=8),
        nn.GELU(),
        nn.Dropout2d(0.1),
        nn.AvgPool2d(2),
        nn.Hardswish(),
        nn.LeakyReLU(),
        nn.ELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.PixelShuffle(2),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 4),
        nn.Tanh(),
    )
    return simple(model, image())


CASES = {
    "attention": lambda: simple(Attention(), sequence()),
    "explicit attention": lambda: simple(ExplicitAttention(), sequence()),
    "language model": language_model,
    "encoder": lambda: simple(nn.TransformerEncoderLayer(16, 4, 32, activation="gelu"), sequence()),
    "decoder": decoder,
    "vision transformer": vision,
    "contrastive": contrastive,
    "experts": lambda: simple(Experts(), sequence()),
    "convolutions": convolutions,
    "u-net": lambda: simple(UNet(), image()),
    "scan": lambda: simple(Scan(), sequence()),
    "recurrent": lambda: simple(Recurrent(), sequence()),
    "checkpointed": checkpointed,
    "autocast": autocast,
    "one-dimensional": lambda: simple(nn.Sequential(nn.Conv1d(6, 8, 3), nn.InstanceNorm1d(8), nn.GLU()), sequence()),
}

OPTIMIZERS = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
    "amsgrad": {"foreach": True, "amsgrad": True},
}


def step(loss, optimizer, parameters):
    """Forward, backward, clipping and the optimizer's step."""
    loss().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def missing(ops):
    """Packets without a formula."""
    return sorted({op.packet for op in ops if cost_of(op).model != "formula"})


def too_much(ops):
    """Ops that are charged more than all of their operands."""
    found = []
    for op in ops:
        names = (*op.mutated, *HIDDEN_WRITES.get(op.packet, ()))
        written = [*op.outputs, *tree_leaves([op.arguments[name] for name in names])]
        work = cost_of(op).work
        if work.bytes_read > sum(tensor.bytes for tensor in {*op.inputs}) or work.bytes_written > sum(
            tensor.bytes for tensor in {tensor for tensor in written if tensor is not None}
        ):
            found.append((op.name, work))
    return found


def too_intense(ops):
    """Ops without products that do so much per byte that the rate of their arithmetic would matter.

    An H200 does 14 float32 operations in the time of one byte, and twice as many in half precision. A bound by the
    arithmetic of such ops would hang on how it is done, and on the dtype: there must be none.
    """
    work = ((op, cost_of(op).work) for op in ops if cost_of(op).family not in PRODUCTS)
    return [op.name for op, cost in work if sum(cost.vector_flops.values()) > 7 * cost.bytes]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_training_step_has_formulas_for_all_that_it_dispatches(dispatched, name):
    torch.manual_seed(0)
    model, loss = CASES[name]()
    parameters = list(model.parameters())
    ops = dispatched(step, loss, torch.optim.AdamW(parameters), parameters)
    assert len(ops) > 20
    assert any("backward" in op.name for op in ops)
    assert missing(ops) == []
    assert too_much(ops) == []
    assert too_intense(ops) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_have_formulas(dispatched, name):
    model, loss = simple(nn.Linear(16, 4), sequence())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, **OPTIMIZERS[name])
    for _ in range(2):
        ops = dispatched(step, loss, optimizer, parameters)
        assert missing(ops) == []
        assert too_much(ops) == []


@pytest.mark.filterwarnings("ignore:TF32")
def test_a_recurrence_that_no_library_runs_has_formulas(dispatched):
    model, loss = simple(Recurrent(), sequence())
    parameters = list(model.parameters())
    with torch.backends.mkldnn.flags(enabled=False):
        ops = dispatched(step, loss, torch.optim.AdamW(parameters), parameters)
    assert not any("rnn" in op.name for op in ops)
    assert missing(ops) == []
    assert too_much(ops) == []


@pytest.mark.filterwarnings("ignore")
def test_attention_by_the_math_backend_has_formulas(dispatched):
    model, loss = simple(Attention(), sequence())
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        assert missing(dispatched(step, loss, torch.optim.AdamW(parameters), parameters)) == []


def test_generation_has_formulas(dispatched):
    cache, logits = torch.zeros(1, 8, 16), torch.randn(1, 32)

    @torch.no_grad()
    def generate():
        cache[:, 3:4] = torch.ones(1, 1, 16)
        cache.index_copy_(1, torch.tensor([4]), torch.ones(1, 1, 16))
        kept = logits.masked_fill(logits < torch.topk(logits, 4)[0][..., -1:], -float("inf"))
        ordered, places = torch.sort(kept, descending=True)
        removed = ordered.softmax(-1).cumsum(-1) > 0.9
        removed = removed.scatter(1, places, removed)
        torch.multinomial(kept.softmax(-1), 1)
        torch.cat([torch.zeros(1, 3), logits.argmax(-1, keepdim=True)], -1)

    assert missing(dispatched(generate)) == []
