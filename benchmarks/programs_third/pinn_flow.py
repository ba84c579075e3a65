"""Fits a physics-informed network to the unsteady 2-d Navier-Stokes equations (Taylor-Green vortex)."""

# cpu: --points 1000 --width 64 --depth 5
# cuda: --points 40000 --width 256 --depth 6

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class FlowNet(nn.Module):
    """(x, y, t) -> (u, v, p)."""

    def __init__(self, width, depth):
        super().__init__()
        self.input = nn.Linear(3, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.output = nn.Linear(width, 3)

    def forward(self, x, y, t):
        h = torch.tanh(self.input(torch.cat([x, y, t], dim=1)))
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.output(h).split(1, dim=1)


def grad(output, *inputs):
    grads = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True)
    return grads[0] if len(grads) == 1 else grads


class NavierStokes(nn.Module):
    """Momentum and continuity residuals at the collocation points."""

    def __init__(self, viscosity):
        super().__init__()
        self.viscosity = viscosity

    def forward(self, net, x, y, t):
        u, v, p = net(x, y, t)
        # mend: one-derivative-per-call
        u_x = grad(u, x)  # waste: one-derivative-per-call
        u_y = grad(u, y)  # waste: one-derivative-per-call
        u_t = grad(u, t)  # waste: one-derivative-per-call
        v_x = grad(v, x)  # waste: one-derivative-per-call
        v_y = grad(v, y)  # waste: one-derivative-per-call
        v_t = grad(v, t)  # waste: one-derivative-per-call
        p_x = grad(p, x)  # waste: one-derivative-per-call
        p_y = grad(p, y)  # waste: one-derivative-per-call
        # instead: u_x, u_y, u_t = grad(u, x, y, t)
        # instead: v_x, v_y, v_t = grad(v, x, y, t)
        # instead: p_x, p_y = grad(p, x, y)
        u_xx = grad(u_x, x)
        u_yy = grad(u_y, y)
        v_xx = grad(v_x, x)
        v_yy = grad(v_y, y)
        f_u = u_t + u * u_x + v * u_y + p_x - self.viscosity * (u_xx + u_yy)
        f_v = v_t + u * v_x + v * v_y + p_y - self.viscosity * (v_xx + v_yy)
        return f_u, f_v, u_x + v_y


def taylor_green(x, y, t, viscosity):
    decay = torch.exp(-2 * viscosity * t)
    u = torch.cos(x) * torch.sin(y) * decay
    v = -torch.sin(x) * torch.cos(y) * decay
    p = -0.25 * (torch.cos(2 * x) + torch.cos(2 * y)) * decay**2
    return u, v, p


def sample_points(count, device):
    x = 2 * math.pi * torch.rand(count, 1, device=device)
    y = 2 * math.pi * torch.rand(count, 1, device=device)
    t = torch.rand(count, 1, device=device)
    return x, y, t


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--viscosity", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    net = FlowNet(args.width, args.depth).to(device)
    equations = NavierStokes(args.viscosity)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.steps, 1))

    data_points = sample_points(args.points // 4, device)
    data_values = torch.cat(taylor_green(*data_points, args.viscosity), dim=1)

    for step in range(args.steps):
        x, y, t = (c.requires_grad_() for c in sample_points(args.points, device))
        residuals = equations(net, x, y, t)
        physics_loss = sum(r.square().mean() for r in residuals)
        data_loss = F.mse_loss(torch.cat(net(*data_points), dim=1), data_values)
        loss = physics_loss + 10.0 * data_loss

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

        if step % 10 == 0:
            print(f"step {step}: physics {physics_loss.item():.6f} data {data_loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
