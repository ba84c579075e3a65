"""Each new token runs the whole text through the model again, though only the last position is used."""

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

RULE = "no-kv-cache"
DEVICES = ("cpu", "cuda")
HEADS = 16
VOCABULARY = 1000
MORE = 64
"""After so many tokens the text is the prompt again, so that all steps take about as long."""


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x, cache):
        query, key, value = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        start = 0 if cache is None else cache[2]
        if cache is not None:
            cache[0][:, :, start : start + x.shape[1]] = key
            cache[1][:, :, start : start + x.shape[1]] = value
            key, value = (kept[:, :, : start + x.shape[1]] for kept in cache[:2])
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # cuDNN's would plan anew for each length
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=start == 0)  # waste
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[number])
        return self.head(x[:, -1])


def prompted(device):
    torch.manual_seed(0)
    width, depth, batch, length = (2048, 4, 256, 512) if device == "cuda" else (256, 2, 32, 48)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(width, depth).to(device, dtype).eval()
    return model, torch.randint(VOCABULARY, (batch, length), device=device), width, dtype


def waste(device):
    model, tokens, _, _ = prompted(device)
    length = tokens.shape[1]

    @torch.inference_mode()
    def step():
        nonlocal tokens
        tokens = torch.cat([tokens, model(tokens).argmax(dim=-1, keepdim=True)], dim=1)
        if tokens.shape[1] == length + MORE:
            tokens = tokens[:, :length].contiguous()
        return tokens

    return step


def clean(device):
    model, tokens, width, dtype = prompted(device)
    batch, length = tokens.shape
    size = (batch, HEADS, length + MORE, width // HEADS)
    caches = [[torch.zeros(size, device=device, dtype=dtype) for _ in "kv"] + [0] for _ in model.layers]

    def run(new):
        token = model(new, caches).argmax(dim=-1, keepdim=True)
        for cache in caches:
            cache[2] += new.shape[1]
            if cache[2] == length + MORE:
                cache[2] = length
        return token

    with torch.inference_mode():
        last = run(tokens)

    @torch.inference_mode()
    def step():
        nonlocal last
        last = run(last)
        return last

    return step
