"""The step time of `nearpeak profile` beside that of the script's own clock, for ten scripts of a device.

    PYTHONPATH=src python -m benchmarks.accuracy.step_time --json step_time.json                # bound by the host
    PYTHONPATH=src python -m benchmarks.accuracy.step_time --gpu-bound --json step_time_gpu.json

Each script marks the end of each of its steps on `time.perf_counter` and prints the times between. It runs as it is,
then under the profiler, and again as it is: the step that is reported is compared with the mean of the two medians,
whose difference says how well the machine repeats itself. The same script's marks while it was profiled show the clean
steps as it saw them, and those after everything was recorded. The ten that are bound by the host run on a GPU if there
is one; those that are bound by a GPU need one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOLERANCE = 0.03
WARM = 20
"""Steps that a script's own median leaves out."""

HEAD = """
import json, random, statistics, sys, time
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
random.seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = int(sys.argv[1])
marks = []


def mark():
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    marks.append(time.perf_counter())

"""
TAIL = """
print("STEPS " + json.dumps([end - begin for begin, end in zip(marks, marks[1:])]), flush=True)
"""

HOST_BOUND = {
    # many small layers, trained with an optimizer that loops over parameters
    "deep_narrow": """
model = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.Tanh()) for _ in range(16)]).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(8, 48, device=DEVICE)).square().mean().backward()
    optimizer.step()
    mark()
""",
    # rows made by Python in every step
    "python_input": """
model = nn.Linear(48, 12).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for _ in range(STEPS):
    rows = [[random.gauss(0.0, 1.0) for _ in range(48)] for _ in range(32)]
    optimizer.zero_grad()
    model(torch.tensor(rows, device=DEVICE)).logsumexp(-1).mean().backward()
    optimizer.step()
    mark()
""",
    # inference of a module of one's own, with few ops
    "small_inference": """
class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(500, 32), nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, ids):
        return self.last(F.silu(self.first(self.embed(ids).mean(1)))).sigmoid()


model = Scorer().to(DEVICE).eval()
ids = torch.randint(0, 500, (4, 12), device=DEVICE)
with torch.no_grad():
    for _ in range(4 * STEPS):
        for _ in range(1):
            model(ids)
        mark()
""",
    # modules of one class within each other
    "nested_sequential": """
pairs = [nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 64))) for _ in range(9)]
model = nn.Sequential(*pairs).to(DEVICE).eval()
rows = torch.randn(8, 64, device=DEVICE)
with torch.inference_mode():
    for _ in range(2 * STEPS):
        model(rows)
        mark()
""",
    # a loop over time in Python
    "recurrent_cell": """
cell, head = nn.GRUCell(24, 48).to(DEVICE), nn.Linear(48, 8).to(DEVICE)
optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()], 1e-3)
for _ in range(STEPS):
    state = torch.zeros(6, 48, device=DEVICE)
    for _ in range(20):
        state = cell(torch.randn(6, 24, device=DEVICE), state)
    loss = F.cross_entropy(head(state), torch.randint(0, 8, (6,), device=DEVICE))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mark()
""",
    # a loader in the process of the script
    "loader": """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * STEPS

    def __getitem__(self, index):
        return torch.randn(40), index % 5


model = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 5)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for rows, labels in torch.utils.data.DataLoader(Rows(), batch_size=16):
    loss = F.cross_entropy(model(rows.to(DEVICE)), labels.to(DEVICE))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mark()
""",
    # gradients of several batches before each step
    "accumulated": """
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
for _ in range(STEPS):
    optimizer.zero_grad()
    for _ in range(5):
        (model(torch.randn(10, 32, device=DEVICE)).square().mean() / 5).backward()
    optimizer.step()
    mark()
""",
    # the loss is read and its mean kept in every step
    "read_loss": """
model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
mean = 0.0
for step in range(STEPS):
    loss = model(torch.randn(3, 10, 32, device=DEVICE)).pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean += (loss.item() - mean) / (step + 1)
    mark()
""",
    # a scheduler and two groups of parameters
    "scheduled": """
body, head = nn.Sequential(nn.Linear(20, 60), nn.SiLU(), nn.Linear(60, 20)), nn.Linear(20, 4)
body, head = body.to(DEVICE), head.to(DEVICE)
optimizer = torch.optim.NAdam([{"params": body.parameters()}, {"params": head.parameters(), "lr": 1e-4}], 1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
for _ in range(STEPS):
    optimizer.zero_grad()
    F.mse_loss(head(body(torch.randn(12, 20, device=DEVICE))), torch.zeros(12, 4, device=DEVICE)).backward()
    optimizer.step()
    scheduler.step()
    mark()
""",
    # a text that grows by a token in each step
    "generation": """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(200, 48), nn.GRU(48, 48, 2, batch_first=True), nn.Linear(48, 200)

    def forward(self, token, state=None):
        mixed, state = self.mix(self.embed(token), state)
        return self.out(mixed[:, -1]), state


model = Decoder().to(DEVICE).eval()
token, state = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), None
with torch.no_grad():
    for _ in range(2 * STEPS):
        logits, state = model(token, state)
        token = logits.argmax(-1, keepdim=True)
        mark()
""",
}

