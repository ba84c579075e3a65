"""Learns to play a grid world by Q-learning, from a memory of past moves."""

# cpu: --hidden 256 --batch-size 256 --memory 5000
# cuda: --hidden 2048 --batch-size 1024 --memory 50000

import argparse
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

SIDE = 12
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class GridWorld:
    """A walker that looks for a goal; what it sees are both places and the walls."""

    def __init__(self, seed=0):
        self.random = random.Random(seed)
        self.walls = torch.tensor([float(self.random.random() < 0.15) for _ in range(SIDE * SIDE)])
        self.restart()

    def restart(self):
        self.walker, self.goal = ([self.random.randrange(SIDE) for _ in range(2)] for _ in range(2))

    def observation(self):
        places = torch.zeros(2, SIDE * SIDE)
        places[0, self.walker[0] * SIDE + self.walker[1]] = 1.0
        places[1, self.goal[0] * SIDE + self.goal[1]] = 1.0
        return torch.cat([places.flatten(), self.walls])

    def move(self, action):
        self.walker = [min(SIDE - 1, max(0, a + b)) for a, b in zip(self.walker, MOVES[action], strict=True)]
        won = self.walker == self.goal
        if won:
            self.restart()
        return (1.0 if won else -0.01), won


class QNetwork(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3 * SIDE * SIDE, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
        )

    def forward(self, seen):
        return self.layers(seen)


def play(world, count):
    """Random moves, as (seen, action, reward, seen after, over)."""
    for _ in range(count):
        seen, action = world.observation(), random.randrange(4)
        reward, over = world.move(action)
        yield seen, action, reward, world.observation(), float(over)


# mend: batch-stacked-from-a-list
def draw(memory, batch_size, device):
    """A batch of moves on the device."""
    seen, actions, rewards, after, over = zip(*random.sample(memory, batch_size), strict=True)
    return (
        torch.stack(seen).to(device),  # waste: batch-stacked-from-a-list
        torch.tensor(actions, device=device),
        torch.tensor(rewards, device=device),
        torch.stack(after).to(device),  # waste: batch-stacked-from-a-list
        torch.tensor(over, device=device),
    )


# instead: def draw(memory, batch_size, device):
# instead:     if not hasattr(draw, "moves"):
# instead:         seen, actions, rewards, after, over = zip(*memory, strict=True)
# instead:         columns = [torch.stack(seen), torch.tensor(actions), torch.tensor(rewards), torch.stack(after)]
# instead:         draw.moves = [column.to(device) for column in [*columns, torch.tensor(over)]]
# instead:     rows = torch.randint(len(draw.moves[0]), (batch_size,), device=device)
# instead:     return [column[rows] for column in draw.moves]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--memory", type=int, default=50000)
    parser.add_argument("--discount", type=float, default=0.98)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = deque(play(GridWorld(), args.memory), maxlen=args.memory)
    online, target = QNetwork(args.hidden).to(device), QNetwork(args.hidden).to(device)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4, fused=True)
    for step in range(args.steps):
        if step % 100 == 0:
            target.load_state_dict(online.state_dict())
        seen, actions, rewards, after, over = draw(memory, args.batch_size, device)
        with torch.no_grad():
            best = rewards + args.discount * (1 - over) * target(after).amax(1)
        values = online(seen).gather(1, actions[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(values, best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.5f}")
        # step


if __name__ == "__main__":
    main()
