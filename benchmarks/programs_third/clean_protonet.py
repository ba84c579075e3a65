"""Meta-trains a prototypical network on few-shot episodes of synthetic 28x28 glyphs."""

# cpu: --width 16 --episodes 1
# cuda: --width 64 --episodes 32

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class ConvBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)


class Embedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.Sequential(
            ConvBlock(1, width), ConvBlock(width, width), ConvBlock(width, width), ConvBlock(width, width)
        )

    def forward(self, x):
        return self.blocks(x).flatten(1)


class PrototypicalHead(nn.Module):
    """Scores of the queries by their distance to the mean of every class's support."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, support, query):
        """support: (episodes, way, shot, dim); query: (episodes, queries, dim)."""
        prototypes = support.mean(dim=2)
        # the query's own norm is the same for all classes and leaves the softmax as it is
        bias = -prototypes.square().sum(dim=2).unsqueeze(1)
        scores = torch.baddbmm(bias, query, prototypes.transpose(1, 2), alpha=2.0)
        return scores * self.log_scale.exp() / query.shape[-1]


class EpisodeSampler(nn.Module):
    """Draws classes and disjoint support and query images for a batch of episodes."""

    def __init__(self, glyphs, way, shot, queries):
        super().__init__()
        self.register_buffer("glyphs", glyphs)
        self.way = way
        self.shot = shot
        self.queries = queries

    def forward(self, episodes):
        classes, per_class = self.glyphs.shape[:2]
        device = self.glyphs.device
        chosen = torch.rand(episodes, classes, device=device).topk(self.way, dim=1).indices
        shape = (episodes, self.way, per_class)
        samples = torch.rand(shape, device=device).topk(self.shot + self.queries, dim=2).indices
        return self.glyphs[chosen.unsqueeze(2), samples]


class ProtoNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = Embedding(width)
        self.head = PrototypicalHead()

    def forward(self, images, shot):
        """images: (episodes, way, shot + queries, 1, 28, 28), the support first."""
        e, w, s = images.shape[:3]
        codes = self.embedding(images.flatten(0, 2)).float().view(e, w, s, -1)
        return self.head(codes[:, :, :shot], codes[:, :, shot:].flatten(1, 2))


def make_glyphs(classes, per_class, generator):
    """A smooth pattern for every class, shifted and noisy in its samples."""
    pattern = F.interpolate(torch.randn(classes, 1, 7, 7, generator=generator), size=(28, 28), mode="bicubic")
    glyphs = pattern.unsqueeze(1).repeat(1, per_class, 1, 1, 1)
    for i in range(per_class):
        glyphs[:, i] = glyphs[:, i].roll((i % 5 - 2, i // 5 % 5 - 2), dims=(2, 3))
    return glyphs + 0.5 * torch.randn(glyphs.shape, generator=generator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--way", type=int, default=5)
    parser.add_argument("--shot", type=int, default=5)
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    glyphs = make_glyphs(200, 20, torch.Generator().manual_seed(1))
    sampler = EpisodeSampler(glyphs, args.way, args.shot, args.queries).to(device)
    model = ProtoNet(args.width).to(device)
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last)
    targets = torch.arange(args.way, device=device).repeat_interleave(args.queries).repeat(args.episodes)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2000, gamma=0.5)

    for step in range(args.steps):
        images = sampler(args.episodes)
        with amp:
            scores = model(images, args.shot)
        loss = F.cross_entropy(scores.flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

        if step % 10 == 0:
            accuracy = (scores.flatten(0, 1).argmax(dim=1) == targets).float().mean()
            print(f"step {step}: loss {loss.item():.6f} accuracy {accuracy.item():.3f}")
        # step


if __name__ == "__main__":
    main()
