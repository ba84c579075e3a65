"""The places that `fix` recognizes in models of many architectures, each changed alone and all together: what ran, how
far results and gradients are from float32, and how long a step takes.

    PYTHONPATH=src python -m benchmarks.models.fix_sites --json fix_sites.json
    PYTHONPATH=src python -m benchmarks.models.fix_sites --small --models llama,hand_llama      # on a CPU

Models are those of transformers from their configurations with drawn weights, and a few written by hand. Nothing is
decided here: `nearpeak fix` measures and keeps or rolls back; this shows what it has to choose from.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearpeak import kernels
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.registry import fixes, observe

Batch = dict[str, Any]


class WrittenAttention(nn.Module):
    """As in nanoGPT without flash attention."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.heads = nn.Dropout(0.0), heads
        self.register_buffer("bias", torch.ones(tokens, tokens).tril().view(1, 1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        weights = self.attn_dropout(functional.softmax(scores, dim=-1))
        return self.c_proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class WrittenGELU(nn.Module):
    """The approximation with a hyperbolic tangent, op by op."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class WrittenLayerNorm(nn.Module):
    """LayerNorm, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


class NanoBlock(nn.Module):
    """A layer of nanoGPT."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.ln_1, self.attn = WrittenLayerNorm(width), WrittenAttention(width, heads, tokens)
        self.ln_2 = WrittenLayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), WrittenGELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A model in the form of nanoGPT."""

    def __init__(self, width: int, heads: int, tokens: int, layers: int, classes: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(classes, width), nn.Embedding(tokens, width)
        self.h = nn.ModuleList(NanoBlock(width, heads, tokens) for _ in range(layers))
        self.ln_f, self.lm_head = WrittenLayerNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


class WrittenRMSNorm(nn.Module):
    """RMSNorm, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class LlamaBlock(nn.Module):
    """A layer of a Llama, written in one forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2, self.heads = WrittenRMSNorm(width), WrittenRMSNorm(width), heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.w2 = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.n1(x)
        q, k, v = (w(y).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(heads.transpose(1, 2).reshape(b, t, c))
        y = self.n2(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class HandLlama(nn.Module):
    """A Llama written by hand."""

    def __init__(self, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(classes, width), nn.ModuleList()
        self.blocks.extend(LlamaBlock(width, heads) for _ in range(layers))
        self.norm, self.head, self.dim = WrittenRMSNorm(width), nn.Linear(width, classes, bias=False), width // heads

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        pairs = torch.arange(0, self.dim, 2, device=x.device).float() / self.dim
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * 10000.0**-pairs
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    """Convolutions down and up, for images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.a, self.b = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.g1, self.g2 = nn.GroupNorm(4, c), nn.GroupNorm(4, 2 * c)
        self.up, self.out = nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.Conv2d(2 * c, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = functional.silu(self.g1(self.a(image)))
        b = functional.silu(self.g2(self.b(a)))
        return self.out(torch.cat((self.up(b), a), 1)).float().square().mean()


class ResidualNet(nn.Module):
    """A classifier of images in the form of a ResNet."""

    class Block(nn.Module):
        def __init__(self, channels: int, stride: int) -> None:
            super().__init__()
            c = channels * stride
            self.a, self.b = nn.Conv2d(channels, c, 3, stride, 1, bias=False), nn.Conv2d(c, c, 3, 1, 1, bias=False)
            self.n1, self.n2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
            self.short = nn.Conv2d(channels, c, 1, stride, bias=False) if stride > 1 else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(self.n2(self.b(functional.relu(self.n1(self.a(x))))) + self.short(x))

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        c = channels
        self.stem, self.head = nn.Conv2d(3, c, 3, 2, 1), nn.Linear(4 * c, classes)
        self.blocks = nn.Sequential(self.Block(c, 1), self.Block(c, 2), self.Block(2 * c, 1), self.Block(2 * c, 2))

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.stem(image)).mean((2, 3))
        return functional.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    """An LSTM with a classifier of tokens."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(classes, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        y, _ = self.rnn(self.embedding(input_ids))
        return functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def models(small: bool, layers: int | None = None) -> dict[str, Callable[[], tuple[nn.Module, Batch]]]:
    """By name: makes the model and its batch, on the CPU in float32."""
    import transformers

    width, depth, rows, tokens, classes, dim = (32, 2, 2, 12, 96, 8) if small else (1024, 4, 4, 1024, 32000, 64)
    layers = layers or depth
    heads = width // dim
    images = torch.randn(rows, 3, 32 if small else 224, 32 if small else 224)
    ids = torch.randint(3, classes, (rows, tokens))
    text: Batch = {"input_ids": ids, "labels": ids}
    sizes = {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": classes,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    encoder = {name: value for name, value in sizes.items() if name not in ("num_key_value_heads",)}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}

    def causal(name: str, **options: Any) -> Callable[[], tuple[nn.Module, Batch]]:
        def make() -> tuple[nn.Module, Batch]:
            config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
            return getattr(transformers, f"{name}ForCausalLM")(config(**{**sizes, **options})), text

        return make

    return {
        "llama": causal("Llama"),
        "qwen3": causal("Qwen3", head_dim=dim),
        "qwen3_moe": causal("Qwen3Moe", head_dim=dim, **moe),
        "mistral": causal("Mistral", sliding_window=max(8, tokens // 2)),
        "mixtral": causal("Mixtral", num_local_experts=8, num_experts_per_tok=2),
        "gemma3": causal("Gemma3", head_dim=dim, sliding_window=max(8, tokens // 2)),
        "phi": causal("Phi"),
        "gpt2": lambda: (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_embd=width,
                    n_layer=layers,
                    n_head=heads,
                    vocab_size=classes,
                    n_positions=2048,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                )
            ),
            text,
        ),
        "bert": lambda: (transformers.BertForMaskedLM(transformers.BertConfig(**encoder, **no_dropout)), text),
        "vit": lambda: (
            transformers.ViTForImageClassification(
                transformers.ViTConfig(
                    **encoder,
                    **no_dropout,
                    image_size=images.shape[-1],
                    patch_size=8 if small else 16,
                    num_labels=100,
                )
            ),
            {"pixel_values": images, "labels": torch.randint(100, (rows,))},
        ),
        "t5": lambda: (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    d_model=width,
                    d_kv=dim,
                    d_ff=2 * width,
                    num_layers=layers,
                    num_heads=heads,
                    vocab_size=classes,
                    feed_forward_proj="gated-gelu",
                    decoder_start_token_id=0,
                    dropout_rate=0.0,
                )
            ),
            text,
        ),
        "whisper": lambda: (
            transformers.WhisperForConditionalGeneration(
                transformers.WhisperConfig(
                    d_model=width,
                    encoder_layers=layers,
                    decoder_layers=layers,
                    encoder_attention_heads=heads,
                    decoder_attention_heads=heads,
                    encoder_ffn_dim=4 * width,
                    decoder_ffn_dim=4 * width,
                    vocab_size=classes,
                    num_mel_bins=16,
                    max_source_positions=tokens,
                    max_target_positions=2048,
                    pad_token_id=0,
                    bos_token_id=1,
                    eos_token_id=2,
                    decoder_start_token_id=1,
                    dropout=0.0,
                )
            ),
            {"input_features": torch.randn(rows, 16, 2 * tokens), "labels": ids},
        ),
        "nano_gpt": lambda: (NanoGPT(width, heads, tokens, layers, classes), text),
        "hand_llama": lambda: (HandLlama(width, heads, layers, classes), text),
        "unet": lambda: (UNet(8 if small else 64), {"image": images}),
        "resnet": lambda: (
            ResidualNet(8 if small else 64, 100),
            {"image": images, "labels": torch.randint(100, (rows,))},
        ),
        "lstm": lambda: (Recurrent(width, classes), text),
    }


def to_device(batch: Batch, device: str, dtype: torch.dtype) -> Batch:
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype) for name, value in batch.items()
    }


def loss_and_gradients(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach().float(), [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def distance(gradients: list[Tensor], reference: list[Tensor]) -> float:
    """Of all gradients together: the norm of the difference as a share of that of the reference."""
    pairs = list(zip(gradients, reference, strict=True))
    difference = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    return math.sqrt(difference / max(1e-300, sum(float(other.double().square().sum()) for _, other in pairs)))


def milliseconds(step: Callable[[], object], device: str, seconds: float) -> float:
    """The median of steps of forward and backward."""
    times: list[float] = []
    for _ in range(3):
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def kernels_of(step: Callable[[], object]) -> list[str]:
    """The kernels of nearpeak that run in a step, and how often."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    counts = Counter(event.name for event in profiler.events() if event.name.startswith("nearpeak::"))  # type: ignore[union-attr]
    return [f"{name.removeprefix('nearpeak::')} x{count}" for name, count in sorted(counts.items())]


def rows_of(name: str, make: Any, device: str, dtype: torch.dtype, seconds: float) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = make()
    model.to(device).train()
    wide_loss, wide = loss_and_gradients(model, to_device(batch, device, torch.float32))
    wide = [gradient.clone() for gradient in wide]
    model.to(dtype)
    batch = to_device(batch, device, dtype)

    def step() -> tuple[Tensor, list[Tensor]]:
        return loss_and_gradients(model, batch)

    def row(fix: str, what: str, sites: int, why: str = "") -> dict[str, Any]:
        loss, gradients = step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = milliseconds(step, device, seconds)
        return {
            "model": name, "fix": fix, "what": what, "sites": sites, "why": why, "ms": took,
            "loss_error": float((loss - wide_loss).abs()), "gradient_error": distance(gradients, wide),
            "kernels": kernels_of(step),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        }  # fmt: skip

    yield row("", "as it is", 0)
    run = observe(model, (), batch, trains=True)
    everything = Edits()
    for fix in fixes(without=["torch-compile"]):  # that of the others is measured here
        applied, what, reasons = Edits(), Counter[str](), Counter[str]()
        for site in list(fix.sites(run)):
            if site.skip:
                reasons[site.skip] += 1
                continue
            what[site.what] += 1
            site.change(applied)
        why = "; ".join(f"{count} skipped: {reason}" for reason, count in reasons.items())
        if not what:
            if why:
                yield {"model": name, "fix": fix.id, "what": "", "sites": 0, "why": why}
            applied.undo()
            continue
        try:
            yield row(fix.id, "; ".join(f"{count} x {text}" for text, count in what.items()), what.total(), why)
        except Exception as error:
            traceback.print_exc()
            yield {"model": name, "fix": fix.id, "what": str(what), "sites": 0, "why": f"FAILED: {error!r}"}
        finally:
            applied.undo()
        for site in list(fix.sites(run)):
            if not site.skip:
                site.change(everything)
    try:
        yield row("all", "all of them", 0)
    finally:
        everything.undo()
    yield row("undone", "after undo", 0)


def text_of(row: dict[str, Any]) -> str:
    start = f"{row['model']:10} {row['fix']:24} "
    if "ms" not in row:
        return start + row["why"]
    figures = f"{row['ms']:8.2f} ms  gradients {row['gradient_error']:.1e}  {row['peak_gb'] or 0:5.2f} GB"
    return f"{start}{row['sites']:3} {figures}  {row['what'][:90]} {row['why'][:80]} {row['kernels']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="")
    parser.add_argument("--small", action="store_true", help="tiny models, to try this on a CPU")
    parser.add_argument("--seconds", type=float, default=0.15, help="of timing for each row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = models(arguments.small)
    rows: list[dict[str, Any]] = []
    for name in arguments.models.split(",") if arguments.models else made:
        try:
            for row in rows_of(name, made[name], device, dtype, arguments.seconds):
                rows.append(row)
                print(text_of(row), flush=True)
        except Exception:  # one model must not end the others
            print(f"{name}: FAILED", flush=True)
            traceback.print_exc()
        if arguments.json:
            choices = [str(choice) for choice in kernels.choices()]
            arguments.json.write_text(
                json.dumps({"torch": torch.__version__, "rows": rows, "choices": choices}, indent=1)
            )
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
