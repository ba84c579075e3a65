"""Simulate batches of latent states with a neural differential equation and an adaptive Dormand-Prince solver."""

# cpu: --batch 256 --state 32 --width 448
# cuda: --batch 8192 --state 64 --width 2048

import argparse

import torch
import torch.nn as nn

NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERRORS = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


class Dynamics(nn.Module):
    def __init__(self, state, width):
        super().__init__()
        self.enter = nn.Linear(state + 1, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, state)
        with torch.no_grad():
            self.middle.weight.mul_(3)
            self.leave.weight.mul_(4)

    def forward(self, time, y):
        x = torch.cat([y, y.new_full((y.shape[0], 1), time)], dim=1)
        x = torch.tanh(self.enter(x))
        x = torch.tanh(self.middle(x))
        return self.leave(x) - 0.5 * y


class Decoder(nn.Module):
    def __init__(self, state, width, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state, width), nn.GELU(), nn.Linear(width, outputs))

    def forward(self, y):
        return self.net(y)


def combine(y, step, weights, slopes):
    for weight, slope in zip(weights, slopes):
        if weight:
            y = torch.add(y, slope, alpha=step * weight)
    return y


def solve(dynamics, y, end, rtol=1e-4, atol=1e-5):
    """State at the end, and the number of steps that were tried."""
    time, tried = 0.0, 0
    slope = dynamics(time, y)
    step = 0.02 * (y.norm() / slope.norm()).item()
    while time < end - 1e-9:
        step = min(step, end - time)
        slopes = [dynamics(time, y)]  # waste: last-stage-not-carried
        # instead: slopes = [slope]
        for node, weights in zip(NODES[1:], STAGES):
            proposal = combine(y, step, weights, slopes)
            slopes.append(dynamics(time + node * step, proposal))
        error = combine(torch.zeros_like(y), step, ERRORS, slopes)
        scale = atol + rtol * torch.maximum(y.abs(), proposal.abs())
        ratio = (error / scale).square().mean().sqrt().item()
        if ratio <= 1:
            time += step
            # mend: last-stage-not-carried
            y = proposal
            # instead: y, slope = proposal, slopes[-1]
        step *= min(5.0, max(0.2, 0.9 * max(ratio, 1e-9) ** -0.2))
        tried += 1
    return y, tried


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--state", type=int, default=32)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--outputs", type=int, default=16)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    dynamics = Dynamics(args.state, args.width).to(device).eval()
    decoder = Decoder(args.state, args.width, args.outputs).to(device).eval()
    starts = torch.randn(6, args.batch, args.state, device=device)

    with torch.inference_mode():
        for request in range(args.steps):
            y, tried = solve(dynamics, starts[request % len(starts)], end=2.0)
            outputs = decoder(y)
            if request % 10 == 0:
                print(f"request {request}: {tried} steps, mean {outputs.mean().item():.6f}")
            # step


if __name__ == "__main__":
    main()
