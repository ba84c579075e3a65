"""Serve text search: score every document against a query by late interaction of their token vectors."""

# cpu: --documents 3000 --tokens 48 --width 96 --queries 2
# cuda: --documents 40000 --tokens 128 --width 128 --queries 4

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class QueryEncoder(nn.Module):
    def __init__(self, vocab, hidden, width, length, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(length, hidden))
        layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.project = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens):
        x = self.layers(self.embed(tokens) + self.positions)
        return F.normalize(self.project(x), dim=-1)


class LateInteractionIndex(nn.Module):
    def __init__(self, vectors, lengths, block):
        super().__init__()
        self.block = block
        # mend: documents-normalised-per-query
        self.register_buffer("vectors", vectors)
        # instead: self.register_buffer("vectors", F.normalize(vectors.float(), dim=-1))
        padding = torch.arange(vectors.shape[1], device=lengths.device) >= lengths[:, None]
        self.register_buffer("padding", padding)

    def forward(self, query, count):
        """Best documents of each query: the similarity of each query token to its nearest document token, summed."""
        scores = []
        for first in range(0, len(self.vectors), self.block):
            rows = slice(first, first + self.block)
            documents = F.normalize(self.vectors[rows].float(), dim=-1)  # waste: documents-normalised-per-query
            # instead: documents = self.vectors[rows]
            similar = query.flatten(0, 1) @ documents.flatten(0, 1).T
            similar = similar.view(-1, documents.shape[0], documents.shape[1])
            nearest = similar.masked_fill_(self.padding[rows], -1.0).amax(dim=-1)
            scores.append(nearest.view(query.shape[0], query.shape[1], -1).sum(dim=1))
        return torch.cat(scores, dim=1).topk(count, dim=1)


class Ranker(nn.Module):
    """Orders the best documents again, by their scores and what is known of them beside the text."""

    def __init__(self, facts, width=64):
        super().__init__()
        self.register_buffer("facts", facts)
        self.net = nn.Sequential(nn.Linear(1 + facts.shape[1], width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, scores, found):
        known = torch.cat([scores.unsqueeze(-1), self.facts[found]], dim=-1)
        ranked, order = self.net(known).squeeze(-1).sort(dim=1, descending=True)
        return ranked, found.gather(1, order)


def make_corpus(documents, tokens, width, device):
    topics = torch.randn(50, width, device=device)
    topic = torch.randint(50, (documents, 1), device=device)
    vectors = topics[topic] + torch.randn(documents, tokens, width, device=device)
    lengths = torch.randint(tokens // 4, tokens + 1, (documents,), device=device)
    return vectors.half(), lengths, torch.rand(documents, 6, device=device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--queries", type=int, default=2)
    parser.add_argument("--query-tokens", type=int, default=16)
    parser.add_argument("--best", type=int, default=20)
    parser.add_argument("--block", type=int, default=10000)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    encoder = QueryEncoder(5000, 192, args.width, args.query_tokens).to(device).eval()
    vectors, lengths, facts = make_corpus(args.documents, args.tokens, args.width, device)
    ranker = Ranker(facts).to(device).eval()
    index = LateInteractionIndex(vectors, lengths, args.block).eval()
    queries = torch.randint(5000, (10, args.queries, args.query_tokens), device=device)

    with torch.inference_mode():
        for step in range(args.steps):
            query = encoder(queries[step % len(queries)])
            scores, found = ranker(*index(query, args.best))
            if step % 10 == 0:
                print(f"request {step}: best {found[0, :4].tolist()}, score {scores[0, 0].item():.4f}")
            # step


if __name__ == "__main__":
    main()
