"""Serves many chat sessions at once with a grouped-query decoder, advancing every session token by token."""

# cpu: --width 256 --layers 4 --heads 16 --kv-heads 2 --vocab 2000 --slots 8 --context 512
# cuda: --width 4096 --layers 8 --heads 32 --kv-heads 4 --vocab 32000 --slots 64 --context 2048

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class GroupedAttention(nn.Module):
    def __init__(self, width, heads, kv_heads, slots, context):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.groups = heads // kv_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("keys", torch.randn(slots, kv_heads, context, self.dim))
        self.register_buffer("values", torch.randn(slots, kv_heads, context, self.dim))

    def forward(self, x, lengths, mask):
        slots = x.size(0)
        q = self.q(x).view(slots, self.heads, 1, self.dim)
        k, v = self.kv(x).view(slots, 2, self.kv_heads, self.dim).unbind(1)
        rows = torch.arange(slots, device=x.device)
        self.keys[rows, :, lengths] = k
        self.values[rows, :, lengths] = v
        # mend: expanded-heads
        keys = self.keys.repeat_interleave(self.groups, dim=1)  # waste: expanded-heads
        values = self.values.repeat_interleave(self.groups, dim=1)  # waste: expanded-heads
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        # instead: q = q.view(slots, self.kv_heads, self.groups, self.dim)
        # instead: y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.out(y.reshape(slots, self.heads * self.dim))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, slots, context):
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, kv_heads, slots, context)
        self.norm2 = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 5 * width, bias=False)
        self.down = nn.Linear(5 * width // 2, width, bias=False)

    def forward(self, x, lengths, mask):
        x = x + self.attention(self.norm1(x), lengths, mask)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, kv_heads, slots, context):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, kv_heads, slots, context) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, lengths):
        reach = torch.arange(self.context, device=tokens.device) <= lengths.unsqueeze(1)
        mask = reach.view(-1, 1, 1, self.context)
        x = self.embed(tokens) + self.position(lengths)
        for block in self.blocks:
            x = block(x, lengths, mask)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens-per-step", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = Decoder(args.vocab, args.width, args.layers, args.heads, args.kv_heads, args.slots, args.context)
    model = model.to(dtype).eval()

    system_prompt = args.context // 8
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(args.vocab, (args.slots,), generator=generator).to(device)
    lengths = torch.randint(system_prompt, args.context - 1, (args.slots,), generator=generator).to(device)

    served = 0
    began = time.perf_counter()
    with torch.inference_mode():
        for step in range(args.steps):
            for _ in range(args.tokens_per_step):
                logits = model(tokens, lengths)
                tokens = logits.argmax(-1)
                lengths = torch.where(lengths + 1 < args.context, lengths + 1, system_prompt)
            served += args.slots * args.tokens_per_step
            if step % 10 == 0 or step == args.steps - 1:
                top = logits.float().amax(-1).mean().item()
                print(f"step {step} mean top logit {top:.5f} {served / (time.perf_counter() - began):.0f} tokens/s")
            # step


if __name__ == "__main__":
    main()
