"""Run soft actor-critic updates on a replay buffer of a continuous control task."""

# cpu: --width 512 --batch-size 128 --updates 3
# cuda: --width 2048 --batch-size 4096 --updates 4

import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Actor(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()
        self.net = mlp(observations, width, 2 * actions)

    def forward(self, observation):
        mean, log_std = self.net(observation).chunk(2, dim=-1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_prob = (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)
        squash = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return raw.tanh(), log_prob - squash.sum(dim=-1)


class TwinCritic(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()
        self.q1 = mlp(observations + actions, width, 1)
        self.q2 = mlp(observations + actions, width, 1)

    def forward(self, observation, action):
        x = torch.cat([observation, action], dim=-1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Replay:
    """Transitions in preallocated tensors on the device."""

    def __init__(self, capacity, observations, actions, device):
        self.capacity = capacity
        self.observation = torch.randn(capacity, observations, device=device)
        self.action = torch.rand(capacity, actions, device=device) * 2 - 1
        self.next_observation = self.observation.roll(-1, 0)
        self.reward = -self.action.square().sum(dim=1) + self.observation[:, 0]
        self.going = (torch.rand(capacity, device=device) > 0.02).float()

    def sample(self, count):
        rows = torch.randint(self.capacity, (count,), device=self.reward.device)
        fields = self.observation, self.action, self.reward, self.next_observation, self.going
        return [field[rows] for field in fields]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--observations", type=int, default=67)
    parser.add_argument("--actions", type=int, default=21)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    gamma, tau = 0.99, 0.005
    actor = Actor(args.observations, args.actions, args.width).to(device)
    critic = TwinCritic(args.observations, args.actions, args.width).to(device)
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4, fused=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-4, fused=True)
    replay = Replay(50_000, args.observations, args.actions, device)

    for step in range(args.steps):
        for _ in range(args.updates):
            observation, action, reward, next_observation, going = replay.sample(args.batch_size)
            alpha = log_alpha.detach().exp()

            with torch.no_grad():
                next_action, next_log_prob = actor(next_observation)
                value = torch.minimum(*target(next_observation, next_action)) - alpha * next_log_prob
                wanted = reward + gamma * going * value
            q1, q2 = critic(observation, action)
            critic_loss = F.mse_loss(q1, wanted) + F.mse_loss(q2, wanted)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

            new_action, log_prob = actor(observation)
            actor_loss = (alpha * log_prob - torch.minimum(*critic(observation, new_action))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()  # waste: critic-gradients-of-actor
            # instead: actor_loss.backward(inputs=list(actor.parameters()))
            actor_optimizer.step()

            alpha_loss = -(log_alpha * (log_prob.detach() - args.actions)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()

            # mend: target-through-state-dict
            weights = critic.state_dict()
            old = target.state_dict()
            mixed = {
                name: (1 - tau) * old[name] + tau * weights[name] for name in old
            }  # waste: target-through-state-dict
            target.load_state_dict(mixed)  # waste: target-through-state-dict
            # instead: with torch.no_grad():
            # instead:     torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), tau)
        if step % 10 == 0:
            print(f"step {step}: critic {critic_loss.item():.4f} actor {actor_loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
