"""Train a small speech recognizer with CTC on log-mel features, with adaptive SpecAugment (many short time masks)."""

# cpu: --batch-size 32 --frames 96 --mels 32 --width 48 --layers 1 --letters 6
# cuda: --batch-size 32 --frames 1200 --mels 80 --width 512 --layers 6 --letters 60

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class SpecAugment:
    """Two bands of channels and ten stretches of time are blanked in every utterance."""

    def __init__(self, mels, frames, bands=2, stretches=10):
        self.mels, self.frames = mels, frames
        self.bands, self.stretches = bands, stretches

    def draw(self, batch, count, length, widest, device):
        width = torch.randint(1, widest + 1, (batch, count), device=device)
        start = (torch.rand(batch, count, device=device) * (length - width)).long()
        return start, width

    def __call__(self, features):
        batch, device = features.size(0), features.device
        low, height = self.draw(batch, self.bands, self.mels, max(self.mels // 5, 1), device)
        first, span = self.draw(batch, self.stretches, self.frames, max(self.frames // 25, 1), device)
        # mend: mask-by-mask
        features = features.clone()
        for i in range(batch):
            for j in range(self.bands):
                begin = low[i, j].item()  # waste: mask-by-mask
                features[i, :, begin : begin + height[i, j].item()] = 0.0  # waste: mask-by-mask
            for j in range(self.stretches):
                begin = first[i, j].item()  # waste: mask-by-mask
                features[i, begin : begin + span[i, j].item()] = 0.0  # waste: mask-by-mask
        return features
        # instead: channel = torch.arange(self.mels, device=device)
        # instead: frame = torch.arange(self.frames, device=device)
        # instead: in_band = ((channel >= low[..., None]) & (channel < (low + height)[..., None])).any(dim=1)
        # instead: in_time = ((frame >= first[..., None]) & (frame < (first + span)[..., None])).any(dim=1)
        # instead: return features.masked_fill(in_band[:, None, :] | in_time[:, :, None], 0.0)


class Recognizer(nn.Module):
    def __init__(self, mels, width, layers, symbols):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(mels, width, 3, stride=2, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, stride=2, padding=1)
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, features):
        x = self.front(features.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Learner:
    def __init__(self, model, augment, lr):
        self.model, self.augment = model, augment
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def update(self, features, letters, letter_counts):
        device = features.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = self.model(self.augment(features))
        log_probs = logits.float().log_softmax(dim=-1).transpose(0, 1)
        frame_counts = torch.full((features.size(0),), log_probs.size(0), dtype=torch.long)
        loss = F.ctc_loss(log_probs, letters, frame_counts, letter_counts, zero_infinity=True)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_utterances(batch, frames, mels, letters, symbols, device):
    text = torch.randint(1, symbols, (batch, letters))
    shapes = torch.randn(symbols, mels)
    rough = shapes[text].repeat_interleave(frames // letters, dim=1)
    features = F.pad(rough, (0, 0, 0, frames - rough.size(1))) + 0.5 * torch.randn(batch, frames, mels)
    counts = torch.randint(letters // 2, letters + 1, (batch,))
    return features.to(device), text.to(device), counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--frames", type=int, default=96)
    parser.add_argument("--mels", type=int, default=32)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--letters", type=int, default=6)
    parser.add_argument("--symbols", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model = Recognizer(args.mels, args.width, args.layers, args.symbols).to(device)
    learner = Learner(model, SpecAugment(args.mels, args.frames), lr=5e-4)
    shape = (args.batch_size, args.frames, args.mels, args.letters, args.symbols)
    batches = [make_utterances(*shape, device) for _ in range(4)]

    for step in range(args.steps):
        loss = learner.update(*batches[step % len(batches)])
        if step % 10 == 0 or step == args.steps - 1:
            print(f"update {step}: ctc {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
