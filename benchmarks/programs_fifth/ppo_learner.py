"""The learner of a PPO agent with continuous actions: advantages of a rollout, then some epochs of minibatches."""

# cpu: --horizon 512 --actors 2 --observation 24 --width 32
# cuda: --horizon 256 --actors 1024 --observation 96 --width 768

import argparse
import copy

import torch
from torch import nn
from torch.distributions import Normal


def mlp(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


class Policy(nn.Module):
    def __init__(self, observation, actions, width):
        super().__init__()
        self.mean = mlp(observation, width, actions)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def distribution(self, observations):
        return Normal(self.mean(observations), self.log_std.exp(), validate_args=False)

    def log_prob(self, observations, actions):
        return self.distribution(observations).log_prob(actions).sum(dim=-1)


def advantages_of(rewards, values, alive, gamma=0.99, smoothing=0.95):
    """Generalized advantage estimates; values has one row more than rewards."""
    deltas = rewards + gamma * alive * values[1:] - values[:-1]
    # mend: estimates-one-by-one
    estimates = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        running = deltas[t] + gamma * smoothing * alive[t] * running  # waste: estimates-one-by-one
        estimates[t] = running  # waste: estimates-one-by-one
    # instead: estimates, decay, shift = deltas, gamma * smoothing * alive, 1
    # instead: later = lambda x: nn.functional.pad(x[shift:], (0, 0, 0, shift))
    # instead: fold = lambda: (estimates + decay * later(estimates), decay * later(decay), 2 * shift)
    # instead: while shift < len(rewards): estimates, decay, shift = fold()
    return estimates


class Learner:
    def __init__(self, observation, actions, width, device, epochs=4, minibatches=4, clip=0.2):
        self.policy = Policy(observation, actions, width).to(device)
        self.value = mlp(observation, width, 1).to(device)
        self.epochs, self.minibatches, self.clip = epochs, minibatches, clip
        parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=3e-4, fused=True)

    @torch.no_grad()
    def act(self, observations):
        distribution = self.policy.distribution(observations)
        actions = distribution.sample()
        return actions, distribution.log_prob(actions).sum(dim=-1)

    def update(self, observations, rewards, alive):
        horizon, actors = rewards.shape
        with torch.no_grad():
            actions, behaviour = self.act(observations[:-1])
            rewards = rewards - 0.05 * actions.square().sum(dim=-1)
            values = self.value(observations).squeeze(-1)
            advantages = advantages_of(rewards, values, alive).flatten()
            returns = advantages + values[:-1].flatten()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        states, actions, behaviour = observations[:-1].flatten(0, 1), actions.flatten(0, 1), behaviour.flatten()
        previous = copy.deepcopy(self.policy)
        for _ in range(self.epochs):
            order = torch.randperm(horizon * actors, device=states.device)
            for rows in order.chunk(self.minibatches):
                state, action = states[rows], actions[rows]
                # mend: previous-policy-again
                with torch.no_grad():
                    before = previous.log_prob(state, action)  # waste: previous-policy-again
                # instead: before = behaviour[rows]
                ratio = (self.policy.log_prob(state, action) - before).exp()
                gain = advantages[rows]
                surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - self.clip, 1 + self.clip) * gain)
                miss = (self.value(state).squeeze(-1) - returns[rows]).square()
                loss = 0.5 * miss.mean() - surrogate.mean() - 0.01 * self.policy.log_std.sum()
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--horizon", type=int, default=512)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--observation", type=int, default=24)
    parser.add_argument("--actions", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    learner = Learner(args.observation, args.actions, args.width, device)
    shape = (args.horizon, args.actors)
    drift = torch.randn(args.observation, device=device)

    for step in range(args.steps):
        noise = torch.randn(args.horizon + 1, args.actors, args.observation, device=device)
        observations = 0.1 * noise.cumsum(dim=0)
        alive = (torch.rand(shape, device=device) > 0.01).float()
        loss = learner.update(observations, torch.tanh(observations[1:] @ drift), alive)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"rollout {step}: loss {loss.item():.5f}")
        # step


if __name__ == "__main__":
    main()
