"""A network of convolutions, batch norms and poolings is trained on channels-first images."""

import torch

RULE = "channels-first"
DEVICES = ("cpu", "cuda")


def built(device, layout):
    torch.manual_seed(0)
    width, batch, size = (128, 128, 64) if device == "cuda" else (32, 8, 32)
    layers = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [
            torch.nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
        ]
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4 * width, 10)
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    images = torch.randn(batch, 3, size, size, device=device, dtype=dtype)
    labels = torch.randint(10, (batch,), device=device)
    return model.to(device, dtype).to(memory_format=layout), images.to(memory_format=layout), labels


def stepping(device, layout):
    model, images, labels = built(device, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def step():
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def waste(device):
    return stepping(device, torch.contiguous_format)


def clean(device):
    return stepping(device, torch.channels_last)
