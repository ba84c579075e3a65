"""Trains an acoustic model: convolutions over filter banks, then a recurrent encoder that labels every frame."""

# cpu: --batch-size 8 --frames 120 --hidden 96
# cuda: --batch-size 64 --frames 400 --hidden 512

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

PHONES = 48


class FilterBanks(Dataset):
    """Random filter banks with a phone per second frame."""

    def __init__(self, utterances, frames, bands=80):
        generator = torch.Generator().manual_seed(0)
        self.banks = torch.randn(utterances, bands, frames, generator=generator)
        self.phones = torch.randint(PHONES, (utterances, frames // 2), generator=generator)

    def __len__(self):
        return len(self.banks)

    def __getitem__(self, index):
        return self.banks[index], self.phones[index]


class Encoder(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        # mend: unrolled-lstm
        self.first = nn.LSTMCell(width, hidden)
        self.second = nn.LSTMCell(hidden, hidden)
        # instead: self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.hidden = hidden

    def forward(self, x):
        batch, length, _ = x.shape
        # mend: unrolled-lstm
        h1 = c1 = h2 = c2 = x.new_zeros(batch, self.hidden)
        outputs = []
        for t in range(length):  # waste: unrolled-lstm
            h1, c1 = self.first(x[:, t], (h1, c1))  # waste: unrolled-lstm
            h2, c2 = self.second(h1, (h2, c2))  # waste: unrolled-lstm
            outputs.append(h2)
        return torch.stack(outputs, dim=1)
        # instead: return self.lstm(x)[0]


class AcousticModel(nn.Module):
    def __init__(self, hidden, bands=80):
        super().__init__()
        self.conv1 = nn.Conv1d(bands, 256, 5, padding=2)
        self.conv2 = nn.Conv1d(256, 256, 5, stride=2, padding=2)
        self.encoder = Encoder(256, hidden)
        self.classifier = nn.Linear(hidden, PHONES)

    def forward(self, banks):
        x = F.relu(self.conv2(F.relu(self.conv1(banks))))
        return self.classifier(self.encoder(x.transpose(1, 2)))


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def batches(loader):
    while True:
        yield from loader


def main():
    args = parse_arguments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = FilterBanks(8 * args.batch_size, args.frames)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, pin_memory=device == "cuda")
    model = AcousticModel(args.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)

    started = time.time()
    for step, (banks, phones) in enumerate(batches(loader)):
        if step == args.steps:
            break
        banks, phones = banks.to(device, non_blocking=True), phones.to(device, non_blocking=True)
        scores = model(banks)
        loss = F.cross_entropy(scores.flatten(0, 1), phones.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}, loss {loss.item():.3f}, {(time.time() - started) / (step + 1):.3f} s/step")
        # step


if __name__ == "__main__":
    main()
