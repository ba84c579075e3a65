"""Group-relative policy optimisation: samples groups of completions per prompt and reinforces the better ones."""

# cpu: --width 128 --layers 3 --heads 4 --vocab 512 --prompts 2 --group 8 --prompt-len 96 --new-tokens 10
# cuda: --width 1024 --layers 6 --heads 16 --vocab 8192 --prompts 8 --group 8 --prompt-len 512 --new-tokens 16

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, memory=None, start=0):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if memory is not None:
            memory[0][:, :, start : start + t] = k
            memory[1][:, :, start : start + t] = v
        if start > 0:
            k, v = memory[0][:, :, : start + t], memory[1][:, :, : start + t]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_len):
        super().__init__()
        self.width, self.heads = width, heads
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def new_cache(self, rows, length, dtype):
        shape = (rows, self.heads, length, self.width // self.heads)
        device = self.head.weight.device
        return [[torch.empty(shape, dtype=dtype, device=device) for _ in range(2)] for _ in self.blocks]

    def forward(self, tokens, last, cache=None, start=0):
        x = self.embed(tokens) + self.position.weight[start : start + tokens.size(1)]
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i], start)
        return self.head(self.norm(x[:, -last:]))


@torch.no_grad()
def rollout(policy, prompts, group, new_tokens, dtype):
    length = prompts.size(1)
    total = length + new_tokens
    tokens = prompts.repeat_interleave(group, dim=0)
    # mend: prompt-per-sample
    cache = policy.new_cache(tokens.size(0), total, dtype)
    logits = policy(tokens, 1, cache)[:, -1]  # waste: prompt-per-sample
    # instead: single = policy.new_cache(prompts.size(0), total, dtype)
    # instead: logits = policy(prompts, 1, single)[:, -1].repeat_interleave(group, dim=0)
    # instead: cache = [[part.repeat_interleave(group, dim=0) for part in layer] for layer in single]
    sampled = []
    for i in range(new_tokens):
        choice = torch.multinomial(logits.float().softmax(-1), 1)
        sampled.append(choice)
        if i < new_tokens - 1:
            logits = policy(choice, 1, cache, length + i)[:, -1]
    return torch.cat([tokens, *sampled], dim=1)


def completion_logps(policy, sequences, new_tokens):
    with torch.autocast(sequences.device.type, dtype=torch.bfloat16, enabled=sequences.is_cuda):
        logits = policy(sequences[:, :-1], new_tokens).float()
    targets = sequences[:, -new_tokens:]
    return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def score(completions, vocab):
    in_band = (completions < vocab // 4).float().mean(-1)
    ordered = (completions[:, 1:] > completions[:, :-1]).float().mean(-1)
    return in_band + 0.5 * ordered


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = Policy(args.vocab, args.width, args.layers, args.heads, args.prompt_len + args.new_tokens).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, fused=True)
    pool = torch.randint(args.vocab, (args.prompts * 32, args.prompt_len), device=device)

    for step in range(args.steps):
        first = (step % 32) * args.prompts
        prompts = pool[first : first + args.prompts]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            sequences = rollout(policy, prompts, args.group, args.new_tokens, dtype)
        rewards = score(sequences[:, -args.new_tokens :], args.vocab).view(-1, args.group)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        # mend: behaviour-pass
        with torch.no_grad():
            old_logps = completion_logps(policy, sequences, args.new_tokens)  # waste: behaviour-pass
        logps = completion_logps(policy, sequences, args.new_tokens)
        # instead: logps = completion_logps(policy, sequences, args.new_tokens)
        # instead: old_logps = logps.detach()
        ratio = torch.exp(logps - old_logps)
        weight = advantages.view(-1, 1)
        loss = -torch.min(ratio * weight, ratio.clamp(1 - args.clip, 1 + args.clip) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f} reward {rewards.mean().item():.4f}")
        # step


if __name__ == "__main__":
    main()
