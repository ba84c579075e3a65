"""Fine-tunes a small encoder on intents, with clipped gradients and a log of every step."""

# cpu: --width 128 --layers 3 --batch-size 8 --length 32
# cuda: --width 768 --layers 12 --batch-size 64 --length 128

import argparse
import csv
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_


class IntentModel(nn.Module):
    def __init__(self, vocabulary, width, layers, intents):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, intents)

    def forward(self, ids):
        return self.head(self.encoder(self.tokens(ids)).mean(1))


class Log:
    """A table of the run; rows are written when there are enough."""

    def __init__(self, path, every=50):
        self.path, self.every, self.rows = path, every, []

    def add(self, *row):
        self.rows.append(row)
        if len(self.rows) >= self.every:
            self.write()

    def write(self):
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows([[float(value) for value in row] for row in self.rows])
        self.rows.clear()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intents", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "intents.csv")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = IntentModel(args.vocabulary, args.width, args.layers, args.intents).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    log = Log(args.log)
    ids = torch.randint(args.vocabulary, (2048, args.length), device=device)
    intents = torch.randint(args.intents, (2048,), device=device)

    for step in range(args.steps):
        rows = torch.randint(len(ids), (args.batch_size,), device=device)
        scores = model(ids[rows])
        loss = F.cross_entropy(scores, intents[rows])
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), args.max_norm, error_if_nonfinite=True)  # waste: clipping-that-waits
        # instead: norm = clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        right = (scores.argmax(1) == intents[rows]).float().mean()
        log.add(step, loss.item(), norm.item(), right.item())  # waste: logging-that-waits
        # instead: log.add(step, loss.detach(), norm, right)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, accuracy {right.item():.1%}")
        # step


if __name__ == "__main__":
    main()
