"""Learns four in a row against itself: many boards at once on the device, and policy gradients from their ends."""

# cpu: --hidden 128 --blocks 2 --games 64 --plies 8
# cuda: --hidden 2048 --blocks 6 --games 1024 --plies 12

import argparse
import functools

import torch
import torch.nn.functional as F
from torch import nn

ROWS, COLUMNS = 6, 7


def all_lines():
    """The squares of all the lines of four."""
    lines = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                places = [(row + k * down, column + k * right) for k in range(4)]
                if all(0 <= r < ROWS and 0 <= c < COLUMNS for r, c in places):
                    lines.append([r * COLUMNS + c for r, c in places])
    return torch.tensor(lines)


class ResidualBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        return x + self.second(F.relu(self.first(self.norm(x))))


class Player(nn.Module):
    """Says which column to play, and who will win."""

    def __init__(self, hidden, blocks):
        super().__init__()
        self.planes = nn.Linear(3 * ROWS * COLUMNS, hidden)
        self.blocks = nn.Sequential(*[ResidualBlock(hidden) for _ in range(blocks)])
        self.norm = nn.LayerNorm(hidden)
        self.heads = nn.Linear(hidden, COLUMNS + 1)

    def forward(self, boards):
        planes = torch.cat([boards == 1, boards == -1, boards == 0], dim=1).float()
        policy, value = self.heads(self.norm(self.blocks(self.planes(planes)))).float().split([COLUMNS, 1], dim=1)
        full = boards[:, -COLUMNS:] != 0
        return policy.masked_fill(full, -1e9), value.squeeze(1).tanh()


@torch.no_grad()
def play(player, boards, plies, lines):
    """Both sides move in turn. A board is seen by the side to move: its own stones are 1, those of the other -1."""
    seen, moves, won, over = [], [], [], []
    for _ in range(plies):
        policy, _ = player(boards)  # waste: plays-in-float32
        column = torch.multinomial(policy.softmax(1), 1)
        height = (boards.view(-1, ROWS, COLUMNS) != 0).sum(1).gather(1, column)
        after = boards.scatter(1, height * COLUMNS + column, 1.0)
        seen.append(boards)
        moves.append(column.squeeze(1))
        won.append((after[:, lines] == 1).all(2).any(1))
        over.append(won[-1] | (after != 0).all(1))
        boards = -after * ~over[-1][:, None]
    rewards = []
    reward = -player(boards)[1]
    for has_won, is_over in zip(reversed(won), reversed(over), strict=True):
        reward = torch.where(is_over, has_won.float(), reward)
        rewards.append(reward)
        reward = -reward
    return boards, torch.cat(seen), torch.cat(moves), torch.cat(rewards[::-1]), torch.stack(over).sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--games", type=int, default=1024)
    parser.add_argument("--plies", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
    lines = all_lines().to(device)
    with torch.device(device):
        player = Player(args.hidden, args.blocks)
    optimizer = torch.optim.AdamW(player.parameters(), lr=args.lr, fused=True)
    boards = torch.zeros(args.games, ROWS * COLUMNS, device=device)
    finished = torch.zeros((), device=device, dtype=torch.long)
    for step in range(args.steps):
        boards, seen, moves, rewards, ended = play(player, boards, args.plies, lines)  # waste: plays-in-float32
        # instead: with precision():
        # instead:     boards, seen, moves, rewards, ended = play(player, boards, args.plies, lines)
        finished += ended
        with precision():
            policy, value = player(seen)
        log_policy = policy.log_softmax(1)
        advantage = rewards - value.detach()
        gain = (advantage * log_policy.gather(1, moves[:, None]).squeeze(1)).mean()
        entropy = -(log_policy.exp() * log_policy).sum(1).mean()
        loss = F.mse_loss(value, rewards) - gain - args.entropy * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {finished.item()} games")
        # step


if __name__ == "__main__":
    main()
