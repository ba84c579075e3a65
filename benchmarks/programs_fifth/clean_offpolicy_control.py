"""An off-policy agent with twin critics (TD3): a ring buffer on the device, critics as one batched network."""

# cpu: --batch-size 2048 --width 128 --capacity 8192
# cuda: --batch-size 65536 --width 1024 --capacity 1000000
# block: 2

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Actor(nn.Module):
    def __init__(self, observation, actions, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(observation, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, actions),
            nn.Tanh(),
        )

    def forward(self, observation):
        return self.net(observation)


class Critics(nn.Module):
    """Several critics side by side: (critics, batch) values, of the first ones only if asked so."""

    def __init__(self, inputs, width, count=2):
        super().__init__()
        sizes = [inputs, width, width, 1]
        self.count = count
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for a, b in zip(sizes, sizes[1:], strict=False):
            bound = 1 / math.sqrt(a)
            self.weights.append(torch.empty(count, a, b).uniform_(-bound, bound))
            self.biases.append(torch.empty(count, 1, b).uniform_(-bound, bound))

    def forward(self, observation, action, first=None):
        count = first or self.count
        x = torch.cat([observation, action], dim=-1).expand(count, -1, -1)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = F.relu(torch.baddbmm(bias[:count], x, weight[:count]), inplace=True)
        return torch.baddbmm(self.biases[-1][:count], x, self.weights[-1][:count]).squeeze(-1)


class Replay:
    """Every transition is one row: a batch is one gather."""

    def __init__(self, capacity, observation, actions, device):
        self.sizes = [observation, actions, 1, 1, observation]
        self.rows = torch.randn(capacity, sum(self.sizes), device=device)
        reward, alive = observation + actions, observation + actions + 1
        self.rows[:, observation:reward].clamp_(-1, 1)
        self.rows[:, reward] = self.rows[:, :observation].mean(dim=1)
        self.rows[:, alive] = (self.rows[:, alive] > -2).float()

    def sample(self, count):
        chosen = torch.randint(0, len(self.rows), (count,), device=self.rows.device)
        return self.rows[chosen].split(self.sizes, dim=1)


class Agent:
    def __init__(self, observation, actions, width, device, discount=0.99, pace=0.005, delay=2):
        self.actor, self.slow_actor = (Actor(observation, actions, width).to(device) for _ in range(2))
        self.critics, self.slow_critics = (Critics(observation + actions, width).to(device) for _ in range(2))
        self.slow_actor.load_state_dict(self.actor.state_dict())
        self.slow_critics.load_state_dict(self.critics.state_dict())
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4, fused=True)
        self.fast = [*self.actor.parameters(), *self.critics.parameters()]
        self.slow = [*self.slow_actor.parameters(), *self.slow_critics.parameters()]
        self.discount, self.pace, self.delay = discount, pace, delay

    @torch.no_grad()
    def target(self, reward, alive, after):
        action = self.slow_actor(after)
        noise = torch.randn_like(action).mul_(0.2).clamp_(-0.5, 0.5)
        value = self.slow_critics(after, action.add_(noise).clamp_(-1, 1)).amin(dim=0)
        return torch.addcmul(reward.squeeze(1), alive.squeeze(1), value, value=self.discount)

    def update(self, step, batch):
        before, action, reward, alive, after = batch
        target = self.target(reward, alive, after)
        values = self.critics(before, action)
        critic_loss = 2 * F.mse_loss(values, target.expand_as(values))
        self.critic_optimizer.zero_grad(set_to_none=True)
        critic_loss.backward()
        self.critic_optimizer.step()
        if step % self.delay == 0:
            self.improve(before)
        return critic_loss.detach()

    def improve(self, before):
        self.critics.requires_grad_(False)
        actor_loss = -self.critics(before, self.actor(before), first=1).mean()
        self.critics.requires_grad_(True)
        self.actor_optimizer.zero_grad(set_to_none=True)
        actor_loss.backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.slow, self.fast, self.pace)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--capacity", type=int, default=8192)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    observation, actions = 48, 12
    agent = Agent(observation, actions, args.width, device)
    replay = Replay(args.capacity, observation, actions, device)

    for step in range(args.steps):
        loss = agent.update(step, replay.sample(args.batch_size))
        if step % 20 == 0 or step == args.steps - 1:
            print(f"update {step}: critic loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
