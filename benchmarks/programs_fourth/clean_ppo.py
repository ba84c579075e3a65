"""Train a policy with proximal policy optimisation on many simulated pendulums at once."""

# cpu: --worlds 64 --length 24 --width 96
# cuda: --worlds 8192 --length 24 --width 512

import argparse

import torch
import torch.nn as nn


class Pendulums:
    """A batch of pendulums on the device; an episode ends after a fixed time."""

    def __init__(self, count, device, limit=100):
        self.count, self.device, self.limit = count, device, limit
        self.angle = (torch.rand(count, device=device) * 2 - 1) * torch.pi
        self.speed = torch.rand(count, device=device) * 2 - 1
        self.age = torch.randint(limit, (count,), device=device)

    def observe(self):
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], dim=1)

    def step(self, action):
        force = action.squeeze(1).clamp(-2, 2)
        wrapped = torch.remainder(self.angle + torch.pi, 2 * torch.pi) - torch.pi
        reward = -(wrapped.square() + 0.1 * self.speed.square() + 0.001 * force.square())
        self.speed = (self.speed + 0.05 * (15 * self.angle.sin() + 3 * force)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        self.age = self.age + 1
        done = self.age >= self.limit
        self.angle = torch.where(done, (torch.rand_like(self.angle) * 2 - 1) * torch.pi, self.angle)
        self.speed = torch.where(done, torch.rand_like(self.speed) * 2 - 1, self.speed)
        self.age = self.age.masked_fill(done, 0)
        return reward / 8, done.float()


class Agent(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, observation):
        x = self.body(observation)
        return self.mean(x), self.value(x).squeeze(-1)

    def log_prob(self, mean, action):
        z = (action - mean) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.919).sum(dim=-1)


@torch.no_grad()
def roll_out(agent, worlds, buffers):
    std = agent.log_std.exp()
    length = buffers["reward"].shape[0]
    for t in range(length):
        observation = worlds.observe()
        mean, value = agent(observation)
        action = mean + std * torch.randn_like(mean)
        buffers["observation"][t] = observation
        buffers["action"][t] = action
        buffers["log_prob"][t] = agent.log_prob(mean, action)
        buffers["value"][t] = value
        buffers["reward"][t], buffers["done"][t] = worlds.step(action)
    following = agent(worlds.observe())[1]
    advantage = torch.zeros_like(following)
    for t in reversed(range(length)):
        going = 1 - buffers["done"][t]
        delta = buffers["reward"][t] + 0.97 * going * following - buffers["value"][t]
        advantage = delta + 0.97 * 0.95 * going * advantage
        buffers["advantage"][t] = advantage
        following = buffers["value"][t]
    return {name: values.flatten(0, 1) for name, values in buffers.items()}


def update(agent, optimizer, data, epochs, minibatches):
    wanted = data["advantage"] + data["value"]
    advantages = (data["advantage"] - data["advantage"].mean()) / (data["advantage"].std() + 1e-8)
    for _ in range(epochs):
        for rows in torch.randperm(len(wanted), device=wanted.device).chunk(minibatches):
            mean, value = agent(data["observation"][rows])
            ratio = (agent.log_prob(mean, data["action"][rows]) - data["log_prob"][rows]).exp()
            advantage = advantages[rows]
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = 0.5 * (value - wanted[rows]).square().mean() - gain - 0.003 * agent.log_std.sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worlds", type=int, default=64)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--minibatches", type=int, default=4)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    worlds = Pendulums(args.worlds, device)
    agent = Agent(3, 1, args.width).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=7e-4, fused=True)
    shape = args.length, args.worlds
    buffers = {name: torch.zeros(shape, device=device) for name in ("log_prob", "value", "reward", "done", "advantage")}
    buffers["observation"] = torch.zeros(*shape, 3, device=device)
    buffers["action"] = torch.zeros(*shape, 1, device=device)

    for step in range(args.steps):
        data = roll_out(agent, worlds, buffers)
        loss = update(agent, optimizer, data, args.epochs, args.minibatches)
        if step % 10 == 0:
            print(f"step {step}: reward {data['reward'].mean().item():.4f}, loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