GPU_HEAD = HEAD.replace(
    """    if DEVICE == "cuda":
        torch.cuda.synchronize()
""",
    """    if not ASYNCHRONOUS:
        torch.cuda.synchronize()
""",
).replace("marks = []", 'marks = []\nASYNCHRONOUS = "asynchronous" in sys.argv')
GPU_BOUND = {
    "mlp_large": """
model = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096)).to(DEVICE, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
rows = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(rows).float().square().mean().backward()
    optimizer.step()
    mark()
""",
    "encoder": """
layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, 6).to(DEVICE, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
rows = torch.randn(16, 512, 1024, device=DEVICE, dtype=torch.bfloat16)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
    mark()
""",
    "convolutions": """
blocks = [nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(nn.Conv2d(3, 128, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
images = torch.randn(32, 3, 96, 96, device=DEVICE)
for _ in range(STEPS):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(images).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    mark()
""",
    "large_inference": """
model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.SiLU()) for _ in range(12)]).to(DEVICE, torch.float16)
rows = torch.randn(8192, 4096, device=DEVICE, dtype=torch.float16)
with torch.no_grad():
    for _ in range(STEPS):
        model(rows)
        mark()
""",
    "memory_bound": """
class Chain(nn.Module):
    def forward(self, x):
        for _ in range(12):
            x = torch.tanh(x * 1.01 + 0.1)
        return x


model = Chain()
rows = torch.randn(64, 2**20, device=DEVICE)
with torch.no_grad():
    for _ in range(STEPS):
        model(rows)
        mark()
""",
    "lstm": """
model = nn.LSTM(1024, 1024, 2, batch_first=True).to(DEVICE, torch.float16)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
rows = torch.randn(64, 256, 1024, device=DEVICE, dtype=torch.float16)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(rows)[0].float().mean().backward()
    optimizer.step()
    mark()
""",
    "attention": """
class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(2048, 6144), nn.Linear(2048, 2048)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 4096, 3, 16, 128).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(4, 4096, 2048))


model = Mix().to(DEVICE, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
rows = torch.randn(4, 4096, 2048, device=DEVICE, dtype=torch.bfloat16)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
    mark()
""",
    "vocabulary": """
embed, out = nn.Embedding(32000, 1024).to(DEVICE), nn.Linear(1024, 32000, bias=False).to(DEVICE)
optimizer = torch.optim.AdamW([*embed.parameters(), *out.parameters()], 1e-4, fused=True)
ids = torch.randint(0, 32000, (8, 512), device=DEVICE)
for _ in range(STEPS):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        logits = out(embed(ids))
    F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
    optimizer.step()
    mark()
""",
    "logged": """
model = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
rows = torch.randn(4096, 2048, device=DEVICE)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = F.mse_loss(model(rows), rows)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        loss.item()
    mark()
""",
    "compiled": """
model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.GELU()) for _ in range(6)])
model = torch.compile(model.to(DEVICE, torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
rows = torch.randn(8192, 2048, device=DEVICE, dtype=torch.bfloat16)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
    mark()
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu-bound", action="store_true")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile:
        print("PROFILED " + json.dumps(_profile(arguments.profile, arguments.steps)))
        return
    scripts = GPU_BOUND if arguments.gpu_bound else HOST_BOUND
    results = []
    for name, body in scripts.items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / f"{name}.py"
            script.write_text((GPU_HEAD if arguments.gpu_bound else HEAD) + body + TAIL)
            try:
                result = _compare(name, script, arguments.steps)
            except (subprocess.SubprocessError, ValueError, KeyError, IndexError) as error:
                result = {"name": name, "error": f"{error} {getattr(error, 'stderr', '') or ''}"[-2000:]}
        results.append(result)
        print(_line(result), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    within = sum(abs(result.get("off", 1.0)) <= TOLERANCE for result in results)
    print(f"{within} of {len(results)} within {100 * TOLERANCE:.0f} %")


def _compare(name: str, script: Path, steps: int) -> dict[str, object]:
    began = time.perf_counter()
    before = _own_steps([sys.executable, str(script), str(steps)])
    command = [sys.executable, "-m", "benchmarks.accuracy.step_time", "--profile", str(script), "--steps", str(steps)]
    profiled = json.loads(_run(command).partition("PROFILED ")[2])
    after = _own_steps([sys.executable, str(script), str(steps)])
    medians = [statistics.median(each[WARM:]) for each in (before, after)]
    own = statistics.fmean(medians)
    return {
        "name": name,
        "own_s": own,
        "own_runs_s": medians,
        "off": profiled["wall_s"] / own - 1.0,
        **profiled,
        "seconds": time.perf_counter() - began,
    }


def _own_steps(command: list[str]) -> list[float]:
    steps: list[float] = json.loads(_run(command).partition("STEPS ")[2])
    return steps


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=os.environ).stdout


def _profile(script: Path, steps: int) -> dict[str, object]:
    """Profiles a script in this process; its own marks by what nearpeak did in each step."""
    from nearpeak.profiles.grade import grade_profile
    from nearpeak.profiling.script import profile_script
    from nearpeak.profiling.session import Session

    phases: list[str] = []
    step_ends = Session.step_ends

    def note_phase(session: Session, *args: object, **kwargs: object) -> None:
        step_ends(session, *args, **kwargs)  # type: ignore[arg-type]
        phases.append(session.schedule.phase)

    Session.step_ends = note_phase  # type: ignore[method-assign, assignment]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ran = profile_script(script, [str(steps)], on=os.environ.get("NEARPEAK_ON", "h100-sxm"))
    own = json.loads(printed.getvalue().partition("STEPS ")[2])
    by_phase: dict[str, list[float]] = {}
    for number, took in enumerate(own):  # the first mark ends a step, after which the session names the next phase
        by_phase.setdefault(phases[number] if number < len(phases) else "after", []).append(took)
    if ran.profile is None:
        raise ValueError(ran.missing)
    grade = grade_profile(ran.profile)
    return {
        "wall_s": ran.profile.wall_s,
        "walls": ran.profile.walls,
        "grade": grade.letter,
        "reasons": grade.reasons,
        "idle_s": ran.profile.waterfall.seconds("idle"),
        "own_by_phase_s": {phase: statistics.median(times) for phase, times in by_phase.items()},
    }


def _line(result: dict[str, object]) -> str:
    if "error" in result:
        return f"{result['name']:20} {result['error']}"
    own, off, runs = result["own_s"], result["off"], result["own_runs_s"]
    phases = result["own_by_phase_s"]
    assert isinstance(own, float) and isinstance(off, float) and isinstance(runs, list) and isinstance(phases, dict)
    seen = ", ".join(f"{phase} {1e3 * phases[phase]:.3f}" for phase in ("clean", "after", "done") if phase in phases)
    return (
        f"{result['name']:20} own {1e3 * own:.3f} ms (runs {100 * (runs[1] / runs[0] - 1):+.1f} %), reported "
        f"{100 * off:+.1f} %, grade {result['grade']}; own clock while profiled: {seen}"
    )


if __name__ == "__main__":
    main()
