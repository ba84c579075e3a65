"""A plain script to profile and compare: steps of a small network with one kernel that can be made slower.

    python benchmarks/profiles/diff_steps.py --steps 40
    nearpeak profile --save a.json.gz benchmarks/profiles/diff_steps.py --slower 0.03

With `--slower 0.03` the kernel `scaled`, which runs in every layer, does 3 % of its work twice: the same op on the same
shapes that takes 3 % longer. It knows nothing of nearpeak; `benchmarks.profiles.diff` runs it many times.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without it the slower part is done by ops
    triton = None

BLOCK = 4096

if triton is not None:

    @triton.jit
    def scaled_kernel(source, target, elements, blocks, BLOCK: tl.constexpr):  # noqa: N803
        """Blocks beyond the last begin again with the first: their work is done twice."""
        at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        tl.store(target + at, tl.load(source + at, mask=inside) * 0.5, mask=inside)


def scaled(x: torch.Tensor, slower: float) -> torch.Tensor:
    """Half of a tensor, by a kernel that does the share `slower` of its work twice."""
    if triton is None or not x.is_cuda:
        result = x * 0.5
        again = int(slower * len(x))
        if again:
            torch.mul(x[:again], 0.5, out=result[:again])
        return result
    result = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), BLOCK)
    scaled_kernel[(round(blocks * (1.0 + slower)),)](x, result, x.numel(), blocks, BLOCK=BLOCK)
    return result


class Layer(nn.Module):
    """A norm, the kernel, and a product."""

    def __init__(self, width: int, slower: float) -> None:
        super().__init__()
        self.norm, self.project, self.slower = nn.LayerNorm(width), nn.Linear(width, width), slower

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.project(scaled(self.norm(x), self.slower)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slower", type=float, default=0.0, help="share of the kernel's work that is done twice")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, width, layers = (16384, 4096, 12) if device == "cuda" else (256, 256, 4)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = nn.Sequential(*(Layer(width, arguments.slower) for _ in range(layers))).to(device, dtype)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    with torch.no_grad():
        for _ in range(arguments.steps):
            result = model(x)
    print(f"{result.float().mean().item():.6f}")


if __name__ == "__main__":
    main()
