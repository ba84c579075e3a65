import platform
import subprocess
import sys

import pytest

from nearpeak.measure.page_faults import keep_freed_memory, page_faults

LARGE = """
import torch
from nearpeak.measure.page_faults import freed_memory_kept, keep_freed_memory, page_faults
x = torch.ones(10 * 2**20)
def least(operand=x):
    counts = [page_faults()]
    for _ in range(24):  # in some of the first, a heap that is kept still grows
        operand + 1
        counts.append(page_faults())
    return min(b - a for a, b in zip(counts, counts[1:]))
usual = least()
with freed_memory_kept():
    x + 1
after = least(torch.ones(20 * 2**20))  # the heap may still have the place of the smaller result
assert keep_freed_memory()
print(usual, after, least())
"""


def test_faults_are_counted():
    before = page_faults()
    bytearray(2**26)[:: 2**12] = bytes(2**14)
    assert page_faults() >= before


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_process_that_keeps_its_memory_has_no_faults_in_large_results():
    """Each result is 40 MiB: glibc's malloc maps it again in every call. Builds of torch for Arm use mimalloc."""
    ran = subprocess.run([sys.executable, "-c", LARGE], check=True, capture_output=True, text=True)
    usual, after_a_while, kept = map(int, ran.stdout.split())
    if usual < 32:
        pytest.skip(f"needs an allocator that maps large blocks again, and page faults that count: {usual} per call")
    assert kept < usual / 16
    assert after_a_while > usual / 2


def test_another_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
