"""Trains a neural transducer for speech recognition with a stateless predictor and its own lattice loss."""

# cpu: --width 96 --joint 256 --layers 2 --vocab 160 --batch-size 4 --frames 160 --tokens 10
# cuda: --width 512 --joint 1024 --layers 6 --vocab 2000 --batch-size 32 --frames 160 --tokens 10

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class SpeechEncoder(nn.Module):
    def __init__(self, mels, width, layers):
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv1d(mels, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, mel):
        return self.norm(self.layers(self.subsample(mel).transpose(1, 2)))


class Predictor(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.context = nn.Conv1d(width, width, 2)

    def forward(self, targets):
        history = F.pad(targets, (2, 0))
        return F.relu(self.context(self.embed(history).transpose(1, 2))).transpose(1, 2)


class Joiner(nn.Module):
    def __init__(self, width, joint, vocab):
        super().__init__()
        self.project = nn.Linear(2 * width, joint)
        self.output = nn.Linear(joint, vocab)

    def forward(self, audio, text):
        # mend: joint-concat
        audio = audio.unsqueeze(2).expand(-1, -1, text.size(1), -1)
        text = text.unsqueeze(1).expand(-1, audio.size(1), -1, -1)
        hidden = self.project(torch.cat([audio, text], dim=-1))  # waste: joint-concat
        # instead: for_audio, for_text = self.project.weight.chunk(2, dim=1)
        # instead: audio = F.linear(audio, for_audio, self.project.bias)
        # instead: hidden = audio.unsqueeze(2) + F.linear(text, for_text).unsqueeze(1)
        return self.output(torch.tanh(hidden))


class Transducer(nn.Module):
    def __init__(self, mels, width, joint, layers, vocab):
        super().__init__()
        self.encoder = SpeechEncoder(mels, width, layers)
        self.predictor = Predictor(vocab, width)
        self.joiner = Joiner(width, joint, vocab)

    def forward(self, mel, targets):
        return self.joiner(self.encoder(mel), self.predictor(targets))


def transducer_loss(logits, targets, frame_lengths, token_lengths):
    logits = logits.float()
    norm = logits.logsumexp(-1)
    blanks = (logits[..., 0] - norm).unbind(1)
    picks = targets[:, None, :, None].expand(-1, logits.size(1), -1, -1)
    labels = (logits[:, :, :-1].gather(-1, picks).squeeze(-1) - norm[:, :, :-1]).unbind(1)

    alpha = F.pad(labels[0].cumsum(1), (1, 0))
    rows = [alpha]
    for t in range(1, len(blanks)):
        stay = alpha + blanks[t - 1]
        # mend: lattice-cells
        cells = [stay[:, 0]]
        for u in range(1, stay.size(1)):
            cells.append(torch.logaddexp(stay[:, u], cells[-1] + labels[t][:, u - 1]))  # waste: lattice-cells
        alpha = torch.stack(cells, dim=1)
        # instead: offset = F.pad(labels[t].cumsum(1), (1, 0))
        # instead: alpha = offset + (stay - offset).logcumsumexp(1)
        rows.append(alpha)
    lattice = torch.stack(rows, dim=1) + torch.stack(blanks, dim=1)
    batch = torch.arange(lattice.size(0), device=lattice.device)
    return -(lattice[batch, frame_lengths - 1, token_lengths] / token_lengths).mean()


def make_speech(count, mels, frames, tokens, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(1, vocab, (count, tokens), generator=generator)
    voices = torch.randn(vocab, mels, generator=generator)
    spans = torch.arange(frames) * tokens // frames
    mel = voices[targets[:, spans]].transpose(1, 2) + 0.5 * torch.randn(count, mels, frames, generator=generator)
    token_lengths = torch.randint(tokens // 2, tokens + 1, (count,), generator=generator)
    frame_lengths = torch.div(token_lengths * (frames // 4), tokens, rounding_mode="floor")
    return mel, targets, frame_lengths, token_lengths


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--joint", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mels", type=int, default=80)
    parser.add_argument("--vocab", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--frames", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Transducer(args.mels, args.width, args.joint, args.layers, args.vocab).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    data = make_speech(args.batch_size * 8, args.mels, args.frames, args.tokens, args.vocab, seed=6)
    data = [part.to(device).split(args.batch_size) for part in data]

    for step in range(args.steps):
        mel, targets, frame_lengths, token_lengths = (part[step % 8] for part in data)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(mel, targets)
        loss = transducer_loss(logits, targets, frame_lengths, token_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f}")
        # step


if __name__ == "__main__":
    main()
