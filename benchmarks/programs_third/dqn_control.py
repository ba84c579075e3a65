"""Trains a dueling double DQN with prioritized replay on a synthetic control task with parallel environments."""

# cpu: --batch-size 512 --width 384 --capacity 100000
# cuda: --batch-size 4096 --width 1024 --capacity 200000

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class LinearSystem:
    """Every environment is a damped linear system; the action picks the push."""

    def __init__(self, num_envs, features, num_actions, device):
        generator = torch.Generator().manual_seed(1)
        rotation = torch.linalg.qr(torch.randn(features, features, generator=generator)).Q
        self.transition = (0.98 * rotation).to(device)
        self.pushes = (0.3 * torch.randn(num_actions, features, generator=generator)).to(device)
        self.goal = torch.randn(features, generator=generator).to(device)
        self.state = torch.randn(num_envs, features, generator=generator).to(device)

    def step(self, actions):
        noise = 0.05 * torch.randn_like(self.state)
        self.state = self.state @ self.transition + self.pushes[actions] + noise
        reward = -(self.state - self.goal).square().mean(dim=1)
        done = torch.rand(len(self.state), device=self.state.device) < 0.01
        return self.state, reward, done


# mend: priorities-in-a-list
class Replay:
    def __init__(self, capacity, features, device):
        self.states = torch.zeros(capacity, features, device=device)
        self.actions = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(capacity, device=device)
        self.next_states = torch.zeros(capacity, features, device=device)
        self.dones = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.priorities = [0.0] * capacity
        self.capacity, self.count, self.device = capacity, 0, device

    def push(self, states, actions, rewards, next_states, dones):
        where = torch.arange(self.count, self.count + len(states), device=self.device) % self.capacity
        self.states[where], self.actions[where], self.rewards[where] = states, actions, rewards
        self.next_states[where], self.dones[where] = next_states, dones
        for i in range(self.count, self.count + len(states)):
            self.priorities[i % self.capacity] = 1.0
        self.count += len(states)

    def sample(self, batch_size):
        priorities = torch.tensor(self.priorities, device=self.device)  # waste: priorities-in-a-list
        pick = torch.multinomial(priorities, batch_size, replacement=True)
        weights = (priorities[pick] * (self.capacity / priorities.sum())) ** -0.4
        batch = (self.states[pick], self.actions[pick], self.rewards[pick], self.next_states[pick], self.dones[pick])
        return pick, weights / weights.max(), batch

    def update(self, pick, errors):
        priorities = errors.abs().clamp(1e-5, 1.0) ** 0.6
        for i, priority in zip(pick.tolist(), priorities.tolist(), strict=True):  # waste: priorities-in-a-list
            self.priorities[i] = priority


# instead: class Replay:
# instead:     def __init__(self, capacity, features, device):
# instead:         self.states = torch.zeros(capacity, features, device=device)
# instead:         self.actions = torch.zeros(capacity, dtype=torch.int64, device=device)
# instead:         self.rewards = torch.zeros(capacity, device=device)
# instead:         self.next_states = torch.zeros(capacity, features, device=device)
# instead:         self.dones = torch.zeros(capacity, dtype=torch.bool, device=device)
# instead:         self.priorities = torch.zeros(capacity, device=device)
# instead:         self.capacity, self.count, self.device = capacity, 0, device
# instead:
# instead:     def push(self, states, actions, rewards, next_states, dones):
# instead:         where = torch.arange(self.count, self.count + len(states), device=self.device) % self.capacity
# instead:         self.states[where], self.actions[where], self.rewards[where] = states, actions, rewards
# instead:         self.next_states[where], self.dones[where] = next_states, dones
# instead:         self.priorities[where] = 1.0
# instead:         self.count += len(states)
# instead:
# instead:     def sample(self, batch_size):
# instead:         priorities = self.priorities
# instead:         pick = torch.multinomial(priorities, batch_size, replacement=True)
# instead:         weights = (priorities[pick] * (self.capacity / priorities.sum())) ** -0.4
# instead:         fields = (self.states, self.actions, self.rewards, self.next_states, self.dones)
# instead:         return pick, weights / weights.max(), tuple(field[pick] for field in fields)
# instead:
# instead:     def update(self, pick, errors):
# instead:         self.priorities[pick] = errors.abs().clamp(1e-5, 1.0) ** 0.6


class QNetwork(nn.Module):
    def __init__(self, features, width, num_actions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, num_actions)

    def forward(self, states):
        h = self.body(states)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(dim=1, keepdim=True)


def td_errors(online, target, batch, gamma):
    states, actions, rewards, next_states, dones = batch
    with torch.no_grad():
        best = online(next_states).argmax(dim=1, keepdim=True)
        future = target(next_states).gather(1, best).squeeze(1)
        goal = rewards + gamma * future * ~dones
    return online(states).gather(1, actions.unsqueeze(1)).squeeze(1) - goal


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--capacity", type=int, default=50000)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-actions", type=int, default=9)
    parser.add_argument("--epsilon", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    game = LinearSystem(args.num_envs, args.features, args.num_actions, device)
    replay = Replay(args.capacity, args.features, device)
    online = QNetwork(args.features, args.width, args.num_actions).to(device)
    target = QNetwork(args.features, args.width, args.num_actions).to(device).requires_grad_(False)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-4, fused=True)
    followers, leaders = list(target.parameters()), list(online.parameters())

    def play(epsilon):
        states = game.state
        with torch.no_grad():
            greedy = online(states).argmax(dim=1)
        explore = torch.rand(args.num_envs, device=device) < epsilon
        actions = torch.where(explore, torch.randint(args.num_actions, (args.num_envs,), device=device), greedy)
        next_states, rewards, dones = game.step(actions)
        replay.push(states, actions, rewards, next_states, dones)

    for _ in range(200):
        play(epsilon=1.0)

    for step in range(args.steps):
        play(args.epsilon)
        pick, weights, batch = replay.sample(args.batch_size)
        errors = td_errors(online, target, batch, gamma=0.99)
        loss = (weights * F.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.update(pick, errors.detach())
        with torch.no_grad():
            torch._foreach_lerp_(followers, leaders, 0.005)

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
