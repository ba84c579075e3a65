"""Tag photos with a small convolutional network; the images lie in memory and a DataLoader makes the batches."""

# cpu: --batch-size 24 --size 128 --width 8 --photos 240
# cuda: --batch-size 64 --size 192 --width 96 --photos 1024

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


class Photos(Dataset):
    def __init__(self, count, size, tags, seed=0):
        random = np.random.default_rng(seed)
        self.images = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        self.tags = (random.random((count, tags)) < 0.2).astype(np.float32)
        self.images[..., 0] //= 1 + self.tags[:, :1, None].astype(np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        # mend: photo-by-photo-in-double
        image = (image / 255.0 - np.array(MEAN)) / np.array(DEVIATION)  # waste: photo-by-photo-in-double
        image = np.ascontiguousarray(image.transpose(2, 0, 1))  # waste: photo-by-photo-in-double
        return torch.from_numpy(image).float(), torch.from_numpy(self.tags[index])  # waste: photo-by-photo-in-double
        # instead: return torch.from_numpy(image), torch.from_numpy(self.tags[index])


class Normalize(nn.Module):
    """What is left to do with a batch on the device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("scale", 1 / (255 * torch.tensor(DEVIATION).view(1, 3, 1, 1)))

    def forward(self, images):
        if images.dtype == torch.uint8:
            images = (images.permute(0, 3, 1, 2).float() - self.mean).mul_(self.scale)
        return images.contiguous(memory_format=torch.channels_last)


class Unit(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.path(x) + self.short(x), inplace=True)


class Tagger(nn.Module):
    def __init__(self, width, tags):
        super().__init__()
        self.normalize = Normalize()
        stem = [nn.Conv2d(3, width, 7, 4, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*stem)
        self.units = nn.Sequential(Unit(width, width, 2), Unit(width, 2 * width, 2), Unit(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, tags)

    def forward(self, images):
        x = self.units(self.stem(self.normalize(images)))
        return self.head(x.mean(dim=(2, 3)))


def endless(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--tags", type=int, default=24)
    parser.add_argument("--photos", type=int, default=240)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    photos = Photos(args.photos, args.size, args.tags)
    loader = DataLoader(photos, args.batch_size, shuffle=True, drop_last=True, pin_memory=device == "cuda")
    model = Tagger(args.width, args.tags).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)

    for step, (images, tags) in zip(range(args.steps), endless(loader), strict=False):
        images, tags = images.to(device, non_blocking=True), tags.to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            scores = model(images)
        loss = F.binary_cross_entropy_with_logits(scores.float(), tags)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
