"""Trains a transformer that translates the dishes of menus."""

# cpu: --width 128 --heads 4 --layers 2 --batch-size 8 --limit 48 --vocabulary 2048
# cuda: --width 1024 --heads 16 --layers 3 --batch-size 64 --limit 128 --vocabulary 32768
# block: 16

import argparse

import torch
import torch.nn.functional as F
from torch import nn

PAD, START = 0, 1


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, context, mask=None, causal=False):
        q = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(context).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder where it looks at the source too."""

    def __init__(self, width, heads, looks):
        super().__init__()
        self.looks = looks
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        if looks:
            self.norm3 = nn.LayerNorm(width)
            self.across = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask, source=None):
        y = self.norm1(x)
        x = x + (self.attention(y, y, causal=True) if self.looks else self.attention(y, y, mask))
        if self.looks:
            x = x + self.across(self.norm3(x), source, mask)
        return x + self.mlp(self.norm2(x))


class Translator(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width, padding_idx=PAD)
        self.places = nn.Parameter(0.02 * torch.randn(args.limit, args.width))
        self.encoder = nn.ModuleList([Layer(args.width, args.heads, False) for _ in range(args.layers)])
        self.decoder = nn.ModuleList([Layer(args.width, args.heads, True) for _ in range(args.layers)])
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, source, target):
        mask = (source != PAD)[:, None, None]
        x = self.words(source) + self.places[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.norm1(x)
        y = self.words(target) + self.places[: target.shape[1]]
        for layer in self.decoder:
            y = layer(y, mask, x)
        return self.head(self.norm2(y))


class SmoothedLoss(nn.Module):
    """Cross entropy with a target that leaves some chance to all words."""

    def __init__(self, smoothing):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, target):
        # mend: smoothed-by-hand
        chances = logits.float().log_softmax(-1)
        wanted = torch.full_like(chances, self.smoothing / logits.shape[-1])  # waste: smoothed-by-hand
        wanted.scatter_(1, target[:, None], 1 - self.smoothing + self.smoothing / logits.shape[-1])
        wanted.masked_fill_((target == PAD)[:, None], 0.0)
        return -(wanted * chances).sum() / (target != PAD).sum()  # waste: smoothed-by-hand
        # instead: return F.cross_entropy(logits.float(), target, ignore_index=PAD, label_smoothing=self.smoothing)


class Menus:
    """Batches of dishes of like length in two languages, filled up with PAD."""

    def __init__(self, args, device, batches=16):
        shape = (batches, args.batch_size, args.limit)
        # A few dishes have long names; most batches hold none of them.
        typical = torch.rand(batches, 1).square() * 0.6 + 0.2
        lengths = (args.limit * typical * (0.8 + 0.2 * torch.rand(shape[:2]))).long().clamp(min=4)
        self.longest = [-(-int(length) // 8) * 8 for length in lengths.amax(1)]
        inside = torch.arange(args.limit) < lengths[..., None]
        self.source = (torch.randint(2, args.vocabulary, shape) * inside).to(device)
        self.target = (torch.randint(2, args.vocabulary, shape) * inside).to(device)

    def batch(self, number):
        number %= len(self.source)
        # mend: padded-to-the-limit
        longest = self.source.shape[-1]  # waste: padded-to-the-limit
        # instead: longest = self.longest[number]
        return self.source[number, :, :longest], self.target[number, :, :longest]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit", type=int, default=128, help="the longest dish")
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Translator(args)
    criterion = SmoothedLoss(args.smoothing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / args.warmup, (args.warmup / (step + 1)) ** 0.5)
    )
    menus = Menus(args, device)
    for step in range(args.steps):
        source, target = menus.batch(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(source, F.pad(target[:, :-1], (1, 0), value=START))
        loss = criterion(logits.flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}, learning rate {schedule.get_last_lr()[0]:.2e}")
        # step


if __name__ == "__main__":
    main()
