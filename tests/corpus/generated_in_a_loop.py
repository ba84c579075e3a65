"""A whole text is generated in one step, and each turn of the loop runs all of it through the model."""

import torch
from torch.nn import functional

RULE = "no-kv-cache"
DEVICES = ("cpu", "cuda")
VOCABULARY, HEADS, LONGEST = 500, 8, 1024


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x, end, cache, *, is_last):
        query, key, value = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        if cache is not None:
            cache[0][:, :, end - x.shape[1] : end], cache[1][:, :, end - x.shape[1] : end] = key, value
            key, value = cache[0][:, :, :end], cache[1][:, :, :end]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)  # waste
        if is_last:
            x, mixed = x[:, -1:], mixed[:, :, -1:]
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Parameter(torch.randn(LONGEST, width))
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, start=0, caches=None):
        end = start + tokens.shape[1]
        x = self.embedding(tokens) + self.positions[start:end]
        for number, layer in enumerate(self.layers):
            is_last = number == len(self.layers) - 1
            x = layer(x, end, None if caches is None else caches[number], is_last=is_last)
        return self.head(x[:, -1])


def prompted(device):
    torch.manual_seed(0)
    width, depth, batch, length, more = (2048, 4, 64, 512, 8) if device == "cuda" else (256, 2, 16, 64, 6)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(width, depth).to(device).to(dtype).eval()
    return model, torch.randint(VOCABULARY, (batch, length), device=device), more, width, dtype


def waste(device):
    model, prompt, more, _, _ = prompted(device)

    @torch.inference_mode()
    def step():
        tokens = prompt
        for _ in range(more):
            tokens = torch.cat([tokens, model(tokens).argmax(dim=-1, keepdim=True)], dim=1)
        return tokens

    return step


def clean(device):
    model, prompt, more, width, dtype = prompted(device)
    batch, length = prompt.shape
    size = (batch, HEADS, length + more, width // HEADS)
    caches = [[torch.zeros(size, device=device, dtype=dtype) for _ in "kv"] for _ in model.layers]

    @torch.inference_mode()
    def step():
        model(prompt, 0, caches)
        last = prompt[:, -1:]
        for number in range(1, more):
            last = model(last, length + number - 1, caches).argmax(dim=-1, keepdim=True)
        return last

    return step
