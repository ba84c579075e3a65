"""Trains a speech recogniser with connectionist temporal classification and checks its error rate now and then."""

# cpu: --width 96 --layers 2 --batch-size 8 --frames 240 --tokens 20
# cuda: --width 512 --layers 8 --batch-size 64 --frames 800 --tokens 60
# block: 20

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvModule(nn.Module):
    def __init__(self, width, kernel=15):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.group = nn.GroupNorm(1, width)
        self.outer = nn.Conv1d(width, width, 1)

    def forward(self, x):
        y = F.glu(self.inner(self.norm(x).transpose(1, 2)), dim=1)
        return self.outer(F.silu(self.group(self.depthwise(y)))).transpose(1, 2)


class Conformer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.conv = ConvModule(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        x = x + self.conv(x)
        return x + self.mlp(self.norm2(x))


class Recognizer(nn.Module):
    def __init__(self, mels, width, layers, heads, vocab, max_frames):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(mels, width, 3, stride=2, padding=1), nn.SiLU(), nn.Conv1d(width, width, 3, padding=1), nn.SiLU()
        )
        self.position = nn.Parameter(0.02 * torch.randn(max_frames // 2, width))
        self.layers = nn.Sequential(*[Conformer(width, heads) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab))

    def forward(self, mel):
        x = self.stem(mel).transpose(1, 2)
        return self.head(self.layers(x + self.position[: x.size(1)]))


def make_speech(count, mels, frames, tokens, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(1, vocab, (count, tokens), generator=generator)
    voices = torch.randn(vocab, mels, generator=generator)
    mel = voices[targets[:, torch.arange(frames) * tokens // frames]].transpose(1, 2).contiguous()
    return mel + 0.3 * torch.randn(mel.shape, generator=generator), targets


def edit_distance(first, second):
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(second, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


@torch.no_grad()
def error_rate(model, mel, targets):
    model.eval()
    with torch.autocast(mel.device.type, dtype=torch.bfloat16, enabled=mel.is_cuda):
        best = model(mel).argmax(-1)
    model.train()
    errors = total = 0
    for path, target in zip(best.cpu(), targets.cpu().tolist(), strict=False):
        path = torch.unique_consecutive(path)
        errors += edit_distance(path[path != 0].tolist(), target)
        total += len(target)
    return errors / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--mels", type=int, default=80)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--frames", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Recognizer(args.mels, args.width, args.layers, args.heads, args.vocab, args.frames)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
    mel, targets = make_speech(args.batch_size * 6, args.mels, args.frames, args.tokens, args.vocab, seed=21)
    mel, targets = mel.to(device), targets.to(device)
    held_mel, held_targets = make_speech(4, args.mels, args.frames, args.tokens, args.vocab, seed=22)
    held_mel = held_mel.to(device)
    frame_lengths = torch.full((args.batch_size,), args.frames // 2)
    token_lengths = torch.full((args.batch_size,), args.tokens)

    for step in range(args.steps):
        first = (step % 6) * args.batch_size
        rows = slice(first, first + args.batch_size)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(mel[rows])
        logps = logits.float().log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(logps, targets[rows], frame_lengths, token_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19 or step == args.steps - 1:
            rate = error_rate(model, held_mel, held_targets)
            print(f"step {step} loss {loss.item():.5f} error rate {rate:.3f}")
        # step


if __name__ == "__main__":
    main()
