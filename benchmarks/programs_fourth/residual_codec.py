"""Train a speech codec: strided convolutions, residual vector quantisation with several codebooks, a decoder."""

# cpu: --width 8 --batch-size 6 --samples 16000 --codes 2048
# cuda: --width 32 --batch-size 32 --samples 96000 --codes 1024

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STRIDES = (4, 5, 4)


class Unit(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.wide = nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation)
        self.point = nn.Conv1d(width, width, 1)

    def forward(self, x):
        return x + self.point(F.elu(self.wide(F.elu(x))))


class Codebook(nn.Module):
    def __init__(self, codes, dim):
        super().__init__()
        self.codes = codes
        self.vectors = nn.Parameter(torch.randn(codes, dim) * 0.1)

    def nearest(self, x):
        vectors = self.vectors.detach()
        return torch.addmm(vectors.square().sum(1), x, vectors.T, alpha=-2).argmin(1)

    def forward(self, x):
        index = self.nearest(x.detach())
        # mend: one-hot-times-table
        chosen = F.one_hot(index, self.codes).to(x.dtype)  # waste: one-hot-times-table
        vector = chosen @ self.vectors  # waste: one-hot-times-table
        # instead: vector = F.embedding(index, self.vectors)
        loss = F.mse_loss(vector, x.detach()) + 0.25 * F.mse_loss(x, vector.detach())
        return x + (vector - x).detach(), index, loss


class ResidualQuantizer(nn.Module):
    def __init__(self, books, codes, dim):
        super().__init__()
        self.books = nn.ModuleList(Codebook(codes, dim) for _ in range(books))

    def forward(self, x):
        batch, dim, frames = x.shape
        rest = x.transpose(1, 2).reshape(-1, dim)
        total, losses, indices = torch.zeros_like(rest), 0.0, []
        for book in self.books:
            vector, index, loss = book(rest)
            total, rest, losses = total + vector, rest - vector.detach(), losses + loss
            indices.append(index)
        return total.view(batch, frames, dim).transpose(1, 2), torch.stack(indices), losses / len(self.books)


class Codec(nn.Module):
    def __init__(self, width, codes, books, dim=64):
        super().__init__()
        encoder = [nn.Conv1d(1, width, 7, stride=2, padding=3)]
        for stride in STRIDES:
            encoder += [Unit(width, 1), Unit(width, 3), nn.ELU()]
            encoder += [nn.Conv1d(width, 2 * width, 2 * stride, stride=stride, padding=(stride + 1) // 2)]
            width *= 2
        self.encoder = nn.Sequential(*encoder, nn.Conv1d(width, dim, 3, padding=1))
        self.quantizer = ResidualQuantizer(books, codes, dim)
        decoder = [nn.Conv1d(dim, width, 3, padding=1)]
        for stride in reversed(STRIDES):
            decoder += [nn.ELU(), nn.ConvTranspose1d(width, width // 2, stride, stride=stride), Unit(width // 2, 1)]
            width //= 2
        self.decoder = nn.Sequential(*decoder, nn.ELU(), nn.ConvTranspose1d(width, 1, 2, stride=2))

    def forward(self, wave):
        code, indices, loss = self.quantizer(self.encoder(wave))
        return self.decoder(code), indices, loss


def spectral_loss(given, wanted, windows):
    total = 0.0
    for window in windows:
        size = window.numel()
        both = torch.cat([given, wanted]).squeeze(1)
        spectrum = torch.stft(both, size, size // 4, window=window, return_complex=True).abs()
        a, b = spectrum.clamp(min=1e-4).log().chunk(2)
        total = total + F.l1_loss(a, b)
    return total / len(windows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--codes", type=int, default=1024)
    parser.add_argument("--books", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    time = torch.arange(args.samples, device=device) / 16000
    pitch = 80 + 400 * torch.rand(96, 3, 1, device=device)
    waves = torch.sin(2 * torch.pi * pitch * time).mean(1, keepdim=True)

    model = Codec(args.width, args.codes, args.books).to(device)
    windows = [torch.hann_window(size, device=device) for size in (256, 1024)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.5, 0.9), fused=True)
    usage = torch.zeros(args.codes, device=device)

    for step in range(args.steps):
        wave = waves[torch.randint(0, waves.size(0), (args.batch_size,), device=device)]
        restored, indices, commitment = model(wave)
        length = min(restored.size(-1), wave.size(-1))
        restored, wanted = restored[..., :length], wave[..., :length]
        loss = F.l1_loss(restored, wanted) + spectral_loss(restored, wanted, windows) + commitment
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        usage.index_add_(0, indices[0], torch.ones_like(indices[0], dtype=usage.dtype))
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} codes in use {(usage > 0).sum().item()}")
        # step


if __name__ == "__main__":
    main()
