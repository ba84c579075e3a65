"""Trains a robot arm to reach targets: soft actor-critic with many critics, the most careful of which counts."""

# cpu: --hidden 128 --critics 5 --batch-size 256 --arms 64 --memory 20000
# cuda: --hidden 1536 --critics 10 --batch-size 2048 --arms 512 --memory 500000

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

JOINTS = 12


class EnsembleLinear(nn.Module):
    """A linear layer for each member of an ensemble: (members, batch, inputs) to (members, batch, outputs)."""

    def __init__(self, members, inputs, outputs):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x):
        members = range(len(self.weight))
        return torch.stack([x[i] @ self.weight[i] + self.bias[i] for i in members])  # waste: critics-one-by-one
        # instead: return torch.baddbmm(self.bias, x, self.weight)


class Critics(nn.Module):
    def __init__(self, members, inputs, hidden):
        super().__init__()
        self.members = members
        self.layers = nn.Sequential(
            EnsembleLinear(members, inputs, hidden),
            nn.ReLU(inplace=True),
            EnsembleLinear(members, hidden, hidden),
            nn.ReLU(inplace=True),
            EnsembleLinear(members, hidden, hidden),
            nn.ReLU(inplace=True),
            EnsembleLinear(members, hidden, 1),
        )

    def forward(self, states, actions):
        x = torch.cat([states, actions], dim=1)
        return self.layers(x.expand(self.members, -1, -1))[..., 0]


class Actor(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, 2 * JOINTS),
        )

    def forward(self, states):
        """Actions that are drawn, and the logarithms of their densities."""
        mean, spread = self.layers(states).chunk(2, dim=-1)
        spread = spread.clamp(-5.0, 1.0)
        noise = torch.randn_like(mean)
        actions = torch.tanh(mean + spread.exp() * noise)
        density = -0.5 * noise.square() - spread - torch.log(1.0 - actions.square() + 1e-6)
        return actions, density.sum(1)


class Arms:
    """Arms that move their joints towards targets, and the memory of what they did; all of it on the device."""

    def __init__(self, count, memory, device):
        self.joints = torch.zeros(count, JOINTS, device=device)
        self.targets = torch.rand(count, JOINTS, device=device) * 2 - 1
        self.inputs, self.count, self.written = 2 * JOINTS, count, 0
        self.memory = torch.randn(memory // count * count, 2 * self.inputs + JOINTS + 1, device=device)

    def state(self):
        return torch.cat([self.joints, self.targets - self.joints], dim=1)

    def move(self, actions):
        before = self.state()
        self.joints = (self.joints + 0.1 * actions).clamp(-1.0, 1.0)
        after = self.state()
        reward = -(self.targets - self.joints).norm(dim=1, keepdim=True)
        self.memory[self.written : self.written + self.count] = torch.cat([before, actions, reward, after], dim=1)
        self.written = (self.written + self.count) % len(self.memory)

    def recall(self, size):
        rows = torch.randint(len(self.memory), (size,), device=self.memory.device)
        states, actions, rewards, after = self.memory[rows].split([self.inputs, JOINTS, 1, self.inputs], dim=1)
        return states, actions, rewards[:, 0], after


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--critics", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--arms", type=int, default=512)
    parser.add_argument("--memory", type=int, default=500_000)
    parser.add_argument("--discount", type=float, default=0.98)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arms = Arms(args.arms, args.memory, device)
    actor = Actor(arms.inputs, args.hidden).to(device)
    critics = Critics(args.critics, arms.inputs + JOINTS, args.hidden).to(device)
    slow_critics = copy.deepcopy(critics).requires_grad_(False)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-4, fused=True)
    fast, slow = list(critics.parameters()), list(slow_critics.parameters())

    for step in range(args.steps):
        with torch.no_grad():
            arms.move(actor(arms.state())[0])
            states, actions, rewards, after = arms.recall(args.batch_size)
            next_actions, density = actor(after)
            worst = slow_critics(after, next_actions).amin(0)
            aims = rewards + args.discount * (worst - args.temperature * density)
        values = critics(states, actions)
        critic_loss = F.mse_loss(values, aims.expand_as(values))
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        # mend: gradients-of-critics-for-the-actor
        # instead: critics.requires_grad_(False)
        drawn, density = actor(states)
        worst = critics(states, drawn).amin(0)
        actor_loss = (args.temperature * density - worst).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()  # waste: gradients-of-critics-for-the-actor
        # instead: actor_loss.backward()
        # instead: critics.requires_grad_(True)
        actor_optimizer.step()
        torch._foreach_lerp_(slow, fast, 0.005)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: critics {critic_loss.item():.3f}, actor {actor_loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
