"""Processes of the judge, and how they end."""

import os
import threading

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
