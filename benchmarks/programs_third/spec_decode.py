"""Serves completions with speculative decoding: a shallow drafter proposes tokens and the full model checks them."""

# cpu: --width 384 --layers 8 --heads 6 --vocab 4000 --prompt-len 48 --new-tokens 16
# cuda: --width 2048 --layers 16 --heads 16 --vocab 32000 --prompt-len 1024 --new-tokens 24

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads, depth):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer in (self.proj, self.down):
            nn.init.normal_(layer.weight, std=0.02 / (2 * depth))

    def forward(self, x, cache, start, mask):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys, values = cache
        keys[:, :, start : start + t] = k
        values[:, :, start : start + t] = v
        y = F.scaled_dot_product_attention(q, keys[:, :, : start + t], values[:, :, : start + t], attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class CausalLM(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList([Block(width, heads, layers) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def new_cache(self, length):
        weight = self.head.weight
        heads = self.blocks[0].heads
        shape = (1, heads, length, weight.size(1) // heads)
        return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]

    def forward(self, tokens, cache, start):
        length = tokens.size(1)
        mask = None
        if length > 1:
            rows = torch.arange(start, start + length, device=tokens.device)
            mask = torch.arange(start + length, device=tokens.device) <= rows.unsqueeze(1)
        x = self.embed(tokens) + self.position.weight[start : start + length]
        for block, memory in zip(self.blocks, cache, strict=False):
            x = block(x, memory, start, mask)
        return self.head(self.norm(x))


def make_drafter(target, layers, args, max_len):
    drafter = CausalLM(args.vocab, args.width, layers, args.heads, max_len)
    shared = target.state_dict()
    drafter.load_state_dict({name: shared[name] for name in drafter.state_dict()})
    return drafter


def generate(target, drafter, prompt, new_tokens, lookahead, max_len):
    target_cache, draft_cache = target.new_cache(max_len), drafter.new_cache(max_len)
    drafter(prompt, draft_cache, 0)
    current = target(prompt, target_cache, 0)[:, -1:].argmax(-1)
    output = [current]
    position, produced, rounds = prompt.size(1), 1, 0
    while produced < new_tokens:
        block = [current]
        for i in range(lookahead):
            block.append(drafter(block[-1], draft_cache, position + i)[:, -1:].argmax(-1))
        drafter(block[-1], draft_cache, position + lookahead)
        block = torch.cat(block, dim=1)

        # mend: verify-singly
        checked = []
        for i in range(lookahead + 1):
            checked.append(target(block[:, i : i + 1], target_cache, position + i))  # waste: verify-singly
        verdict = torch.cat(checked, dim=1).argmax(-1)
        # instead: verdict = target(block, target_cache, position).argmax(-1)
        accepted = int((verdict[:, :-1] == block[:, 1:]).long().cumprod(-1).sum())
        output.append(verdict[:, : accepted + 1])
        current = verdict[:, accepted : accepted + 1]
        position += accepted + 1
        produced += accepted + 1
        rounds += 1
    return torch.cat(output, dim=1)[:, :new_tokens], rounds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=4000)
    parser.add_argument("--prompt-len", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    max_len = args.prompt_len + args.new_tokens + 2 * args.lookahead + 2
    with torch.device(device):
        target = CausalLM(args.vocab, args.width, args.layers, args.heads, max_len).to(dtype).eval()
        drafter = make_drafter(target, args.draft_layers, args, max_len).to(dtype).eval()

    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(args.vocab, (16, 1, args.prompt_len), generator=generator).to(device)

    began = time.perf_counter()
    with torch.inference_mode():
        for step in range(args.steps):
            prompt = prompts[step % len(prompts)]
            answer, rounds = generate(target, drafter, prompt, args.new_tokens, args.lookahead, max_len)
            if step % 10 == 0 or step == args.steps - 1:
                elapsed = time.perf_counter() - began
                print(f"request {step} rounds {rounds} checksum {int(answer.sum())} elapsed {elapsed:.2f}s")
            # step


if __name__ == "__main__":
    main()
