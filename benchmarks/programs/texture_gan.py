"""Trains a generator of textures against a discriminator, with the hinge loss."""

# cpu: --channels 8 --batch-size 4
# cuda: --channels 64 --batch-size 256

import argparse
import functools

import torch
import torch.nn.functional as F
from torch import nn

SIDE = 64


class Widen(nn.Module):
    """Twice the side, other channels."""

    def __init__(self, before, after):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.layers(x)


class Generator(nn.Module):
    def __init__(self, latent, channels):
        super().__init__()
        self.first = nn.Linear(latent, 8 * channels * 4 * 4)
        self.stages = nn.Sequential(
            Widen(8 * channels, 8 * channels),
            Widen(8 * channels, 4 * channels),
            Widen(4 * channels, 2 * channels),
            Widen(2 * channels, channels),
        )
        self.out = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, latent):
        x = self.first(latent).unflatten(1, (-1, 4, 4)).contiguous(memory_format=torch.channels_last)
        return self.out(self.stages(x)).tanh()


def narrow(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.LeakyReLU(0.2, inplace=True),
    )


class Discriminator(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            narrow(channels, 2 * channels),
            narrow(2 * channels, 4 * channels),
            narrow(4 * channels, 8 * channels),
            nn.Flatten(),
            nn.Linear(8 * channels * 4 * 4, 1),
        )

    def forward(self, pictures):
        return self.layers(pictures).float()


def stripes(count, device):
    """Textures to learn from: waves of some directions and colors."""
    places = torch.linspace(-1, 1, SIDE, device=device)
    direction = torch.randn(count, 2, 1, 1, device=device) * 6
    color = torch.rand(count, 3, 1, 1, device=device)
    waves = torch.sin(direction[:, :1] * places + direction[:, 1:] * places[:, None])
    return (waves * color).contiguous(memory_format=torch.channels_last)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--latent", type=int, default=128)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
    generator = Generator(args.latent, args.channels).to(device, memory_format=torch.channels_last)
    discriminator = Discriminator(args.channels).to(device, memory_format=torch.channels_last)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999), fused=True)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999), fused=True)
    batches = [stripes(args.batch_size, device) for _ in range(4)]
    for step in range(args.steps):
        real = batches[step % len(batches)]
        with precision():
            fake = generator(torch.randn(args.batch_size, args.latent, device=device))
            score = discriminator(real)
            fake_score = discriminator(fake)  # waste: fake-not-detached
            # instead: fake_score = discriminator(fake.detach())
            discriminator_loss = F.relu(1 - score).mean() + F.relu(1 + fake_score).mean()
        discriminator_optimizer.zero_grad()
        discriminator_loss.backward(retain_graph=True)  # waste: fake-not-detached
        # instead: discriminator_loss.backward()
        discriminator_optimizer.step()

        discriminator.requires_grad_(False)
        with precision():
            generator_loss = -discriminator(fake).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        discriminator.requires_grad_(True)
        if step % 50 == 0:
            print(f"step {step}: discriminator {discriminator_loss.item():.4f}, generator {generator_loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
