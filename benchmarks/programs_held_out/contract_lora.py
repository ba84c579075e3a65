"""Fine-tunes a language model on questions about contracts; only adapters of low rank are trained."""

# cpu: --width 192 --heads 4 --layers 2 --batch-size 2 --prompt 96 --answer 32 --vocabulary 4096
# cuda: --width 2048 --heads 16 --layers 6 --batch-size 16 --prompt 384 --answer 128

import argparse

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100


class Adapted(nn.Module):
    """A pretrained linear map with a trained one of low rank beside it."""

    def __init__(self, inputs, outputs, rank, scale=2.0):
        super().__init__()
        self.scale = scale
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.adapter_down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.adapter_up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        y = self.base(x)  # waste: gradients-of-frozen-weights
        # instead: y = self.base(x)
        return torch.add(y, F.linear(F.linear(x, self.adapter_down), self.adapter_up), alpha=self.scale)


class Block(nn.Module):
    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = Adapted(width, 3 * width, rank)
        self.out = Adapted(width, width, rank)
        self.up = Adapted(width, 4 * width, rank)
        self.down = Adapted(4 * width, width, rank)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.prompt = args.prompt
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.prompt + args.answer, args.width)
        self.blocks = nn.ModuleList([Block(args.width, args.heads, args.rank) for _ in range(args.layers)])
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, ids, labels):
        """The loss over the words that have a label, which are those of answers."""
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        # mend: logits-of-prompts
        logits = self.head(self.norm(x))  # waste: logits-of-prompts
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        # instead: logits = self.head(self.norm(x[:, self.prompt :]))
        # instead: return F.cross_entropy(logits.flatten(0, 1), labels[:, self.prompt :].flatten())


class Contracts:
    """Prompts (a clause and a question) with their answers, all of them cut to size."""

    def __init__(self, args, device, examples=512):
        self.ids = torch.randint(args.vocabulary, (examples, args.prompt + args.answer + 1), device=device)
        self.labels = self.ids.clone()
        self.labels[:, : args.prompt + 1] = IGNORED

    def batch(self, size):
        rows = torch.randint(len(self.ids), (size,), device=self.ids.device)
        return self.ids[rows, :-1], self.labels[rows, 1:]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Model(args).to(dtype)
    adapters = [parameter for name, parameter in model.named_parameters() if "adapter" in name]
    # mend: gradients-of-frozen-weights
    optimizer = torch.optim.AdamW(adapters, lr=args.lr, fused=True)  # waste: gradients-of-frozen-weights
    # instead: model.requires_grad_(False)
    # instead: for adapter in adapters:
    # instead:     adapter.requires_grad_(True)
    # instead: optimizer = torch.optim.AdamW(adapters, lr=args.lr, fused=True)
    contracts = Contracts(args, device)
    trained, total = sum(p.numel() for p in adapters), sum(p.numel() for p in model.parameters())
    print(f"{trained / 1e6:.2f} of {total / 1e6:.1f} million parameters are trained")

    for step in range(args.steps):
        ids, labels = contracts.batch(args.batch_size)
        loss = model(ids, labels)
        loss.backward()  # waste: gradients-of-frozen-weights
        # instead: loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        model.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
