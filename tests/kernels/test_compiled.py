"""All kernels compiled for an H100 on a machine without one: no spills, wide loads and stores, nothing in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "compile_for_sm90.py"
FILES = sorted((Path(__file__).parent / "sm90").glob("*.py"))
SPILLED = 0 if version("triton").startswith("3.6") else 512
"""Bytes of registers that may go to memory: configurations are for Triton 3.6, and others need other registers."""
MAX_SHARED_BYTES = 227 * 1024
NARROW = "narrow"
"""In the name of a launch whose tensors are such that nothing is loaded by 128 bits."""
SMALL = "small result"
"""In the name of a launch whose threads have less than 128 bits of the result each."""
AFTER = "after a product"
"""In the name of a launch that reads what a kernel before it writes."""
AFTER_OTHERS = {"add_partials", "sum_rows_kernel"}
"""Kernels that always do."""
BY_ROW = {"attention_delta_kernel", "linear_attention_means_kernel", "head_maxima_kernel"}
"""Kernels that write a number or two of each row or head, which no thread has several of."""
COPIED = {
    "attention_sm90_kernel", "attention_sm90_backward_kernel", "attention_sm90_wide_backward_kernel",
    "ladder_persistent_kernel", "gemm_sm90_kernel",
    "grouped_gemm_sm90_kernel", "grouped_gemm_fp8_sm90_kernel", "grouped_weight_gradient_sm90_kernel",
}  # fmt: skip
"""Kernels that have whole tiles copied, and load next to nothing themselves."""
CROWDED = {
    "attention_forward_kernel": 16, "attention_sm90_kernel": 16, "attention_sm90_backward_kernel": 1200,
    "attention_sm90_wide_backward_kernel": 400, "attention_keys_kernel": 600, "linear_attention_kernel": 440,
}  # fmt: skip
"""Kernels whose sums fill the registers, and how many bytes of the rest may go to memory, there and back."""
PRODUCTS = {
    "attention_forward_kernel", "attention_keys_kernel", "attention_queries_kernel", "ladder_tensor_cores_kernel",
    *COPIED,
}  # fmt: skip
"""Kernels of matrix products, which take the tensor cores of this generation."""


@pytest.mark.slow
def test_every_kernel_compiles_well():
    """The first launch of each in one process: torch and Triton take longer to import than most kernels to compile."""
    check(compiled(FILES, "--once"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configuration_compiles_well(path):
    check(compiled([path]))


@pytest.mark.slow
def test_importing_the_script_leaves_triton_as_it_is():
    """pytest imports it for its doctests, beside tests that launch kernels on a GPU."""
    code = """if True:
        import runpy
        from triton import knobs
        from triton.backends.nvidia.compiler import CUDABackend
        before = CUDABackend.make_cubin, knobs.cache.dir
        runpy.run_path(%r)
        assert (CUDABackend.make_cubin, knobs.cache.dir) == before
    """
    subprocess.run([sys.executable, "-c", code % str(SCRIPT)], check=True, timeout=120)


def compiled(files, *options):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *options, *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(launches):
    assert launches
    for launch in launches:
        assert launch["spills"] <= CROWDED.get(launch["kernel"], SPILLED), launch
        assert launch["float64"] == 0, launch
        if NARROW not in launch["name"] and launch["kernel"] not in COPIED:
            assert launch["wide_loads"], launch
            assert launch["wide_stores"] or SMALL in launch["name"] or launch["kernel"] in BY_ROW, launch
        if launch["kernel"] in PRODUCTS:
            assert launch["wgmma"], launch
            assert not launch["serialized"], launch
        # as kernels do that are launched while the one before them runs
        assert launch["waits"] == (launch["kernel"] in AFTER_OTHERS or AFTER in launch["name"]), launch
        assert not launch["reads_before_waiting"], launch
        assert launch["shared_bytes"] <= MAX_SHARED_BYTES, launch
