"""Trains a vocoder: a generator makes waves out of mel spectrograms, discriminators tell them from recorded ones."""

# cpu: --channels 64 --batch-size 2 --frames 16 --judged 16
# cuda: --channels 512 --batch-size 64 --frames 32 --judged 64

import argparse

import torch
import torch.nn.functional as F
from torch import nn

MELS = 80
HOP = 256


class Residual(nn.Module):
    def __init__(self, channels, dilations=(1, 3, 9)):
        super().__init__()
        self.wide = nn.ModuleList([nn.Conv1d(channels, channels, 7, padding=3 * d, dilation=d) for d in dilations])
        self.narrow = nn.ModuleList([nn.Conv1d(channels, channels, 3, padding=1) for _ in dilations])

    def forward(self, x):
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(F.leaky_relu(wide(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Generator(nn.Module):
    """Frames to samples: 8 * 8 * 4 samples for every frame."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv1d(MELS, channels, 7, padding=3)
        stages = []
        for factor in (8, 8, 4):
            stages += [
                nn.LeakyReLU(0.1),
                nn.ConvTranspose1d(channels, channels // 2, 2 * factor, stride=factor, padding=factor // 2),
                Residual(channels // 2),
            ]
            channels //= 2
        self.stages = nn.Sequential(*stages)
        self.last = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, mels):
        return self.last(F.leaky_relu(self.stages(self.first(mels)), 0.1)).tanh()


class Discriminator(nn.Module):
    """Looks at waves whose samples are averaged by `scale`."""

    def __init__(self, channels, scale):
        super().__init__()
        self.scale = scale
        self.layers = nn.ModuleList(
            [
                nn.Conv1d(1, channels, 15, padding=7),
                nn.Conv1d(channels, 2 * channels, 15, stride=4, padding=7),
                nn.Conv1d(2 * channels, 4 * channels, 15, stride=4, padding=7),
                nn.Conv1d(4 * channels, 4 * channels, 5, padding=2),
            ]
        )
        self.verdict = nn.Conv1d(4 * channels, 1, 3, padding=1)

    def forward(self, wave):
        x = F.avg_pool1d(wave, self.scale) if self.scale > 1 else wave
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
        return self.verdict(x)


def judge(discriminators, wave):
    return [discriminator(wave) for discriminator in discriminators]


def apart(verdicts, wanted):
    """How far the verdicts are from the wanted one."""
    return sum((verdict.float() - wanted).square().mean() for verdict in verdicts)


class Spectrum(nn.Module):
    """The logarithm of the magnitudes of short pieces of a wave."""

    def __init__(self, size=512):
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, wave):
        pieces = torch.stft(wave.float().squeeze(1), self.size, self.size // 4, window=self.window, return_complex=True)
        return torch.view_as_real(pieces).square().sum(-1).add(1e-6).log()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--judged", type=int, default=64, help="channels of the discriminators' first layers")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    generator = Generator(args.channels).to(device)
    discriminators = nn.ModuleList([Discriminator(args.judged, scale) for scale in (1, 2)]).to(device)
    spectrum = Spectrum().to(device)
    options = {"lr": args.lr, "betas": (0.8, 0.99), "fused": True}
    optimizer_g = torch.optim.AdamW(generator.parameters(), **options)
    optimizer_d = torch.optim.AdamW(discriminators.parameters(), **options)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    clips = 8
    recorded = torch.rand(clips, args.batch_size, 1, args.frames * HOP, device=device) * 2 - 1
    spectra = torch.randn(clips, args.batch_size, MELS, args.frames, device=device)

    for step in range(args.steps):
        wave, mels = recorded[step % clips], spectra[step % clips]

        with mixed:
            fake = generator(mels)  # waste: synthesized-twice
            # instead: fake = generator(mels)
            loss_d = apart(judge(discriminators, wave), 1.0) + apart(judge(discriminators, fake.detach()), 0.0)
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()

        discriminators.requires_grad_(False)
        with mixed:
            fake = generator(mels)  # waste: synthesized-twice
            # instead:
            loss_g = apart(judge(discriminators, fake), 1.0)
        loss_g = loss_g + 10 * F.l1_loss(spectrum(fake), spectrum(wave))
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        discriminators.requires_grad_(True)

        if step % 50 == 0:
            print(f"step {step}: generator {loss_g.item():.3f}, discriminators {loss_d.item():.3f}")
        # step


if __name__ == "__main__":
    main()
