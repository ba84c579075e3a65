"""Distil a late-interaction retriever (ColBERT): every query has candidates of its own, scored by a teacher."""

# cpu: --queries 24 --ways 4 --query-length 16 --document-length 32 --width 48 --layers 1
# cuda: --queries 64 --ways 8 --query-length 32 --document-length 180 --width 384 --layers 4

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    """Tokens to normalized vectors of a small width."""

    def __init__(self, vocab, width, layers, length, outputs):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(EncoderLayer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, outputs, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.out(self.norm(x)), dim=-1)


class EncoderLayer(nn.Module):
    def __init__(self, width, heads=6):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def candidate_scores(queries, documents, punctuation):
    """MaxSim of each query with its own candidates.

    queries (Q, l, d), documents (Q * ways, m, d), punctuation (Q * ways, m) marks what is not to be matched.
    """
    count, ways = len(queries), len(documents) // len(queries)
    # mend: candidates-of-other-queries
    similar = torch.einsum("qld,nmd->qnlm", queries, documents)  # waste: candidates-of-other-queries
    similar = similar.masked_fill(punctuation[None, :, None, :], -1e4)  # waste: candidates-of-other-queries
    scores = similar.amax(dim=-1).sum(dim=-1).view(count, count, ways)  # waste: candidates-of-other-queries
    return scores.diagonal(dim1=0, dim2=1).T
    # instead: own = documents.view(count, -1, documents.size(-1))
    # instead: similar = torch.bmm(queries, own.mT).view(count, queries.size(1), ways, -1)
    # instead: similar = similar.masked_fill(punctuation.view(count, 1, ways, -1), -1e4)
    # instead: return similar.amax(dim=-1).sum(dim=1)


class Distiller:
    def __init__(self, encoder, lr, temperature=1.0):
        self.encoder, self.temperature = encoder, temperature
        self.optimizer = torch.optim.AdamW(encoder.parameters(), lr=lr, fused=True)

    def step(self, batch):
        kind = batch["queries"].device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            queries = self.encoder(batch["queries"])
            documents = self.encoder(batch["documents"])
            scores = candidate_scores(queries, documents, batch["punctuation"])
        student = F.log_softmax(scores.float() / self.temperature, dim=-1)
        loss = F.kl_div(student, batch["teacher"], reduction="batchmean", log_target=True)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def make_batch(queries, ways, query_length, document_length, vocab, device):
    asked = torch.randint(8, vocab, (queries, query_length), device=device)
    texts = torch.randint(0, vocab, (queries, ways, document_length), device=device)
    quoted = torch.rand(texts.shape, device=device) < torch.linspace(0, 0.5, ways, device=device)[:, None]
    pick = torch.randint(0, query_length, texts.shape, device=device)
    texts = torch.where(quoted, asked.gather(1, pick.flatten(1)).view_as(texts), texts).flatten(0, 1)
    teacher = torch.linspace(0, 3, ways, device=device).expand(queries, -1) + torch.randn(queries, ways, device=device)
    return {
        "queries": asked,
        "documents": texts,
        "punctuation": texts < 8,
        "teacher": teacher.log_softmax(dim=-1),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--queries", type=int, default=24)
    parser.add_argument("--ways", type=int, default=4)
    parser.add_argument("--query-length", type=int, default=16)
    parser.add_argument("--document-length", type=int, default=32)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--outputs", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab = 4000
    encoder = Encoder(vocab, args.width, args.layers, args.document_length, args.outputs).to(device)
    distiller = Distiller(encoder, lr=1e-3)
    sizes = (args.queries, args.ways, args.query_length, args.document_length, vocab)
    batches = [make_batch(*sizes, device) for _ in range(4)]

    for step in range(args.steps):
        loss = distiller.step(batches[step % len(batches)])
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: divergence {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
