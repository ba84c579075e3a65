"""Train a neural audio codec: convolutions, residual vector quantization with moving averages, spectral losses."""

# cpu: --batch-size 4 --samples 4096 --channels 8 --entries 2048 --codebooks 6
# cuda: --batch-size 32 --samples 32768 --channels 32 --entries 2048 --codebooks 8

import argparse

import torch
import torch.nn.functional as F
from torch import nn

SCALES = (2048, 1024, 512, 256, 128)


class Residual(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.wide = nn.Conv1d(channels, channels, 7, padding=3 * dilation, dilation=dilation)
        self.point = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        return x + self.point(F.elu(self.wide(F.elu(x))))


class Codebook(nn.Module):
    """The entries follow the means of the vectors that chose them."""

    def __init__(self, entries, width, decay=0.99):
        super().__init__()
        self.decay = decay
        start = torch.randn(entries, width)
        self.register_buffer("entries", start)
        self.register_buffer("sums", start.clone())
        self.register_buffer("counts", torch.ones(entries))

    @torch.no_grad()
    def forward(self, vectors):
        distance = torch.addmm(self.entries.square().sum(dim=1), vectors, self.entries.T, alpha=-2)
        codes = distance.argmin(dim=1)
        # mend: one-hot-codes
        chosen = F.one_hot(codes, len(self.entries)).to(vectors.dtype)  # waste: one-hot-codes
        found = chosen @ self.entries  # waste: one-hot-codes
        sums = chosen.T @ vectors  # waste: one-hot-codes
        counts = chosen.sum(dim=0)  # waste: one-hot-codes
        # instead: found = F.embedding(codes, self.entries)
        # instead: sums = torch.zeros_like(self.sums).index_add_(0, codes, vectors)
        # instead: counts = torch.zeros_like(self.counts).index_add_(0, codes, torch.ones_like(vectors[:, 0]))
        if self.training:
            self.sums.lerp_(sums, 1 - self.decay)
            self.counts.lerp_(counts, 1 - self.decay)
            self.entries.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
        return found


class Codec(nn.Module):
    def __init__(self, channels, strides, width, codebooks, entries):
        super().__init__()
        encoder, decoder, c = [nn.Conv1d(1, channels, 7, padding=3)], [nn.Conv1d(channels, 1, 7, padding=3)], channels
        for stride in strides:
            encoder += [Residual(c, 1), Residual(c, 3), nn.ELU(), nn.Conv1d(c, 2 * c, 2 * stride, stride, stride // 2)]
            raised = nn.ConvTranspose1d(2 * c, c, 2 * stride, stride, stride // 2)
            decoder = [nn.ELU(), raised, Residual(c, 1), *decoder]
            c *= 2
        self.encoder = nn.Sequential(*encoder, nn.Conv1d(c, width, 3, padding=1))
        self.decoder = nn.Sequential(nn.Conv1d(width, c, 3, padding=1), *decoder)
        self.codebooks = nn.ModuleList(Codebook(entries, width) for _ in range(codebooks))

    def forward(self, audio):
        latents = self.encoder(audio)
        vectors = latents.transpose(1, 2).reshape(-1, latents.size(1))
        rest = vectors.detach()
        for codebook in self.codebooks:
            rest = rest - codebook(rest)
        quantized = vectors.detach() - rest
        commitment = F.mse_loss(vectors, quantized)
        passed = vectors + (quantized - vectors).detach()
        passed = passed.view(latents.size(0), -1, latents.size(1)).transpose(1, 2)
        return self.decoder(passed), commitment


class SpectralLoss(nn.Module):
    """Spectral convergence and the distance of log magnitudes, at several resolutions."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales
        for size in scales:
            self.register_buffer(f"window{size}", torch.hann_window(size), persistent=False)

    def magnitude(self, audio, size):
        window = getattr(self, f"window{size}")
        spectrum = torch.stft(audio, size, size // 8, window=window, return_complex=True)
        return torch.view_as_real(spectrum).square().sum(dim=-1).clamp(min=1e-7).sqrt()

    def convergence(self, fake, real):
        return (fake - real).norm() / real.norm()

    def log_distance(self, fake, real):
        return F.l1_loss(fake.log(), real.log())

    def forward(self, fake, real):
        fake, real = fake.squeeze(1), real.squeeze(1)
        total = 0.0
        for size in self.scales:
            # mend: spectra-per-term
            near = self.convergence(self.magnitude(fake, size), self.magnitude(real, size))  # waste: spectra-per-term
            far = self.log_distance(self.magnitude(fake, size), self.magnitude(real, size))  # waste: spectra-per-term
            total = total + near + far
            # instead: spectra = self.magnitude(fake, size), self.magnitude(real, size)
            # instead: total = total + self.convergence(*spectra) + self.log_distance(*spectra)
        return total / len(self.scales)


def make_audio(count, samples, device):
    time = torch.arange(samples, device=device) / 24000
    pitch = 80 + 800 * torch.rand(count, 6, 1, device=device)
    loudness = torch.rand(count, 6, 1, device=device)
    return (loudness * torch.sin(2 * torch.pi * pitch * time)).mean(dim=1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--codebooks", type=int, default=6)
    parser.add_argument("--entries", type=int, default=2048)
    parser.add_argument("--latent", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    strides = (2, 4, 4)
    codec = Codec(args.channels, strides, args.latent, args.codebooks, args.entries).to(device)
    spectral = SpectralLoss(SCALES).to(device)
    optimizer = torch.optim.AdamW(codec.parameters(), lr=3e-4, betas=(0.8, 0.99), fused=True)
    audio = make_audio(4 * args.batch_size, args.samples, device)

    for step in range(args.steps):
        real = audio[step % 4 * args.batch_size :][: args.batch_size]
        fake, commitment = codec(real)
        loss = spectral(fake, real) + F.l1_loss(fake, real) + 0.25 * commitment
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f} commitment {commitment.item():.5f}")
        # step


if __name__ == "__main__":
    main()
