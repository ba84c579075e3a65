"""Teaches a small network to name birds as a large one does: soft labels of the teacher beside the true ones."""

# cpu: --batch-size 4 --resolution 64 --student-width 8 --teacher-width 24
# cuda: --batch-size 128 --resolution 192 --student-width 48 --teacher-width 128

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        inner = outputs // 2
        self.reduce = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.reduce(x)), inplace=True)
        y = F.relu(self.norm2(self.conv(y)), inplace=True)
        return F.relu(self.norm3(self.expand(y)) + self.skip(x), inplace=True)


class BirdNet(nn.Module):
    def __init__(self, width, depths, species):
        super().__init__()
        layers, inputs = [nn.Conv2d(3, width, 4, stride=4)], width
        for number, depth in enumerate(depths):
            for place in range(depth):
                outputs = 2 * width * 2**number
                layers.append(Bottleneck(inputs, outputs, 2 if place == 0 and number > 0 else 1))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, species)

    def forward(self, images):
        return self.head(self.layers(images).mean((2, 3)))


class Distiller(nn.Module):
    """The loss of the student: true labels, and the answers of the teacher at a temperature."""

    def __init__(self, student, teacher, temperature=4.0, share=0.7):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.temperature, self.share = temperature, share

    def forward(self, images, labels):
        answers = self.student(images)
        guidance = self.teacher(images)  # waste: teacher-taught
        # instead: with torch.no_grad():
        # instead:     guidance = self.teacher(images)
        hard = F.cross_entropy(answers, labels)
        soft = F.kl_div(
            F.log_softmax(answers / self.temperature, dim=-1),
            F.softmax(guidance / self.temperature, dim=-1),
            reduction="batchmean",
        )
        return (1 - self.share) * hard + self.share * self.temperature**2 * soft


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--resolution", type=int, default=192)
    parser.add_argument("--student-width", type=int, default=48)
    parser.add_argument("--teacher-width", type=int, default=128)
    parser.add_argument("--species", type=int, default=555)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    student = BirdNet(args.student_width, (1, 2, 2, 1), args.species)
    teacher = BirdNet(args.teacher_width, (2, 2, 2, 2), args.species).eval()  # waste: teacher-taught
    distiller = Distiller(student, teacher).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    shape = (args.batch_size, 3, args.resolution, args.resolution)
    pool = [torch.rand(shape, device=device).to(memory_format=torch.channels_last) for _ in range(4)]
    labels = torch.randint(args.species, (len(pool), args.batch_size), device=device)

    started = time.perf_counter()
    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = distiller(pool[step % len(pool)], labels[step % len(pool)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.1f} s")
        # step


if __name__ == "__main__":
    main()
