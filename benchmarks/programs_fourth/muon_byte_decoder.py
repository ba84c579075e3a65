"""Train a byte-level decoder with Muon for the weight matrices and AdamW for everything else."""

# cpu: --width 160 --layers 4 --batch-size 16 --context 128
# cuda: --width 1024 --layers 4 --batch-size 32 --context 512
# block: 10

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class ByteDecoder(nn.Module):
    def __init__(self, width, layers, context, heads=4):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def orthogonalize(update, iterations=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update / (update.norm() + 1e-7)
    # mend: gram-of-the-long-side
    for _ in range(iterations):
        gram = x @ x.mT  # waste: gram-of-the-long-side
        x = a * x + (b * gram + c * gram @ gram) @ x  # waste: gram-of-the-long-side
    # instead: tall = x.size(0) > x.size(1)
    # instead: x = x.mT if tall else x
    # instead: for _ in range(iterations): gram = x @ x.mT; x = a * x + (b * gram + c * gram @ gram) @ x
    # instead: x = x.mT if tall else x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = torch.randint(0, 64, (1 << 20,), device=device).cumsum(0) % 256
    offsets = torch.arange(args.context + 1, device=device)

    model = ByteDecoder(args.width, args.layers, args.context).to(device)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=1e-3, fused=True)]

    for step in range(args.steps):
        starts = torch.randint(0, corpus.numel() - args.context - 1, (args.batch_size, 1), device=device)
        window = corpus[starts + offsets]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()

        # mend: statistics-of-every-step
        statistics = {}
        for name, p in model.named_parameters():
            ratio = p.grad.norm() / p.detach().norm().clamp(min=1e-8)  # waste: statistics-of-every-step
            dead = (p.grad.abs() < 1e-9).float().mean()  # waste: statistics-of-every-step
            statistics[name] = (ratio.item(), dead.item())  # waste: statistics-of-every-step
        # instead: due = list(model.named_parameters()) if step % args.log_every == 0 else []
        # instead: ratios = [p.grad.norm() / p.detach().norm().clamp(min=1e-8) for _, p in due]
        # instead: deads = [(p.grad.abs() < 1e-9).float().mean() for _, p in due]
        # instead: statistics = {n: (r.item(), d.item()) for (n, _), r, d in zip(due, ratios, deads)}

        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % args.log_every == 0:
            loudest = max(statistics, key=lambda name: statistics[name][0])
            print(f"step {step} loss {loss.item():.4f} loudest {loudest} {statistics[loudest][0]:.4f}")
        # step


if __name__ == "__main__":
    main()
