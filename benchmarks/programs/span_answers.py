"""Fine-tunes an encoder to mark the span of an answer, and watches the share of exact matches while it trains."""

# cpu: --width 64 --layers 1 --batch-size 16 --length 192 --vocabulary 2000
# cuda: --width 768 --layers 6 --batch-size 32 --length 384

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.spans = nn.Linear(width, 2)

    def forward(self, ids):
        x = self.layers(self.tokens(ids) + self.positions)
        start, end = self.spans(x).unbind(-1)
        return start, end


def best_spans(start_logits, end_logits, longest=30):
    """The best span of each example: its end is at most `longest` after its start."""
    # mend: spans-decoded-in-python
    spans = []
    for start, end in zip(start_logits.tolist(), end_logits.tolist(), strict=True):
        best, span = float("-inf"), (0, 0)
        for i, first in enumerate(start):
            for j in range(i, min(i + longest, len(end))):  # waste: spans-decoded-in-python
                if first + end[j] > best:  # waste: spans-decoded-in-python
                    best, span = first + end[j], (i, j)
        spans.append(span)
    return torch.tensor(spans, device=start_logits.device)
    # instead: length = start_logits.shape[1]
    # instead: scores = start_logits[:, :, None] + end_logits[:, None, :]
    # instead: ones = torch.ones(length, length, dtype=torch.bool, device=scores.device)
    # instead: allowed = ones.triu() & ones.tril(longest - 1)
    # instead: best = scores.masked_fill(~allowed, float("-inf")).flatten(1).argmax(1)
    # instead: return torch.stack([best // length, best % length], dim=1)


def draw(args, device):
    ids = torch.randint(args.vocabulary, (args.batch_size, args.length), device=device)
    start = torch.randint(args.length - 30, (args.batch_size,), device=device)
    end = start + torch.randint(1, 30, (args.batch_size,), device=device)
    return ids, start, end


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=30000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Encoder(args.vocabulary, args.width, args.layers, args.length).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)

    matches = torch.zeros((), device=device)
    for step in range(args.steps):
        ids, start, end = draw(args, device)
        start_logits, end_logits = model(ids)
        loss = F.cross_entropy(start_logits, start) + F.cross_entropy(end_logits, end)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        spans = best_spans(start_logits.detach(), end_logits.detach())
        matches += (spans == torch.stack([start, end], dim=1)).all(1).sum()
        if (step + 1) % 20 == 0:
            seen = (step + 1) * args.batch_size
            print(f"step {step + 1}: loss {loss.item():.3f}, exact match {matches.item() / seen:.2%}")
        # step


if __name__ == "__main__":
    main()
