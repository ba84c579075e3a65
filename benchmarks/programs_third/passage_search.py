"""Answers batches of search queries with a hybrid index (meaning and keywords) and re-scores the best passages."""

# cpu: --width 128 --layers 2 --heads 4 --vocab 6000 --queries 8 --passages 6000 --query-len 32
# cuda: --width 768 --layers 6 --heads 12 --vocab 30000 --queries 64 --passages 50000 --query-len 32

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class QueryEncoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_len, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        return self.norm(self.encoder(x).mean(1))


class HybridIndex(nn.Module):
    def __init__(self, vocab, passages, width, share=0.2):
        super().__init__()
        lexical = torch.rand(vocab, passages)
        lexical = torch.where(lexical < 0.02, 50 * lexical, 0.0)
        idf = torch.log(1.0 + passages / (1.0 + (lexical > 0).sum(1, keepdim=True)))
        self.register_buffer("lexical", lexical.mul_(idf))
        self.register_buffer("vectors", F.normalize(torch.randn(passages, width), dim=-1))
        self.share = share

    def forward(self, tokens, queries, k):
        semantic = F.normalize(queries, dim=-1) @ self.vectors.T
        # mend: term-matmul
        terms = F.one_hot(tokens, self.lexical.size(0)).sum(1).float()
        keyword = terms @ self.lexical  # waste: term-matmul
        # instead: keyword = F.embedding_bag(tokens, self.lexical, mode="sum")
        scores = semantic + self.share * keyword / tokens.size(1)
        return scores.topk(k, dim=-1)


class Reranker(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, queries, passages):
        queries = queries.unsqueeze(1).expand_as(passages)
        return self.mix(torch.cat([queries, passages, queries * passages], dim=-1)).squeeze(-1)


class SearchEngine(nn.Module):
    def __init__(self, vocab, width, layers, heads, max_len, passages):
        super().__init__()
        self.encoder = QueryEncoder(vocab, width, layers, heads, max_len)
        self.index = HybridIndex(vocab, passages, width)
        self.reranker = Reranker(width)

    def forward(self, tokens, candidates, final):
        queries = self.encoder(tokens)
        scores, ids = self.index(tokens, queries, candidates)
        refined = scores + 0.1 * self.reranker(queries, self.index.vectors[ids])
        best = refined.topk(final, dim=-1)
        return best.values, ids.gather(1, best.indices)


def request_stream(count, queries, length, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, vocab + 1).float().reciprocal()
    for _ in range(count):
        yield torch.multinomial(popularity, queries * length, True, generator=generator).view(queries, length)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=6000)
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--query-len", type=int, default=32)
    parser.add_argument("--passages", type=int, default=6000)
    parser.add_argument("--candidates", type=int, default=50)
    parser.add_argument("--final", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        engine = SearchEngine(args.vocab, args.width, args.layers, args.heads, args.query_len, args.passages).eval()
    requests = list(request_stream(16, args.queries, args.query_len, args.vocab, seed=9))

    answered = 0
    began = time.perf_counter()
    with torch.inference_mode():
        for step in range(args.steps):
            tokens = requests[step % len(requests)].to(device)
            scores, ids = engine(tokens, args.candidates, args.final)
            scores, ids = scores.cpu(), ids.cpu()
            answered += len(ids)
            if step % 10 == 0 or step == args.steps - 1:
                rate = answered / (time.perf_counter() - began)
                print(f"step {step} mean best {scores[:, 0].mean():.5f} first {int(ids[0, 0])} {rate:.0f} queries/s")
            # step


if __name__ == "__main__":
    main()
