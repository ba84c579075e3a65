"""Learns to steer a walking machine from recorded moves alone, by conservative Q-learning."""

# cpu: --hidden 64 --batch-size 128 --recorded 200000
# cuda: --hidden 1024 --batch-size 1024 --recorded 500000

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

SENSES = 24
JOINTS = 6


class Recording:
    """Moves that somebody made with the machine, on the device."""

    def __init__(self, count, device):
        self.before = torch.randn(count, SENSES, device=device)
        self.moves = torch.tanh(self.before[:, :JOINTS] + 0.3 * torch.randn(count, JOINTS, device=device))
        self.rewards = self.before[:, 0] - 0.1 * self.moves.square().sum(1)
        self.after = 0.9 * self.before + 0.1 * torch.randn(count, SENSES, device=device)
        self.over = (torch.rand(count, device=device) < 0.01).float()

    def draw(self, count):
        rows = torch.randperm(len(self.rewards))[:count].to(self.rewards.device)  # waste: permutes-all-to-draw-a-few
        # instead: rows = torch.randint(len(self.rewards), (count,), device=self.rewards.device)
        return [column[rows] for column in (self.before, self.moves, self.rewards, self.after, self.over)]


class Critic(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SENSES + JOINTS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, seen, moves):
        return self.layers(torch.cat([seen, moves], dim=-1)).squeeze(-1)


class Actor(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SENSES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2 * JOINTS)
        )

    def forward(self, seen, count):
        """Some moves for everything seen, and the logarithms of their densities."""
        mean, log_spread = self.layers(seen)[:, None].chunk(2, dim=-1)
        log_spread = log_spread.clamp(-5, 2)
        noise = torch.randn(seen.shape[0], count, JOINTS, device=seen.device)
        raw = mean + log_spread.exp() * noise
        log_density = -0.5 * noise.square() - log_spread - 0.5 * math.log(2 * math.pi)
        squashed = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return torch.tanh(raw), (log_density - squashed).sum(-1)


def optimism(critic, seen, candidates):
    """How highly a critic thinks of moves that nobody made."""
    # mend: one-candidate-at-a-time
    values = []
    for k in range(candidates.shape[1]):
        values.append(critic(seen, candidates[:, k]))  # waste: one-candidate-at-a-time
    values = torch.stack(values, dim=1)
    # instead: values = critic(seen[:, None].expand(-1, candidates.shape[1], -1), candidates)
    return values.logsumexp(1).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--recorded", type=int, default=500000)
    parser.add_argument("--candidates", type=int, default=8, help="of the actor, and as many at random")
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--caution", type=float, default=1.0)
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recording = Recording(args.recorded, device)
    actor = Actor(args.hidden).to(device)
    critics = nn.ModuleList([Critic(args.hidden), Critic(args.hidden)]).to(device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    critic_weights, target_weights = list(critics.parameters()), list(targets.parameters())
    critic_optimizer = torch.optim.Adam(critic_weights, lr=3e-4, fused=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-4, fused=True)
    for step in range(args.steps):
        seen, moves, rewards, after, over = recording.draw(args.batch_size)

        with torch.no_grad():
            following, log_density = actor(after, 1)
            worst = torch.minimum(*(target(after, following[:, 0]) for target in targets))
            wanted = rewards + args.discount * (1 - over) * (worst - args.temperature * log_density[:, 0])
            chosen = actor(seen, args.candidates)[0]
            candidates = torch.cat([chosen, torch.rand_like(chosen) * 2 - 1], dim=1)
        critic_loss = 0.0
        for critic in critics:
            values = critic(seen, moves)
            caution = optimism(critic, seen, candidates) - values.mean()
            critic_loss = critic_loss + F.mse_loss(values, wanted) + args.caution * caution
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        critics.requires_grad_(False)
        proposed, log_density = actor(seen, 1)
        worth = torch.minimum(*(critic(seen, proposed[:, 0]) for critic in critics))
        actor_loss = (args.temperature * log_density[:, 0] - worth).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        critics.requires_grad_(True)

        with torch.no_grad():
            torch._foreach_lerp_(target_weights, critic_weights, 0.005)
        if step % 50 == 0:
            print(f"step {step}: critics {critic_loss.item():.4f}, actor {actor_loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
