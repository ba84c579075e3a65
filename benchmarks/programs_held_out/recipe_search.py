"""Trains vectors of recipes and of what people ask for, such that a question is near the recipe it means."""

# cpu: --width 96 --heads 4 --layers 2 --batch-size 8 --words 32 --vocabulary 2048 --remembered 128
# cuda: --width 1024 --heads 16 --layers 4 --batch-size 96 --words 96 --vocabulary 32768 --remembered 4096

import argparse

import torch
import torch.nn.functional as F
from torch import nn

QUESTION_WORDS = 24


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """The mean over the words of a text, of which `lengths` says how many there are."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(max(args.words, QUESTION_WORDS), args.width))
        self.blocks = nn.ModuleList([Block(args.width, args.heads) for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)

    def forward(self, ids, inside, lengths):
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, inside[:, None, None])
        x = self.norm(x).float()
        # mend: pooled-one-by-one
        pooled = [x[row, :length].mean(0) for row, length in enumerate(lengths)]  # waste: pooled-one-by-one
        return torch.stack(pooled)
        # instead: weights = inside / inside.sum(1, keepdim=True)
        # instead: return (x * weights[..., None]).sum(1)


class Texts:
    """Made-up texts of some batches, on the device; their lengths are known on the host."""

    def __init__(self, batches, rows, words, vocabulary, device):
        lengths = torch.randint(words // 2, words + 1, (batches, rows))
        self.lengths = lengths.tolist()
        self.inside = (torch.arange(words) < lengths[..., None]).to(device)
        self.ids = torch.randint(1, vocabulary, (batches, rows, words), device=device) * self.inside

    def batch(self, number):
        number %= len(self.ids)
        return self.ids[number], self.inside[number], self.lengths[number]


class Memory:
    """Vectors of recipes of the last batches, which are wrong answers too."""

    def __init__(self, size, width, device):
        self.vectors = torch.randn(size, width, device=device)
        self.place = 0

    def remember(self, vectors):
        room = min(len(vectors), len(self.vectors) - self.place)
        self.vectors[self.place : self.place + room] = vectors[:room].detach()
        self.place = (self.place + room) % len(self.vectors)


def search_loss(questions, recipes, memory, temperature):
    """The first recipes answer the questions; all others, and those remembered, do not."""
    candidates = torch.cat([recipes, memory.vectors])
    near = F.cosine_similarity(questions[:, None], candidates[None], dim=-1)  # waste: similarity-by-broadcasting
    # instead: near = F.normalize(questions, dim=-1) @ F.normalize(candidates, dim=-1).t()
    right = torch.arange(len(questions), device=near.device)
    return F.cross_entropy(near / temperature, right), (near.argmax(1) == right).float().mean()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--words", type=int, default=96, help="of the longest recipe")
    parser.add_argument("--batch-size", type=int, default=96, help="questions; there are twice as many recipes")
    parser.add_argument("--remembered", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        encoder = Encoder(args)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=args.lr, fused=True)
    asked = Texts(8, args.batch_size, QUESTION_WORDS, args.vocabulary, device)
    cooked = Texts(8, 2 * args.batch_size, args.words, args.vocabulary, device)
    memory = Memory(args.remembered, args.width, device)
    hits = torch.zeros((), device=device)

    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            questions = encoder(*asked.batch(step))
            recipes = encoder(*cooked.batch(step))
        loss, right = search_loss(questions.float(), recipes.float(), memory, args.temperature)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        memory.remember(recipes)
        hits += right
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {hits.item() / (step + 1):.1%} found")
        # step


if __name__ == "__main__":
    main()
