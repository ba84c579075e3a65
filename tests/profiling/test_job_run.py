"""Two ranks over gloo below `nearpeak profile`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(16 * 120, 256))
for (batch,) in torch.utils.data.DataLoader(data, batch_size=16):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_rank_0_reports_the_job_and_the_rank_that_waits_for_its_input(tmp_path: Path):
    script, result = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "nearpeak"]
    command += [
        "profile",
        "--stop",
        "--no-keep",
        "--on",
        "h200-sxm",
        "--inject",
        "rank=1,input=40ms",
        "-o",
        str(result),
        str(script),
    ]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("Job: 2 ranks") == 1  # rank 0 speaks for both
    profile = json.loads(result.read_text())["profile"]
    assert profile["communication_s"] > 0.0
    job = profile["job"]
    assert (job["world_size"], len(job["ranks"]), job["matched"]) == (2, 2, 1.0)
    assert (job["late"][0]["rank"], job["late"][0]["cause"], job["late"][0]["pattern"]) == (1, "input", "always")
