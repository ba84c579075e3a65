"""Fits the hyperparameters of an exact Gaussian process with an ARD kernel by marginal likelihood."""

# cpu: --points 600 --features 8
# cuda: --points 4096 --features 16

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class ARDKernel(nn.Module):
    """Sum of a squared-exponential and a rational-quadratic kernel on the same scaled distances."""

    def __init__(self, features):
        super().__init__()
        self.raw_lengthscale = nn.Parameter(torch.full((features,), 1.0))
        self.raw_scale = nn.Parameter(torch.zeros(2))
        self.raw_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        lengthscale = F.softplus(self.raw_lengthscale)
        a, b = a / lengthscale, b / lengthscale
        squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2.0 * a @ b.T
        squared = squared.clamp(min=0.0)
        scale = F.softplus(self.raw_scale)
        alpha = F.softplus(self.raw_alpha)
        smooth = scale[0] * torch.exp(-0.5 * squared)
        rough = scale[1] * torch.exp(-alpha * torch.log1p(squared / (2.0 * alpha)))
        return smooth + rough


class LinearMean(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, x):
        return self.linear(x).squeeze(1)


class GaussianProcess(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.kernel = ARDKernel(features)
        self.mean = LinearMean(features)
        self.raw_noise = nn.Parameter(torch.tensor(-1.0))

    def covariance(self, x):
        noise = F.softplus(self.raw_noise) + 1e-4
        return self.kernel(x, x) + noise * torch.eye(len(x), dtype=x.dtype, device=x.device)

    def forward(self, x, y):
        """Negative log marginal likelihood per point."""
        residual = y - self.mean(x)
        k = self.covariance(x)
        # mend: explicit-inverse
        k_inv = torch.inverse(k)  # waste: explicit-inverse
        fit = residual @ k_inv @ residual
        logdet = torch.logdet(k)  # waste: explicit-inverse
        # instead: chol = torch.linalg.cholesky(k)
        # instead: half = torch.linalg.solve_triangular(chol, residual.unsqueeze(1), upper=False)
        # instead: fit = half.square().sum()
        # instead: logdet = 2.0 * chol.diagonal().log().sum()
        return 0.5 * (fit + logdet + len(y) * math.log(2.0 * math.pi)) / len(y)

    @torch.no_grad()
    def predict(self, x, y, x_new):
        chol = torch.linalg.cholesky(self.covariance(x))
        weights = torch.cholesky_solve((y - self.mean(x)).unsqueeze(1), chol)
        cross = self.kernel(x_new, x)
        mean = self.mean(x_new) + (cross @ weights).squeeze(1)
        half = torch.linalg.solve_triangular(chol, cross.T, upper=False)
        variance = F.softplus(self.kernel.raw_scale).sum() - half.square().sum(0)
        return mean, variance


def make_data(count, features, generator):
    x = torch.rand(count, features, generator=generator, dtype=torch.float64) * 4 - 2
    direction = torch.randn(features, 3, generator=generator, dtype=torch.float64) / features**0.5
    z = x @ direction
    y = torch.sin(2 * z[:, 0]) + 0.5 * z[:, 1].square() + 0.2 * z[:, 2]
    y = y + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)
    return x, (y - y.mean()) / y.std()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--test-points", type=int, default=100)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    x, y = make_data(args.points + args.test_points, args.features, torch.Generator().manual_seed(1))
    x, y = x.to(device), y.to(device)
    x_train, y_train = x[: args.points], y[: args.points]
    x_test, y_test = x[args.points :], y[args.points :]

    model = GaussianProcess(args.features).double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    for step in range(args.steps):
        loss = model(x_train, y_train)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: nll {loss.item():.6f}")
        # step

    mean, variance = model.predict(x_train, y_train, x_test)
    error = (mean - y_test).square().mean().sqrt()
    print(f"test rmse {error.item():.5f}, mean deviation {variance.clamp(min=0).sqrt().mean().item():.5f}")


if __name__ == "__main__":
    main()
