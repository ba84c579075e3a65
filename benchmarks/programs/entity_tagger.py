"""Trains a tagger of names in text: a bidirectional LSTM below a conditional random field."""

# cpu: --width 96 --batch-size 12 --length 32
# cuda: --width 1024 --batch-size 64 --length 96

import argparse

import torch
from torch import nn

KINDS = ["person", "place", "company", "product", "event", "law", "date", "sum"]
TAGS = 1 + 2 * len(KINDS)
"""Outside of names, and the beginning and the inside of each kind of name."""


class RandomField(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start = nn.Parameter(torch.randn(tags) * 0.1)
        self.end = nn.Parameter(torch.randn(tags) * 0.1)
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def path_score(self, emissions, tags, mask):
        """The score of the given tags."""
        weights = mask.float()
        # mend: path-scored-word-by-word
        score = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, tags.shape[1]):
            step = self.transitions[tags[:, t - 1], tags[:, t]]  # waste: path-scored-word-by-word
            step = step + emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)  # waste: path-scored-word-by-word
            score = score + step * weights[:, t]
        # instead: steps = self.transitions[tags[:, :-1], tags[:, 1:]]
        # instead: score = self.start[tags[:, 0]] + (steps * weights[:, 1:]).sum(1)
        # instead: score = score + (emissions.gather(2, tags.unsqueeze(2)).squeeze(2) * weights).sum(1)
        last = tags.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
        return score + self.end[last]

    def log_total(self, emissions, mask):
        """The logarithm of the sum over all sequences of tags (the forward algorithm)."""
        alpha = self.start + emissions[:, 0]
        # mend: forward-algorithm-in-sequence
        for t in range(1, emissions.shape[1]):
            scores = alpha.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1)
            following = torch.logsumexp(scores, dim=1)  # waste: forward-algorithm-in-sequence
            alpha = torch.where(mask[:, t].unsqueeze(1), following, alpha)  # waste: forward-algorithm-in-sequence
        # instead: count = self.transitions.shape[0]
        # instead: nothing = torch.full((count, count), -1e4, device=mask.device).fill_diagonal_(0)
        # instead: chain = self.transitions + emissions[:, 1:].unsqueeze(2)
        # instead: chain = torch.where(mask[:, 1:, None, None], chain, nothing)
        # instead: while chain.shape[1] > 1:
        # instead:     if chain.shape[1] % 2:
        # instead:         chain = torch.cat([chain, nothing.expand(len(chain), 1, count, count)], dim=1)
        # instead:     pairs = chain[:, 0::2, :, :, None] + chain[:, 1::2, None, :, :]
        # instead:     chain = torch.logsumexp(pairs, dim=3)
        # instead: alpha = torch.logsumexp(alpha.unsqueeze(2) + chain[:, 0], dim=1)
        return torch.logsumexp(alpha + self.end, dim=1)

    def forward(self, emissions, tags, mask):
        """The mean negative log-likelihood of the tags, per sentence."""
        return (self.log_total(emissions, mask) - self.path_score(emissions, tags, mask)).mean()


class Tagger(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.lstm = nn.LSTM(args.width, args.width, batch_first=True, bidirectional=True)
        self.emissions = nn.Linear(2 * args.width, TAGS)

    def forward(self, ids):
        return self.emissions(self.lstm(self.words(ids))[0])


def made_up_sentences(args, device, count=2000):
    """Words, their tags, and which positions hold a word; names are the words with large numbers."""
    ids = torch.randint(args.vocabulary, (count, args.length), device=device)
    tags = torch.where(ids > 0.7 * args.vocabulary, ids % TAGS, 0)
    lengths = torch.randint(args.length * 4 // 5, args.length + 1, (count, 1), device=device)
    mask = torch.arange(args.length, device=device) < lengths
    return ids, tags, mask


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=20000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tagger = Tagger(args).to(device, dtype)
    field = RandomField(TAGS).to(device)  # sums of many exponentials stay in float32
    optimizer = torch.optim.AdamW([*tagger.parameters(), *field.parameters()], lr=1e-3, fused=True)
    sentences = made_up_sentences(args, device)
    print(f"{len(sentences[0])} sentences, {TAGS} tags for {', '.join(KINDS)}")

    average = torch.zeros((), device=device)
    for step in range(args.steps):
        picks = torch.randint(len(sentences[0]), (args.batch_size,), device=device)
        ids, tags, mask = (tensor[picks] for tensor in sentences)
        loss = field(tagger(ids).float(), tags, mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.lerp_(loss.detach(), 0.05)
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss per sentence {average.item():.2f}")
        # step


if __name__ == "__main__":
    main()
