"""Writes stories: samples from the nucleus of a language model with a recurrent state."""

# cpu: --width 192 --batch-size 8 --new-tokens 300 --vocabulary 32000
# cuda: --width 1024 --batch-size 128 --new-tokens 600 --vocabulary 128256

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Storyteller(nn.Module):
    """A stack of GRU layers over tokens: its state is all that it remembers."""

    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, num_layers=layers, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, state=None):
        x, state = self.recurrent(self.tokens(ids), state)
        return self.head(self.norm(x[:, -1])), state


def sample(logits, temperature, top_p):
    """One token of each row, drawn from the smallest set of tokens that has `top_p` of the probability."""
    ordered, order = torch.sort(logits / temperature, descending=True)  # waste: vocabulary-sorted
    # instead: ordered, order = torch.topk(logits / temperature, 512)
    shares = F.softmax(ordered, dim=-1, dtype=torch.float32)
    outside = shares.cumsum(-1) - shares > top_p
    shares = shares.masked_fill(outside, 0.0)
    drawn = torch.multinomial(shares, 1)
    return order.gather(1, drawn)


@torch.no_grad()
def write(model, ids, args):
    state, story = None, [ids]
    for _ in range(args.new_tokens):
        logits, state = model(ids, state)
        ids = sample(logits, args.temperature, args.top_p)
        story.append(ids)
        # step
    return torch.cat(story, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=1, help="batches of stories")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Storyteller(args.vocabulary, args.width, args.layers).to(device, dtype).eval()
    for step in range(args.steps):
        beginnings = torch.randint(args.vocabulary, (args.batch_size, 16), device=device)
        stories = write(model, beginnings, args)
        print(f"stories {step}: {tuple(stories.shape)}, one starts with {stories[0, :8].tolist()}")


if __name__ == "__main__":
    main()
