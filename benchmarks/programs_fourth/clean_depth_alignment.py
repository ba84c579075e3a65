"""Train monocular depth with a scale-and-shift invariant loss and gradient matching over several scales."""

# cpu: --width 16 --batch-size 4 --size 128
# cuda: --width 64 --batch-size 32 --size 384

import argparse

import torch
from torch import nn
from torch.nn import functional as F


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class DepthNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.stem = conv(3, width, 2)
        self.encoder = nn.ModuleList(
            nn.Sequential(conv(before, after, 2), conv(after, after)) for before, after in zip(sizes, sizes[1:])
        )
        self.lateral = nn.ModuleList(
            nn.Conv2d(after, before, 1) for before, after in zip(reversed(sizes[:-1]), reversed(sizes[1:]))
        )
        self.refine = nn.ModuleList(conv(size, size) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images):
        x = self.stem(images)
        kept = []
        for stage in self.encoder:
            kept.append(x)
            x = stage(x)
        for lateral, refine in zip(self.lateral, self.refine):
            skip = kept.pop()
            x = F.interpolate(lateral(x), size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = refine(x + skip)
        depth = self.head(x)
        return F.interpolate(depth, size=images.shape[-2:], mode="bilinear", align_corners=False).squeeze(1)


def align(given, wanted, valid):
    """Scale and shift every map to its target by masked least squares, solved in closed form."""
    weight = valid.sum((1, 2)).clamp(min=1)
    a = (valid * given * given).sum((1, 2)) / weight
    b = (valid * given).sum((1, 2)) / weight
    c = (valid * given * wanted).sum((1, 2)) / weight
    d = (valid * wanted).sum((1, 2)) / weight
    determinant = (a - b * b).clamp(min=1e-6)
    scale = (c - b * d) / determinant
    shift = d - scale * b
    return torch.addcmul(shift[:, None, None], scale[:, None, None], given)


def gradient_loss(error, valid):
    across = (error[:, :, 1:] - error[:, :, :-1]).abs() * (valid[:, :, 1:] * valid[:, :, :-1])
    along = (error[:, 1:] - error[:, :-1]).abs() * (valid[:, 1:] * valid[:, :-1])
    return (across.sum() + along.sum()) / valid.sum().clamp(min=1)


def depth_loss(given, wanted, valid, scales=4):
    error = align(given, wanted, valid) - wanted
    loss = (error.abs() * valid).sum() / valid.sum()
    for scale in range(scales):
        step = 2**scale
        loss = loss + 0.5 * gradient_loss(error[:, ::step, ::step], valid[:, ::step, ::step])
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    coarse = torch.rand(128, 1, 9, 9, device=device)
    depths = F.interpolate(coarse, size=(args.size, args.size), mode="bicubic").squeeze(1) + 0.5
    valid = (torch.rand(depths.shape, device=device) > 0.2).float()
    images = depths[:, None] * torch.rand(128, 3, 1, 1, device=device)
    images = (images + 0.05 * torch.randn_like(images)).contiguous(memory_format=torch.channels_last)

    model = DepthNet(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=max(args.steps, 2))

    for step in range(args.steps):
        rows = torch.randint(0, images.size(0), (args.batch_size,), device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            given = model(images[rows])
        loss = depth_loss(given.float(), depths[rows], valid[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
