"""Align a language model with a frozen image tower: features of an inner layer, a projector, captions as targets."""

# cpu: --width 96 --tower-layers 8 --layers 2 --image 112 --batch-size 4 --words 24 --vocab 512
# cuda: --width 1024 --tower-layers 12 --layers 4 --image 336 --batch-size 16 --words 64 --vocab 8000

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, causal, heads=8):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ImageTower(nn.Module):
    def __init__(self, image, width, layers, patch=14):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(layers))

    def forward(self, images, select):
        """The output of one layer, counted from the end as the captioners do it."""
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        # mend: layers-after-the-selected
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))  # waste: layers-after-the-selected
        return states[select]
        # instead: for block in self.blocks[: select + 1]: x = block(x)
        # instead: return x


class Projector(nn.Module):
    """Joins two by two patches and maps them to the width of words."""

    def __init__(self, width):
        super().__init__()
        layers = [nn.LayerNorm(4 * width), nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers)

    def forward(self, features):
        b, n, d = features.shape
        side = int(n**0.5)
        square = features.view(b, side // 2, 2, side // 2, 2, d).transpose(2, 3)
        return self.net(square.reshape(b, n // 4, 4 * d))


class Captioner(nn.Module):
    def __init__(self, image, width, tower_layers, layers, vocab, words, select=-4):
        super().__init__()
        self.tower = ImageTower(image, width, tower_layers)
        self.projector = Projector(width)
        self.word = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn((image // 28) ** 2 + words, width))
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.select = select

    def loss(self, images, words):
        seen = self.projector(self.tower(images, self.select))  # waste: gradients-of-the-tower
        # instead: seen = self.projector(self.tower(images, self.select))
        x = torch.cat([seen, self.word(words[:, :-1])], dim=1)
        x = x + self.position[: x.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, seen.size(1) :]))
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class AlignmentTrainer:
    """The tower stays as it is: only what comes after it is given to the optimizer."""

    def __init__(self, model, lr):
        self.model = model
        # mend: gradients-of-the-tower
        kept = {id(p) for p in model.tower.parameters()}
        trained = [p for p in model.parameters() if id(p) not in kept]  # waste: gradients-of-the-tower
        # instead: model.tower.requires_grad_(False)
        # instead: trained = [p for p in model.parameters() if p.requires_grad]
        self.trained = trained
        self.optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)

    def step(self, images, words):
        kind = images.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            loss = self.model.loss(images, words)
        loss.backward()  # waste: gradients-of-the-tower
        # instead: loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image", type=int, default=112)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--tower-layers", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--words", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Captioner(args.image, args.width, args.tower_layers, args.layers, args.vocab, args.words)
    trainer = AlignmentTrainer(model, lr=1e-3)
    images = torch.randn(4 * args.batch_size, 3, args.image, args.image, device=device)
    words = torch.randint(0, args.vocab, (4 * args.batch_size, args.words), device=device)

    for step in range(args.steps):
        rows = slice(step % 4 * args.batch_size, (step % 4 + 1) * args.batch_size)
        loss = trainer.step(images[rows], words[rows])
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
        # step


if __name__ == "__main__":
    main()
