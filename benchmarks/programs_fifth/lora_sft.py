"""Instruction-tune a frozen decoder through low-rank adapters; only the completion tokens have labels."""

# cpu: --width 512 --layers 2 --batch-size 4 --context 128 --vocab 6144 --rank 4
# cuda: --width 2048 --layers 8 --batch-size 8 --context 1024 --vocab 50304 --rank 16

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100


class AdaptedLinear(nn.Module):
    """A frozen weight with a trainable update of low rank."""

    def __init__(self, inputs, outputs, rank, alpha=32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def forward(self, x):
        # mend: merged-in-training
        weight = self.weight + self.scale * (self.lora_b @ self.lora_a)  # waste: merged-in-training
        return F.linear(x, weight)  # waste: merged-in-training
        # instead: return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.scale * self.lora_b)


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = AdaptedLinear(width, 3 * width, rank)
        self.out = AdaptedLinear(width, width, rank)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = AdaptedLinear(width, 4 * width, rank)
        self.down = AdaptedLinear(4 * width, width, rank)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, vocab, width, layers, context, rank, heads=8):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, rank) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def features(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def loss(self, tokens, labels):
        hidden = self.features(tokens)[:, :-1]
        targets = labels[:, 1:]
        # mend: logits-of-prompts
        logits = self.head(hidden)  # waste: logits-of-prompts
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)  # waste: logits-of-prompts
        # instead: answered = targets != IGNORE
        # instead: return F.cross_entropy(self.head(hidden[answered]), targets[answered])


def freeze_base(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def make_examples(count, context, vocab, device):
    """Prompts of 60 to 80 % of the context, then a completion that repeats a piece of the prompt."""
    tokens = torch.randint(0, vocab, (count, context), device=device)
    prompt = torch.randint(int(0.6 * context), int(0.8 * context), (count, 1), device=device)
    column = torch.arange(context, device=device)
    source = torch.where(column < prompt, column, column - prompt)
    tokens = tokens.gather(1, source)
    return tokens, tokens.masked_fill(column < prompt, IGNORE)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=6144)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Decoder(args.vocab, args.width, args.layers, args.context, args.rank)
    freeze_base(model)
    tokens, labels = make_examples(8 * args.batch_size, args.context, args.vocab, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0, fused=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    for step in range(args.steps):
        rows = slice(step % 8 * args.batch_size, (step % 8 + 1) * args.batch_size)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model.loss(tokens[rows], labels[rows])
        loss.backward()
        optimizer.step()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
