"""Learns features of tissue from tiles of microscope slides: two random views of a tile belong together."""

# cpu: --batch-size 16 --tile 56 --view 48 --width 8 --features 64
# cuda: --batch-size 320 --tile 160 --view 128 --width 64 --features 512

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def stage(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Encoder(nn.Module):
    def __init__(self, width, features):
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=4),
            stage(width, width, 1),
            stage(width, 2 * width, 2),
            stage(2 * width, 4 * width, 2),
            stage(4 * width, 8 * width, 2),
        )
        self.project = nn.Sequential(
            nn.Linear(8 * width, 8 * width), nn.ReLU(inplace=True), nn.Linear(8 * width, features)
        )

    def forward(self, images):
        return self.project(self.stages(images).mean((2, 3)))


def crop_and_flip(tiles, size):
    """A random part of each tile, (tiles, size, size, 3); every second one is mirrored."""
    margin = tiles.shape[1] - size
    # mend: tile-by-tile
    views = []
    for tile in tiles:
        top, left, mirrored = torch.randint(margin + 1, (3,), device=tiles.device).tolist()  # waste: tile-by-tile
        view = tile[top : top + size, left : left + size]
        views.append(view.flip(1) if mirrored % 2 else view)  # waste: tile-by-tile
    return torch.stack(views)
    # instead: top, left, mirrored = torch.randint(margin + 1, (3, len(tiles), 1), device=tiles.device)
    # instead: place = torch.arange(size, device=tiles.device)
    # instead: columns = left + torch.where(mirrored % 2 == 1, place.flip(0), place)
    # instead: tile = torch.arange(len(tiles), device=tiles.device)[:, None, None]
    # instead: return tiles[tile, (top + place)[:, :, None], columns[:, None, :]]


def stain(views):
    """Bytes to numbers, each view with a brightness and a contrast of its own."""
    views = views.permute(0, 3, 1, 2).float() / 255
    contrast = torch.empty(len(views), 1, 1, 1, device=views.device).uniform_(0.7, 1.3)
    brightness = torch.empty(len(views), 3, 1, 1, device=views.device).uniform_(-0.2, 0.2)
    return torch.addcmul(brightness, views - 0.5, contrast)


def contrastive_loss(features, temperature=0.2):
    """Each of 2 n views should find its partner, n places away, among all others."""
    similarity = F.cosine_similarity(features[:, None], features[None, :], dim=-1)  # waste: pairs-written-out
    # instead: unit = F.normalize(features, dim=-1)
    # instead: similarity = unit @ unit.T
    count = len(features)
    itself = torch.eye(count, dtype=torch.bool, device=features.device)
    partner = (torch.arange(count, device=features.device) + count // 2) % count
    return F.cross_entropy((similarity / temperature).masked_fill(itself, float("-inf")), partner)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=320, help="tiles; each gives two views")
    parser.add_argument("--tile", type=int, default=160)
    parser.add_argument("--view", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    model = Encoder(args.width, args.features).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    slides = torch.randint(256, (4, args.batch_size, args.tile, args.tile, 3), dtype=torch.uint8, device=device)
    for step in range(args.steps):
        tiles = slides[step % len(slides)]
        views = torch.cat([crop_and_flip(tiles, args.view), crop_and_flip(tiles, args.view)])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features = model(stain(views))
        loss = contrastive_loss(features.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
