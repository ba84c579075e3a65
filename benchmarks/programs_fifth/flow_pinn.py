"""A physics-informed network for a two-dimensional incompressible flow: velocities and pressure of (x, y, t)."""

# cpu: --points 1200 --width 48 --depth 4
# cuda: --points 65536 --width 256 --depth 6

import argparse
import math

import torch
from torch import nn

VISCOSITY = 0.05


class Field(nn.Module):
    """tanh layers on the scaled coordinates; outputs the two velocities and the pressure."""

    def __init__(self, width, depth):
        super().__init__()
        sizes = [3] + [width] * depth
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:], strict=False):
            layer = nn.Linear(inputs, outputs)
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, points):
        return self.net(points)


def slope(output, inputs):
    return torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True)


def residuals(model, x, y, t):
    u, v, p = model(torch.cat([x, y, t], dim=1)).split(1, dim=1)
    # mend: one-pass-per-coordinate
    (u_x,) = slope(u, x)  # waste: one-pass-per-coordinate
    (u_y,) = slope(u, y)  # waste: one-pass-per-coordinate
    (u_t,) = slope(u, t)  # waste: one-pass-per-coordinate
    (v_x,) = slope(v, x)  # waste: one-pass-per-coordinate
    (v_y,) = slope(v, y)  # waste: one-pass-per-coordinate
    (v_t,) = slope(v, t)  # waste: one-pass-per-coordinate
    (p_x,) = slope(p, x)  # waste: one-pass-per-coordinate
    (p_y,) = slope(p, y)  # waste: one-pass-per-coordinate
    # instead: u_x, u_y, u_t = slope(u, (x, y, t))
    # instead: v_x, v_y, v_t = slope(v, (x, y, t))
    # instead: p_x, p_y = slope(p, (x, y))
    (u_xx,) = slope(u_x, x)
    (u_yy,) = slope(u_y, y)
    (v_xx,) = slope(v_x, x)
    (v_yy,) = slope(v_y, y)
    momentum_x = u_t + u * u_x + v * u_y + p_x - VISCOSITY * (u_xx + u_yy)
    momentum_y = v_t + u * v_x + v * v_y + p_y - VISCOSITY * (v_xx + v_yy)
    return momentum_x, momentum_y, u_x + v_y


def taylor_green(x, y, t):
    decay = torch.exp(-2 * VISCOSITY * t)
    u = -torch.cos(x) * torch.sin(y) * decay
    v = torch.sin(x) * torch.cos(y) * decay
    p = -0.25 * (torch.cos(2 * x) + torch.cos(2 * y)) * decay.square()
    return torch.cat([u, v, p], dim=1)


class Sampler:
    """Points inside the domain, and on its edges and at the first moment, where the flow is known."""

    def __init__(self, points, device):
        self.points, self.device = points, device

    def inside(self):
        columns = torch.rand(3, self.points, 1, device=self.device)
        x, y, t = (columns[0] * math.pi, columns[1] * math.pi, columns[2])
        return x.requires_grad_(), y.requires_grad_(), t.requires_grad_()

    def known(self):
        count = self.points // 8
        x, y, t = torch.rand(3, count, 1, device=self.device)
        x, y = x * math.pi, y * math.pi
        side = torch.randint(0, 3, (count, 1), device=self.device)
        edge = math.pi * torch.randint(0, 2, (count, 1), device=self.device)
        x = torch.where(side == 0, edge, x)
        y = torch.where(side == 1, edge, y)
        t = torch.where(side == 2, 0.0, t)
        return torch.cat([x, y, t], dim=1), taylor_green(x, y, t)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--points", type=int, default=1200)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--known-weight", type=float, default=10.0)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Field(args.width, args.depth).to(device)
    sampler = Sampler(args.points, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    for step in range(args.steps):
        momentum_x, momentum_y, divergence = residuals(model, *sampler.inside())
        physics = momentum_x.square().mean() + momentum_y.square().mean() + divergence.square().mean()
        points, truth = sampler.known()
        known = (model(points) - truth).square().mean()
        loss = physics + args.known_weight * known
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: physics {physics.item():.5f} known {known.item():.5f}")
        # step


if __name__ == "__main__":
    main()
