"""Self-distillation of a vision transformer: a student sees small and large crops, an averaged teacher the large."""

# cpu: --width 64 --depth 2 --batch-size 8 --prototypes 8192
# cuda: --width 384 --depth 6 --batch-size 192 --prototypes 65536

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F


class Vision(nn.Module):
    def __init__(self, width, depth, prototypes, patch=8, largest=64):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, width, largest // patch, largest // patch) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.neck = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 64))
        self.prototypes = nn.Linear(64, prototypes, bias=False)

    def forward(self, images):
        x = self.patch(images)
        position = self.position
        if position.shape[-1] != x.shape[-1]:
            position = F.interpolate(position, size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = (x + position).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.cls.expand(x.size(0), -1, -1), x], 1))
        return self.prototypes(F.normalize(self.neck(x[:, 0]), dim=-1))


class DinoLoss(nn.Module):
    def __init__(self, prototypes, crops, student_heat=0.1, teacher_heat=0.04, momentum=0.9):
        super().__init__()
        self.crops, self.student_heat, self.teacher_heat, self.momentum = crops, student_heat, teacher_heat, momentum
        self.register_buffer("center", torch.zeros(1, prototypes))

    def forward(self, student, teacher):
        # mend: softmax-for-every-pair
        total, pairs = 0.0, 0
        for i, wanted in enumerate(teacher.chunk(2)):
            for j, given in enumerate(student.chunk(self.crops)):
                if i == j:
                    continue
                target = F.softmax((wanted - self.center) / self.teacher_heat, -1)  # waste: softmax-for-every-pair
                score = F.log_softmax(given / self.student_heat, -1)  # waste: softmax-for-every-pair
                total = total - (target * score).sum(-1).mean()
                pairs += 1
        # instead: targets = F.softmax((teacher - self.center) / self.teacher_heat, -1).chunk(2)
        # instead: scores = F.log_softmax(student / self.student_heat, -1).chunk(self.crops)
        # instead: order = [(i, j) for i in range(2) for j in range(self.crops) if i != j]
        # instead: total, pairs = -sum((targets[i] * scores[j]).sum(-1).mean() for i, j in order), len(order)
        with torch.no_grad():
            self.center.lerp_(teacher.mean(0, keepdim=True), 1 - self.momentum)
        return total / pairs


def crop(images, size, low, high):
    """A random square of every image, scaled to size, in one call for the batch."""
    batch = images.size(0)
    scale = low + (high - low) * torch.rand(batch, device=images.device)
    shift = (torch.rand(batch, 2, device=images.device) * 2 - 1) * (1 - scale)[:, None]
    theta = torch.zeros(batch, 2, 3, device=images.device)
    theta[:, 0, 0] = scale * (torch.randint(0, 2, (batch,), device=images.device) * 2 - 1)
    theta[:, 1, 1] = scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, [batch, 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--prototypes", type=int, default=8192)
    parser.add_argument("--local-crops", type=int, default=6)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.rand(512, 3, 96, 96, device=device)

    student = Vision(args.width, args.depth, args.prototypes).to(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    criterion = DinoLoss(args.prototypes, 2 + args.local_crops).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04, fused=True)
    slow, fast = list(teacher.parameters()), list(student.parameters())

    for step in range(args.steps):
        batch = images[torch.randint(0, images.size(0), (args.batch_size,), device=device)]
        large = crop(batch.repeat(2, 1, 1, 1), 64, 0.5, 1.0)
        small = crop(batch.repeat(args.local_crops, 1, 1, 1), 32, 0.15, 0.5)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                wanted = teacher(large)
            given = torch.cat([student(large), student(small)])
        loss = criterion(given.float(), wanted.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(fast, 3.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(slow, fast, 0.004)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
