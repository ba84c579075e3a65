"""Train an edge-conditioned message passing network to predict a property of batches of molecules."""

# cpu: --molecules 48 --width 32
# cuda: --molecules 512 --width 64

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def make_molecules(count, atoms, bonds):
    """Chains with random extra bonds; returns atom kinds, edges, edge features and the molecule of each atom."""
    kinds = torch.randint(10, (count * atoms,))
    owner = torch.arange(count).repeat_interleave(atoms)
    chain = torch.arange(count * atoms).view(count, atoms)
    left, right = chain[:, :-1].reshape(-1), chain[:, 1:].reshape(-1)
    extra = torch.randint(atoms, (2, count, bonds)) + (torch.arange(count) * atoms)[:, None]
    extra = extra.view(2, -1)
    source = torch.cat([left, right, extra[0], extra[1]])
    target = torch.cat([right, left, extra[1], extra[0]])
    half = torch.cat([torch.rand(left.shape[0], 6), torch.rand(extra.shape[1], 6)])
    first, second = half.split([left.shape[0], extra.shape[1]])
    features = torch.cat([first, first, second, second])
    energy = torch.zeros(count).index_add_(0, owner, (kinds % 3).float()) / atoms
    return kinds, source, target, features, owner, energy


class EdgeMessages(nn.Module):
    def __init__(self, width, edge_features, rounds):
        super().__init__()
        self.width, self.rounds = width, rounds
        self.edge_net = nn.Sequential(nn.Linear(edge_features, 64), nn.ReLU(), nn.Linear(64, width * width))
        self.root = nn.Linear(width, width)
        self.update = nn.GRUCell(width, width)

    def messages(self, x, source, target, matrices):
        sent = torch.bmm(x[source].unsqueeze(1), matrices).squeeze(1)
        return torch.zeros_like(x).index_add_(0, target, sent)

    def forward(self, x, source, target, features):
        # mend: edge-matrices-every-round
        state = x
        # instead: state = x
        # instead: matrices = self.edge_net(features).view(-1, self.width, self.width)
        for _ in range(self.rounds):
            # mend: edge-matrices-every-round
            matrices = self.edge_net(features).view(-1, self.width, self.width)  # waste: edge-matrices-every-round
            # instead:
            received = self.messages(x, source, target, matrices)
            state = self.update(F.relu(received + self.root(x)), state)
            x = state
        return x


class PropertyModel(nn.Module):
    def __init__(self, width, rounds, kinds=10, edge_features=6):
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.passing = EdgeMessages(width, edge_features, rounds)
        self.gate = nn.Linear(2 * width, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, kinds, source, target, features, owner, molecules):
        start = self.embed(kinds)
        x = self.passing(start, source, target, features)
        x = torch.sigmoid(self.gate(torch.cat([x, start], dim=1))) * x
        pooled = x.new_zeros(molecules, x.shape[1]).index_add_(0, owner, x)
        return self.head(pooled).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--molecules", type=int, default=48)
    parser.add_argument("--atoms", type=int, default=18)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    batches = [make_molecules(args.molecules, args.atoms, 3) for _ in range(8)]
    batches = [[field.to(device) for field in batch] for batch in batches]
    model = PropertyModel(args.width, args.rounds).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    for step in range(args.steps):
        kinds, source, target, features, owner, energy = batches[step % len(batches)]
        predicted = model(kinds, source, target, features, owner, args.molecules)
        loss = F.mse_loss(predicted, energy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
