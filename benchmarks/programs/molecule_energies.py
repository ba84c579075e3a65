"""Learns the energies of molecules by message passing: every atom hears its nearest neighbours."""

# cpu: --molecules 2 --width 192 --layers 2
# cuda: --molecules 256 --width 512 --layers 5
# rules: linear-after-gather linear-after-gather unfused-pointwise

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ELEMENTS = 12
BASIS = 64
"""Gaussians that a distance is spread over."""


@dataclass
class Graphs:
    """Molecules of one batch, their atoms in a row."""

    elements: torch.Tensor
    molecule: torch.Tensor
    neighbours: torch.Tensor
    distances: torch.Tensor
    energies: torch.Tensor


def make_graphs(molecules, nearest, device):
    sizes = torch.randint(18, 34, (molecules,))
    molecule = torch.arange(molecules).repeat_interleave(sizes).to(device)
    places = torch.randn(len(molecule), 3, device=device)
    apart = torch.cdist(places, places)
    apart.masked_fill_(molecule[:, None] != molecule, torch.inf).fill_diagonal_(torch.inf)
    distances, neighbours = apart.topk(nearest, largest=False)
    elements = torch.randint(ELEMENTS, (len(molecule),), device=device)
    shares = (elements - ELEMENTS / 2) * 0.1 + (1 / distances.clamp(min=0.3)).mean(1)
    energies = torch.zeros(molecules, device=device).index_add_(0, molecule, shares)
    return Graphs(elements, molecule, neighbours, distances, energies)


class Interaction(nn.Module):
    """Messages from neighbours to atoms, and what an atom makes of their sum."""

    def __init__(self, width):
        super().__init__()
        # mend: linear-after-gather
        self.message = nn.Linear(2 * width + BASIS, width)
        # instead: self.own = nn.Linear(width, width)
        # instead: self.other = nn.Linear(width, width, bias=False)
        # instead: self.edge = nn.Linear(BASIS, width, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, atoms, neighbours, edges):
        x = self.norm(atoms)
        # mend: linear-after-gather
        heard = x.index_select(0, neighbours.flatten()).view(*neighbours.shape, -1)
        pairs = torch.cat([x[:, None].expand_as(heard), heard, edges], dim=-1)  # waste: linear-after-gather
        messages = F.silu(self.message(pairs))  # waste: linear-after-gather
        # instead: heard = self.other(x).index_select(0, neighbours.flatten()).view(*neighbours.shape, -1)
        # instead: messages = F.silu(heard + self.own(x)[:, None] + self.edge(edges))
        return atoms + self.update(torch.cat([x, messages.sum(1)], dim=-1))


class EnergyModel(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.elements = nn.Embedding(ELEMENTS, width)
        self.layers = nn.ModuleList([Interaction(width) for _ in range(layers)])
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, 1)
        )
        self.register_buffer("centers", torch.linspace(0, 4, BASIS))

    def forward(self, graphs):
        atoms = self.elements(graphs.elements)
        spread = (graphs.distances[..., None] - self.centers) * (BASIS / 4)
        edges = torch.exp(-0.5 * spread.square()).to(atoms.dtype)
        for layer in self.layers:
            atoms = layer(atoms, graphs.neighbours, edges)
        shares = self.head(atoms)[:, 0].float()
        return torch.zeros_like(graphs.energies).index_add(0, graphs.molecule, shares)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--molecules", type=int, default=256)
    parser.add_argument("--nearest", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pool = [make_graphs(args.molecules, args.nearest, device) for _ in range(4)]
    model = EnergyModel(args.width, args.layers).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    for step in range(args.steps):
        graphs = pool[step % len(pool)]
        loss = F.smooth_l1_loss(model(graphs), graphs.energies)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        # step


if __name__ == "__main__":
    main()
