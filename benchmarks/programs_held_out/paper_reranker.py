"""Ranks papers for a question: every token of the question looks for the most similar token of a paper's abstract."""

# cpu: --width 128 --heads 4 --layers 2 --vocabulary 4000 --papers 1000 --candidates 32 --abstract 48 --question 16
# cuda: --width 1024 --heads 16 --layers 6 --papers 20000 --candidates 128 --abstract 144 --question 48

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TokenEncoder(nn.Module):
    """A vector of length 1 for every token."""

    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(max(args.abstract, args.question), args.width))
        self.layers = nn.ModuleList([Layer(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.out = nn.Linear(args.width, 128, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.out(self.norm(x)), dim=-1)


class Library:
    """Made-up abstracts and questions, and the candidates that a keyword search found for a question."""

    def __init__(self, args, device):
        generator = torch.Generator().manual_seed(1)
        self.abstracts = torch.randint(args.vocabulary, (args.papers, args.abstract), generator=generator).to(device)
        self.questions = torch.randint(args.vocabulary, (256, args.question), generator=generator).to(device)
        self.found = torch.randint(args.papers, (256, args.candidates), generator=generator).to(device)

    def request(self, number):
        number = number % len(self.questions)
        return self.questions[number : number + 1], self.found[number]


def rank(encoder, question, abstracts, best):
    """The candidates that fit the question best, as positions among them."""
    asked = question.expand(len(abstracts), -1)
    asked = encoder(asked)  # waste: question-encoded-for-each-paper
    # instead: asked = encoder(question).expand(len(abstracts), -1, -1)
    told = encoder(abstracts)
    # mend: scored-paper-by-paper
    scores = []
    for i in range(len(abstracts)):
        similarity = asked[i] @ told[i].T
        scores.append(similarity.amax(1).sum().item())  # waste: scored-paper-by-paper
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:best]
    # instead: scores = (asked @ told.transpose(1, 2)).amax(2).sum(1)
    # instead: return scores.topk(best).indices.tolist()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=30000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--papers", type=int, default=20000)
    parser.add_argument("--abstract", type=int, default=144, help="tokens of an abstract")
    parser.add_argument("--question", type=int, default=48, help="tokens of a question")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--best", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="questions")
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    encoder = TokenEncoder(args).to(device, dtype).eval()
    library = Library(args, device)
    started = time.perf_counter()
    with torch.inference_mode():
        for step in range(args.steps):
            question, found = library.request(step)
            order = rank(encoder, question, library.abstracts[found], args.best)
            if (step + 1) % 20 == 0:
                rate = (step + 1) / (time.perf_counter() - started)
                print(f"question {step + 1}: {order[:3]} are best, {rate:.1f} questions/s")
            # step


if __name__ == "__main__":
    main()
