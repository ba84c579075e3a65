"""Trains a neural radiance field on rays drawn from synthetic posed images."""

# cpu: --width 64 --depth 4 --rays 256 --samples 32 --size 400
# cuda: --width 256 --depth 8 --rays 2048 --samples 64 --size 800

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class FrequencyEncoding(nn.Module):
    def __init__(self, num_freqs):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(num_freqs))
        self.out_dim = 3 * (1 + 2 * num_freqs)

    def forward(self, x):
        scaled = (x.unsqueeze(-1) * self.freqs).flatten(-2)
        return torch.cat([x, scaled.sin(), scaled.cos()], dim=-1)


class RadianceField(nn.Module):
    def __init__(self, width, depth, point_freqs=10, dir_freqs=4):
        super().__init__()
        self.encode_point = FrequencyEncoding(point_freqs)
        self.encode_dir = FrequencyEncoding(dir_freqs)
        dim = self.encode_point.out_dim
        self.skip = depth // 2
        self.layers = nn.ModuleList()
        for i in range(depth):
            in_dim = dim if i == 0 else width + (dim if i == self.skip else 0)
            self.layers.append(nn.Linear(in_dim, width))
        self.density = nn.Linear(width, 1)
        self.feature = nn.Linear(width, width)
        self.view = nn.Linear(width + self.encode_dir.out_dim, width // 2)
        self.rgb = nn.Linear(width // 2, 3)

    def forward(self, points, dirs):
        """points: (rays, samples, 3); dirs: (rays, 3)."""
        encoded = self.encode_point(points)
        h = encoded
        for i, layer in enumerate(self.layers):
            if i == self.skip:
                h = torch.cat([h, encoded], dim=-1)
            h = F.relu(layer(h))
        sigma = F.softplus(self.density(h).squeeze(-1))
        # mend: directions-per-sample
        dirs = dirs.unsqueeze(1).expand(points.shape)
        view = self.encode_dir(dirs)  # waste: directions-per-sample
        # instead: view = self.encode_dir(dirs).unsqueeze(1).expand(-1, points.shape[1], -1)
        h = F.relu(self.view(torch.cat([self.feature(h), view], dim=-1)))
        return sigma, torch.sigmoid(self.rgb(h))


def pixel_rays(cols, rows, size, focal, pose):
    """Origins and directions of the rays through the given pixels."""
    x = (cols - 0.5 * size) / focal
    y = -(rows - 0.5 * size) / focal
    dirs = torch.stack([x, y, -torch.ones_like(x)], dim=-1)
    rays_d = (dirs.unsqueeze(-2) * pose[:3, :3]).sum(-1)
    return pose[:3, 3].expand(rays_d.shape), rays_d


def get_rays(size, focal, pose):
    grid = torch.arange(size, device=pose.device)
    rows, cols = torch.meshgrid(grid, grid, indexing="ij")
    rays_o, rays_d = pixel_rays(cols.flatten(), rows.flatten(), size, focal, pose)
    return rays_o, rays_d


def render(field, rays_o, rays_d, samples, near=2.0, far=6.0):
    edges = torch.linspace(near, far, samples + 1, device=rays_o.device)
    width = (far - near) / samples
    depth = edges[:-1] + width * torch.rand(len(rays_o), samples, device=rays_o.device)
    points = rays_o.unsqueeze(1) + rays_d.unsqueeze(1) * depth.unsqueeze(-1)
    sigma, rgb = field(points, F.normalize(rays_d, dim=-1))
    delta = torch.cat([depth.diff(dim=1), torch.full_like(depth[:, :1], 1e10)], dim=1)
    optical = sigma * delta * rays_d.norm(dim=-1, keepdim=True)
    transmittance = torch.exp(-F.pad(optical[:, :-1], (1, 0)).cumsum(dim=1))
    weights = transmittance * -torch.expm1(-optical)
    return (weights.unsqueeze(-1) * rgb).sum(dim=1)


def make_scene(views, size, device):
    """Cameras on a circle that look at the origin, and smooth random pictures."""
    generator = torch.Generator().manual_seed(1)
    poses = torch.eye(4).repeat(views, 1, 1)
    for i in range(views):
        angle = 2 * math.pi * i / views
        c, s = math.cos(angle), math.sin(angle)
        poses[i, :3, :3] = torch.tensor([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
        poses[i, :3, 3] = 4.0 * poses[i, :3, 2]
    coarse = torch.rand(views, 3, 16, 16, generator=generator)
    images = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    return poses.to(device), images.permute(0, 2, 3, 1).reshape(views, -1, 3).contiguous().to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rays", type=int, default=256)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--size", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--views", type=int, default=12)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    poses, images = make_scene(args.views, args.size, device)
    focal = 1.2 * args.size
    field = RadianceField(args.width, args.depth).to(device)
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-4, fused=True)

    for step in range(args.steps):
        view = step % args.views
        pick = torch.randint(args.size * args.size, (args.rays,), device=device)
        # mend: rays-of-the-whole-image
        rays_o, rays_d = get_rays(args.size, focal, poses[view])  # waste: rays-of-the-whole-image
        rays_o, rays_d = rays_o[pick], rays_d[pick]
        # instead: rays_o, rays_d = pixel_rays(pick % args.size, pick // args.size, args.size, focal, poses[view])
        target = images[view, pick]

        color = render(field, rays_o, rays_d, args.samples)
        loss = F.mse_loss(color, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        # step


if __name__ == "__main__":
    main()
