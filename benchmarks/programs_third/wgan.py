"""Trains a convolutional GAN with the hinge loss on synthetic 64x64 images."""

# cpu: --width 16 --batch-size 16
# cuda: --width 96 --batch-size 256

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class UpBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Generator(nn.Module):
    def __init__(self, latent_dim, width):
        super().__init__()
        self.width = width
        self.project = nn.Linear(latent_dim, 8 * width * 4 * 4)
        self.blocks = nn.Sequential(
            UpBlock(8 * width, 4 * width),
            UpBlock(4 * width, 2 * width),
            UpBlock(2 * width, width),
            UpBlock(width, width),
        )
        self.to_rgb = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, z):
        h = self.project(z).view(-1, 8 * self.width, 4, 4)
        return torch.tanh(self.to_rgb(self.blocks(h)))


class DownBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, out_channels)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), 0.2, inplace=True)


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            DownBlock(width, 2 * width),
            DownBlock(2 * width, 4 * width),
            DownBlock(4 * width, 8 * width),
            DownBlock(8 * width, 8 * width),
        )
        self.score = nn.Linear(8 * width * 4 * 4, 1)

    def forward(self, x):
        return self.score(self.blocks(x).flatten(1))


def make_images(count, size, generator):
    """Smooth random blobs in [-1, 1]."""
    coarse = torch.randn(count, 3, 8, 8, generator=generator)
    return torch.tanh(F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False))


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
        nn.init.normal_(module.weight, 0.0, 0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--latent-dim", type=int, default=128)
    parser.add_argument("--n-critic", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    images = make_images(2048, 64, torch.Generator().manual_seed(1)).to(device)
    generator = Generator(args.latent_dim, args.width).apply(init_weights).to(device)
    critic = Critic(args.width).apply(init_weights).to(device)
    if device == "cuda":
        images = images.to(memory_format=torch.channels_last)
        generator = generator.to(memory_format=torch.channels_last)
        critic = critic.to(memory_format=torch.channels_last)
    g_params = list(generator.parameters())
    opt_g = torch.optim.Adam(g_params, lr=args.lr, betas=(0.0, 0.9), fused=True)
    opt_d = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.0, 0.9), fused=True)

    for step in range(args.steps):
        for _ in range(args.n_critic):
            real = images[torch.randint(len(images), (args.batch_size,), device=device)]
            z = torch.randn(args.batch_size, args.latent_dim, device=device)
            opt_d.zero_grad()
            with amp:
                fake = generator(z)  # waste: generator-in-critic-backward
                # instead: with torch.no_grad():
                # instead:     fake = generator(z)
                d_loss = F.relu(1.0 - critic(real)).mean() + F.relu(1.0 + critic(fake)).mean()
            d_loss.backward()
            opt_d.step()

        z = torch.randn(args.batch_size, args.latent_dim, device=device)
        opt_g.zero_grad()
        with amp:
            g_loss = -critic(generator(z)).mean()
        g_loss.backward()  # waste: critic-grads-in-generator-step
        # instead: g_loss.backward(inputs=g_params)
        opt_g.step()

        if step % 10 == 0:
            print(f"step {step}: critic {d_loss.item():.5f} generator {g_loss.item():.5f}")
        # step


if __name__ == "__main__":
    main()
