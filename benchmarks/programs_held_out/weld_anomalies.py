"""Marks anomalous welds in photos: an autoencoder that knows good welds draws each one, and large errors are marked."""

# cpu: --channels 8 --size 96 --batch-size 16 --photos 256
# cuda: --channels 64 --size 256 --batch-size 192 --photos 576

import argparse
import gc

import torch
import torch.nn.functional as F
from torch import nn


def convolutions(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class WeldAutoencoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            convolutions(channels, channels),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            convolutions(2 * channels, 2 * channels),
            nn.Conv2d(2 * channels, 4 * channels, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            convolutions(4 * channels, 4 * channels),
        )
        self.narrow = nn.Conv2d(4 * channels, 32, 1)
        self.decoder = nn.Sequential(
            convolutions(32, 4 * channels),
            nn.ConvTranspose2d(4 * channels, 2 * channels, 2, stride=2),
            nn.ReLU(inplace=True),
            convolutions(2 * channels, 2 * channels),
            nn.ConvTranspose2d(2 * channels, channels, 2, stride=2),
            nn.ReLU(inplace=True),
            convolutions(channels, channels),
            nn.ConvTranspose2d(channels, 3, 2, stride=2),
        )

    def forward(self, photos):
        return self.decoder(self.narrow(self.encoder(photos)))


class Photos:
    """Made-up photos as bytes in main memory: a bright seam on a dark plate, and on some of them a spot."""

    def __init__(self, count, size, pinned):
        generator = torch.Generator().manual_seed(3)
        noise = torch.randint(60, (8, size, size, 3), generator=generator, dtype=torch.uint8)
        self.bytes = noise.repeat(count // 8, 1, 1, 1)
        self.bytes[:, size // 2 - 8 : size // 2 + 8] += 120
        self.bytes[::37, 20:30, 20:30] = 250
        if pinned:
            self.bytes = self.bytes.pin_memory()

    def batches(self, size):
        while True:
            yield from self.bytes.split(size)


def anomaly_scores(model, photos):
    """The largest error of a photo, averaged over small squares."""
    error = (model(photos) - photos).square().mean(1, keepdim=True)
    return F.avg_pool2d(error, 8).amax((1, 2, 3)).float()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--photos", type=int, default=576)
    parser.add_argument("--batch-size", type=int, default=192)
    parser.add_argument("--threshold", type=float, default=3.0, help="in standard deviations")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = WeldAutoencoder(args.channels).to(device, dtype).to(memory_format=torch.channels_last).eval()
    batches = Photos(args.photos, args.size, pinned=device.type == "cuda").batches(args.batch_size)
    collected = []
    with torch.inference_mode():
        for step in range(args.steps):
            photos = next(batches).to(device, non_blocking=True)
            photos = photos.permute(0, 3, 1, 2).to(dtype).div_(255.0)  # channels last already
            collected.append(anomaly_scores(model, photos))
            if len(collected) == 20:
                scores = torch.cat(collected)
                marked = (scores - scores.mean()) / scores.std() > args.threshold
                print(f"batch {step + 1}: {int(marked.sum())} of {len(scores)} welds marked")
                collected.clear()
            # mend: memory-given-back-after-every-batch
            del photos
            gc.collect()  # waste: memory-given-back-after-every-batch
            torch.cuda.empty_cache()  # waste: memory-given-back-after-every-batch
            # instead:
            # step


if __name__ == "__main__":
    main()
