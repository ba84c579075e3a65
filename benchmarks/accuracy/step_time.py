"""The step time of `nearpeak profile` beside that of the script's own clock, for ten scripts of a kind.

    PYTHONPATH=src python -m benchmarks.accuracy.step_time --json step_time.json                # bound by the host
    PYTHONPATH=src python -m benchmarks.accuracy.step_time --gpu-bound --json step_time_gpu.json

Each script marks the end of each of its steps on `time.perf_counter` and prints the times between. It runs as it is,
and under the profiler, each in a process that is forked when everything is imported. The reported step is compared with
the script's own median in two ways: of the run alone, and of the steps of the profiled run that came after everything
was recorded, when nothing of nearpeak's is left. The second is free of what differs between two processes; on a GPU,
CUPTI stays attached to the process then, unless the script is told to detach it (`--detached`, TEARDOWN_CUPTI=1 in its
environment). What two processes differ by without a profiler is measured too: the script runs alone before and after
the profiled run, and what the second says of the first is what can be expected of any tool. The ten that are bound
by the host run on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import select
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOLERANCE = 0.03
WARM = 20
"""Steps that a script's own median leaves out."""
LONGEST_S = 60.0

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
    "images": """
model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *[nn.Conv2d(64, 64, 3, 1, 1) for _ in range(6)]
)
model = model.to(DEVICE, torch.float16).to(memory_format=torch.channels_last).eval()
images = torch.randn(128, 3, 224, 224, device=DEVICE, dtype=torch.float16).to(memory_format=torch.channels_last)
with torch.inference_mode():
    for _ in range(STEPS):
        model(images)
        mark()
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu-bound", action="store_true")
    parser.add_argument("--detached", action="store_true", help="CUPTI is detached from a process after profiling")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the driver does not survive a fork
    if arguments.detached:
        os.environ["TEARDOWN_CUPTI"] = "1"
    from nearpeak.profiling import script as _  # noqa: F401  # before the forks

    scripts = GPU_BOUND if arguments.gpu_bound else HOST_BOUND
    results = []
    for name, body in scripts.items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / f"{name}.py"
            script.write_text((GPU_HEAD if arguments.gpu_bound else HEAD) + body + TAIL)
            result = {"name": name} | _compare(script, arguments.steps)
        results.append(result)
        print(_line(result), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for against in ("alone", "after"):
        off = [abs(result["off"].get(against, 1.0)) for result in results if "off" in result]
        print(
            f"{sum(each <= TOLERANCE for each in off)} of {len(results)} within {TOLERANCE:.0%} of its clock {against}"
        )
    repeated = sum(abs(result.get("alone_off", 1.0)) <= TOLERANCE for result in results)
    print(f"{repeated} of {len(results)} scripts alone within {TOLERANCE:.0%} of themselves alone, in another process")


def _compare(script: Path, steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    alone = _in_fork(lambda: _run_alone(script, steps))
    profiled = _in_fork(lambda: _run_profiled(script, steps))
    again = _in_fork(lambda: _run_alone(script, steps))
    if error := "".join(each.get("error", "") for each in (alone, profiled, again)):
        return {"error": error}
    medians = [statistics.median(each["steps"][WARM:]) for each in (alone, again)]
    own = {"alone": statistics.mean(medians)}
    if "after" in profiled["own_by_phase_s"]:
        own["after"] = profiled["own_by_phase_s"]["after"]
    off = {against: profiled["wall_s"] / seconds - 1.0 for against, seconds in own.items()}
    alone_off = medians[1] / medians[0] - 1.0
    return {"own_s": own, "off": off, "alone_off": alone_off, **profiled, "seconds": time.perf_counter() - began}


def _in_fork(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a function that runs in a child process, or an error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            result = run()
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        with os.fdopen(writer, "w") as stream:
            stream.write(json.dumps(result))
        os._exit(0)
    os.close(writer)
    text = ""
    deadline = time.monotonic() + LONGEST_S
    with os.fdopen(reader) as stream:
        while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(stream.fileno(), 1 << 16).decode()
            if not part:
                break
            text += part
        else:
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text) if text else {"error": "it ended without a result"}
    return result


def _run_alone(script: Path, steps: int) -> dict[str, Any]:
    sys.argv = [str(script), str(steps)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    return {"steps": json.loads(printed.getvalue().partition("STEPS ")[2])}


def _run_profiled(script: Path, steps: int) -> dict[str, Any]:
    """Profiles a script; its own marks by what nearpeak did in each step."""
    from nearpeak._records import to_json
    from nearpeak.profiles.grade import grade_profile
    from nearpeak.profiling.script import profile_script
    from nearpeak.profiling.session import Session

    phases: list[str] = []
    sessions: list[Session] = []
    step_ends = Session.step_ends

    def note_phase(session: Session, *args: object, **kwargs: object) -> None:
        step_ends(session, *args, **kwargs)  # type: ignore[arg-type]
        phases.append(session.schedule.phase)
        sessions[:] = [session]

    Session.step_ends = note_phase  # type: ignore[method-assign, assignment]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ran = profile_script(script, [str(steps)], on="h200-sxm")
    own = json.loads(printed.getvalue().partition("STEPS ")[2])
    by_phase: dict[str, list[float]] = {}
    for number, took in enumerate(own):  # the first mark ends a step, after which the session names the next phase
        by_phase.setdefault(phases[number] if number < len(phases) else "after", []).append(took)
    by_phase["after"] = by_phase.get("after", [])[3:]  # the first ones find other things in the caches
    if ran.profile is None:
        raise ValueError(ran.missing)
    grade = grade_profile(ran.profile)
    return {
        "wall_s": ran.profile.wall_s,
        "walls": ran.profile.walls,
        "host_ahead": sessions[0].schedule.host_ahead,
        "grade": grade.letter,
        "reasons": grade.reasons,
        "conditions": to_json(ran.profile.conditions),
        "idle_s": ran.profile.waterfall.seconds("idle"),
        "own_by_phase_s": {phase: statistics.median(times) for phase, times in by_phase.items() if times},
    }


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['name']:20} {result['error']}"
    off = ", ".join(f"{100 * each:+.1f} % of its clock {against}" for against, each in result["off"].items())
    seen = ", ".join(f"{phase} {1e3 * seconds:.3f}" for phase, seconds in result["own_by_phase_s"].items())
    return (
        f"{result['name']:20} {1e3 * result['wall_s']:.3f} ms reported: {off}; grade {result['grade']}; alone "
        f"{1e3 * result['own_s']['alone']:.3f} ({100 * result['alone_off']:+.1f} % the second time), while profiled "
        f"{seen}; took {result['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
