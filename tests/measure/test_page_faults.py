import platform
import subprocess
import sys

import pytest

from nearpeak.measure.page_faults import keep_freed_memory, page_faults

LARGE = """
import torch
from nearpeak.measure.page_faults import freed_memory_kept, keep_freed_memory, page_faults
x = torch.ones(2**24)
if {keep!r} == "ever":
    assert keep_freed_memory()
elif {keep!r} == "for a while":
    with freed_memory_kept():
        x + 1
counts = [page_faults()]
for _ in range(24):  # in some of the first, a heap that is kept still grows
    x + 1
    counts.append(page_faults())
print(min(b - a for a, b in zip(counts, counts[1:])))
"""


def test_faults_are_counted():
    before = page_faults()
    bytearray(2**26)[:: 2**12] = bytes(2**14)
    assert page_faults() >= before


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_process_that_keeps_its_memory_has_no_faults_in_large_results():
    """Each result is 64 MiB: glibc's malloc maps it again in every call. Builds of torch for Arm use mimalloc."""

    def faults(keep):
        command = [sys.executable, "-c", LARGE.format(keep=keep)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    usual = faults(keep="never")
    if usual < 32:
        pytest.skip(f"needs an allocator that maps large blocks again, and page faults that count: {usual} per call")
    assert faults(keep="ever") < usual / 16
    assert faults(keep="for a while") > usual / 2


def test_another_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
