"""Trains a classifier of reviews, most of which are short."""

# cpu: --width 96 --layers 2 --batch-size 8 --longest 200 --vocabulary 4000 --reviews 2000
# cuda: --width 512 --layers 6 --batch-size 128 --longest 512

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, count, longest, vocabulary):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(count).log_normal_(3.6, 0.5, generator=generator).long().clamp(8, longest)
        lengths[0] = longest
        self.reviews = [torch.randint(1, vocabulary, (int(length),), generator=generator) for length in lengths]
        self.labels = torch.randint(2, (count,), generator=generator)
        self.longest = int(lengths.max())

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, index):
        return self.reviews[index], self.labels[index]

    def collate(self, examples):
        reviews, labels = zip(*examples, strict=True)
        ids = pad_sequence(reviews, batch_first=True)
        ids = F.pad(ids, (0, self.longest - ids.shape[1]))  # waste: padded-to-the-longest
        # instead:
        return ids, torch.stack(labels)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self, vocabulary, width, layers, heads, longest):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        seen = ids != 0
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]  # waste: padded-to-the-longest
        mask = seen[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        pooled = (x * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        return self.head(pooled)


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=20000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--reviews", type=int, default=20000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    data = Reviews(args.reviews, args.longest, args.vocabulary)
    loader = DataLoader(
        data,
        args.batch_size,
        shuffle=True,
        collate_fn=data.collate,
        num_workers=2,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    model = Classifier(args.vocabulary, args.width, args.layers, args.heads, args.longest).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step, (ids, labels) in enumerate(forever(loader), start=1):
        ids, labels = ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(ids), labels)  # waste: padded-to-the-longest
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
