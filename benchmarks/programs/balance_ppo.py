"""Learns to balance a pole by proximal policy optimization, with many environments simulated as tensors."""

# cpu: --environments 32 --horizon 16 --hidden 256 --epochs 2
# cuda: --environments 64 --horizon 32 --hidden 1024 --epochs 4

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Poles:
    """Poles on carts, all pushed at once."""

    def __init__(self, count, device):
        self.state = 0.05 * torch.randn(count, 4, device=device)

    def push(self, action):
        x, dx, angle, turn = self.state.unbind(1)
        force = 20.0 * action.float() - 10.0
        torque = (force + 0.05 * turn.square() * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * torque) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        pull = torque - 0.05 * bend * angle.cos() / 1.1
        moved = torch.stack([x + 0.02 * dx, dx + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend], dim=1)
        fallen = (moved[:, 0].abs() > 2.4) | (moved[:, 2].abs() > 0.21)
        self.state = torch.where(fallen[:, None], 0.05 * torch.randn_like(moved), moved)
        return self.state, 1.0 - fallen.float(), fallen.float()


class ActorCritic(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy, self.value = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, state):
        x = self.body(state)
        return self.policy(x), self.value(x).squeeze(-1)


@torch.no_grad()
def collect(model, poles, horizon):
    states, actions, chances, values, rewards, ends = [], [], [], [], [], []
    state = poles.state
    for _ in range(horizon):
        logits, value = model(state)
        action = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        chance = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        states.append(state)
        state, reward, end = poles.push(action)
        for items, item in zip(
            (actions, chances, values, rewards, ends), (action, chance, value, reward, end), strict=True
        ):
            items.append(item)
    values.append(model(state)[1])
    return [torch.stack(items) for items in (states, actions, chances, values, rewards, ends)]


def advantages(rewards, values, ends, discount=0.99, trace=0.95):
    """Generalized advantage estimates, (horizon, environments)."""
    # mend: advantages-one-by-one
    horizon, count = rewards.shape
    rewards, values, ends = rewards.cpu(), values.cpu(), ends.cpu()
    result = torch.zeros(horizon, count)
    for environment in range(count):
        running = 0.0
        for t in reversed(range(horizon)):
            going = 1.0 - ends[t, environment].item()  # waste: advantages-one-by-one
            following = values[t + 1, environment].item() * going  # waste: advantages-one-by-one
            delta = rewards[t, environment].item() + discount * following - values[t, environment].item()
            running = delta + discount * trace * going * running
            result[t, environment] = running  # waste: advantages-one-by-one
    return result
    # instead: going = 1.0 - ends
    # instead: deltas = rewards + discount * values[1:] * going - values[:-1]
    # instead: result, running = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    # instead: for t in reversed(range(len(deltas))):
    # instead:     running = deltas[t] + discount * trace * going[t] * running
    # instead:     result[t] = running
    # instead: return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--environments", type=int, default=128)
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=40, help="updates of the policy")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    poles = Poles(args.environments, device)
    model = ActorCritic(args.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True)
    for step in range(args.steps):
        states, actions, chances, values, rewards, ends = collect(model, poles, args.horizon)
        gains = advantages(rewards, values, ends).to(device)
        returns = gains + values[:-1]
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        loss = 0.0
        for part in range(args.epochs):
            rows = slice(part, None, args.epochs)
            logits, value = model(states[rows])
            chance = logits.log_softmax(-1).gather(-1, actions[rows][..., None]).squeeze(-1)
            ratio = (chance - chances[rows]).exp()
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gained = torch.minimum(ratio * gains[rows], clipped * gains[rows]).mean()
            loss = loss - gained + 0.5 * F.mse_loss(value, returns[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"update {step}: {rewards.mean().item():.3f} of the poles stand")
        # step


if __name__ == "__main__":
    main()
