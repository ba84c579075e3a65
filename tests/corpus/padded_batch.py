"""Short texts are padded to the longest text that there could be."""

import torch
from torch.nn import functional

RULE = "padded-batch"
DEVICES = ("cpu", "cuda")
HEADS = 8


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x, mask):
        query, key, value = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(
            functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        )
        return x + self.down(functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding = torch.nn.Embedding(5000, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, tokens):
        mask = (tokens != 0)[:, None, None, :]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return x[:, 0]


def built(device, *, trimmed):
    torch.manual_seed(0)
    width, depth, batch, longest, length = (1024, 4, 64, 512, 200) if device == "cuda" else (128, 2, 8, 128, 48)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(width, depth).to(device, dtype).eval()
    tokens = torch.zeros(batch, length if trimmed else longest, dtype=torch.int64)
    for row, size in enumerate(torch.linspace(length // 2, length, batch).long().tolist()):
        tokens[row, :size] = torch.randint(1, 5000, (size,))
    return model, tokens.to(device)


def stepping(device, *, trimmed):
    model, tokens = built(device, trimmed=trimmed)

    def step():
        with torch.no_grad():
            return model(tokens)  # waste

    return step


def waste(device):
    return stepping(device, trimmed=False)


def clean(device):
    return stepping(device, trimmed=True)
