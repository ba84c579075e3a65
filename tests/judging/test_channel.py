"""Processes of the judge, and how they end."""

import os
import subprocess
import sys
import threading

import pytest

from nearpeak.judging.channel import Channel


def test_a_process_that_was_started_just_now_is_ended(tmp_path, monkeypatch):
    def has_no_group_yet(pid, signal):
        raise ProcessLookupError

    channel = Channel(tmp_path, "cpu", timeout=10.0)
    monkeypatch.setattr(os, "killpg", has_no_group_yet)
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(60.0)
    assert not closing.is_alive()


def test_processes_that_are_closed_at_once(tmp_path):
    for _ in range(20):
        Channel(tmp_path, "cpu", timeout=10.0).close()


ASKS_FOR_NO_GPU = """
import torch
def asked(*arguments):
    raise SystemExit("the server asked for a GPU, which nobody could use after a fork then")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
import nearpeak.judging.runner
"""


@pytest.mark.slow
def test_runners_for_a_gpu_are_forked_from_a_process_that_does_not_use_it(tmp_path):
    subprocess.run([sys.executable, "-c", ASKS_FOR_NO_GPU], check=True)
    channels = [Channel(tmp_path, device, timeout=60.0) for device in ("cuda", "cuda", "cpu")]
    try:
        servers = {channel._process.server.process.pid for channel in channels}
        assert len(servers) == 2
        assert [channel.ask("rest").content["token"] != "" for channel in channels] == [True] * 3
    finally:
        for channel in channels:
            channel.close()
