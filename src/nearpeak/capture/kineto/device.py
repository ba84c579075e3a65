"""The device of a recording, from the properties that the profiler wrote into the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearpeak.capture.kineto.recording import Recording

_AMPERE = 8
"""The first compute capability with tf32."""


def device_name(recording: Recording) -> str:
    """What ran the kernels as its driver names it, or "cpu"."""
    properties = recording.metadata.get("deviceProperties")
    used = {span.device for span in recording.device_spans}
    if isinstance(properties, list):
        for item in properties:
            if isinstance(item, dict) and item.get("id") in used and item.get("name"):
                return str(item["name"])
    return "unknown device" if used else "cpu"


def has_tf32(metadata: Mapping[str, Any], on_device: bool) -> bool:
    """Whether the device has tf32; true for one that the file does not describe."""
    properties = metadata.get("deviceProperties")
    if not on_device:
        return False
    if isinstance(properties, list) and properties and isinstance(properties[0], dict):
        major = properties[0].get("computeMajor")
        return not isinstance(major, int) or major >= _AMPERE
    return True
