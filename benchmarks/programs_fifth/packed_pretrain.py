"""Pretrain a decoder on short documents of one length that are packed into long rows, with a z-loss on the logits."""

# cpu: --width 96 --layers 2 --batch-size 2 --context 512 --document 64 --vocab 6000
# cuda: --width 768 --layers 6 --batch-size 8 --context 2048 --document 256 --vocab 50304

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        # mend: documents-by-mask
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # waste: documents-by-mask
        # instead: mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Attends within a document only; positions start again with every document."""

    def __init__(self, vocab, width, layers, document, heads=8):
        super().__init__()
        self.document = document
        self.token = nn.Embedding(vocab, width)
        self.place = nn.Parameter(0.02 * torch.randn(document, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens):
        shape = tokens.shape
        # mend: documents-by-mask
        number = torch.arange(shape[1], device=tokens.device) // self.document
        mask = (number[:, None] == number).tril()  # waste: documents-by-mask
        places = self.place.repeat(shape[1] // self.document, 1)
        # instead: mask = None
        # instead: tokens = tokens.reshape(-1, self.document)
        # instead: places = self.place
        x = self.token(tokens) + places
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x)).view(*shape, -1)


def language_loss(logits, targets, weight=1e-4):
    """Cross-entropy, and the squared log of the normalizer that keeps the logits small."""
    logits, targets = logits.float().flatten(0, 1), targets.flatten()
    # mend: normalizer-twice
    entropy = F.cross_entropy(logits, targets)  # waste: normalizer-twice
    normalizer = torch.logsumexp(logits, dim=-1)  # waste: normalizer-twice
    # instead: surprise = F.cross_entropy(logits, targets, reduction="none")
    # instead: normalizer = surprise + logits.gather(1, targets[:, None]).squeeze(1)
    # instead: entropy = surprise.mean()
    return entropy + weight * normalizer.square().mean(), entropy.detach()


class Packer:
    """Rows of whole documents; every document counts up from a start of its own."""

    def __init__(self, vocab, document, device):
        self.vocab, self.document, self.device = vocab, document, device

    def batch(self, rows, context):
        count = rows * context // self.document
        start = torch.randint(0, self.vocab, (count, 1), device=self.device)
        stride = torch.randint(1, 4, (count, 1), device=self.device)
        text = (start + stride * torch.arange(self.document + 1, device=self.device)) % self.vocab
        return text[:, :-1].reshape(rows, context), text[:, 1:].reshape(rows, context)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--document", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=6000)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(args.vocab, args.width, args.layers, args.document).to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    packer = Packer(args.vocab, args.document, device)

    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        tokens, targets = packer.batch(args.batch_size, args.context)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens)
        loss, entropy = language_loss(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} entropy {entropy.item():.4f}")
        # step


if __name__ == "__main__":
    main()
