"""`detect_cpu`: the CPU of this machine as the system describes it, before anything is measured.

What the system does not tell is None. The figures are those that this process may use: its CPU affinity and the limits
of its cgroup count, not the whole host.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nearpeak.machines.cgroups import cpu_limit, memory_limit, parse_number, read_text
from nearpeak.machines.machine import Machine

_ARM_IMPLEMENTERS = {
    0x41: "arm",
    0x46: "fujitsu",
    0x48: "hisilicon",
    0x4E: "nvidia",
    0x51: "qualcomm",
    0x61: "apple",
    0x6D: "microsoft",
    0xC0: "ampere",
}
_ARM_PARTS = {
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
"""Names by the implementer and part number of Arm's main ID register, as in arch/arm64/include/asm/cputype.h of Linux:
there, /proc/cpuinfo has no model name."""


def detect_cpu(
    root: Path = Path("/"), *, affinity: Collection[int] | None = None, system: str | None = None
) -> Machine:
    """This machine's CPU without ceilings: they are measured, not looked up.

    `root`, `affinity` (CPU numbers) and `system` ("Linux", "Darwin") stand in for the real ones in tests.
    """
    system = system or platform.system()
    if system == "Linux" and (root / "proc/cpuinfo").exists():
        return _linux(root, sorted(affinity if affinity is not None else os.sched_getaffinity(0)))
    if system == "Darwin":
        return _macos()
    return _machine(name=platform.processor() or "CPU", vendor="unknown", cores=os.cpu_count(), memory=_system_memory())


def _machine(*, name: str, vendor: str, cores: int | None, memory: float | None, **facts: Any) -> Machine:
    slug = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*|\b\d+-core\b|\bw/.*", " ", name.lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", slug.replace("+", "plus")))
    identifier = "-".join(part for part in ("cpu", slug, "" if cores is None else str(cores)) if part)
    facts.setdefault("architecture", platform.machine() or "unknown")
    return Machine(id=identifier, name=name, kind="cpu", vendor=vendor, processors=cores, memory_bytes=memory, **facts)


def _linux(root: Path, cpus: list[int]) -> Machine:
    blocks = [_fields(block) for block in re.split(r"\n\s*\n", read_text(root / "proc/cpuinfo"))]
    blocks = [block for block in blocks if "processor" in block] or blocks
    flags = set((blocks[0].get("flags") or blocks[0].get("Features") or "").split())
    name, vendor = _linux_name(blocks)
    levels, last_level = _caches(root, cpus)
    first = root / f"sys/devices/system/cpu/cpu{cpus[0] if cpus else 0}/cpufreq"
    frequencies = {key: parse_number(read_text(first / key)) for key in ("base_frequency", "cpuinfo_max_freq")}
    base, boost = (None if kilohertz is None else 1e3 * kilohertz for kilohertz in frequencies.values())
    arm = "CPU implementer" in blocks[0]
    return _machine(
        name=name,
        vendor=vendor,
        architecture="aarch64" if arm else "x86_64" if "lm" in flags else platform.machine(),
        cores=_cores(root, cpus),
        memory=_linux_memory(root),
        cache_bytes=last_level,
        cache_levels=levels,
        vector_bits=_vector_bits(flags, root),
        matrix_engine=_matrix_engine(flags),
        clock_base_hz=base,
        clock_boost_hz=boost,
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _linux_name(blocks: list[dict[str, str]]) -> tuple[str, str]:
    """The CPU's name and vendor; the kinds of core of a mixed Arm chip are joined by "+"."""
    vendors = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}
    named = blocks[0].get("model name")
    if "CPU implementer" not in blocks[0]:
        return named or platform.processor() or "CPU", vendors.get(blocks[0].get("vendor_id", ""), "unknown")
    names = []
    for block in blocks:
        code = (_hexadecimal(block.get("CPU implementer")), _hexadecimal(block.get("CPU part")))
        vendor = _ARM_IMPLEMENTERS.get(code[0], f"implementer {code[0]:#x}")
        names.append(_ARM_PARTS.get(code, f"{vendor} part {code[1]:#x}"))
    implementer = _hexadecimal(blocks[0]["CPU implementer"])
    return named or " + ".join(dict.fromkeys(names)), _ARM_IMPLEMENTERS.get(implementer, "unknown")


def _hexadecimal(text: str | None) -> int:
    try:
        return int(text or "", 16)
    except ValueError:
        return 0


def _cores(root: Path, cpus: list[int]) -> int | None:
    """Physical cores that this process may use: hardware threads of one core count once, a cgroup quota caps them."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        cores.add(siblings or str(cpu))
    quota = cpu_limit(root)
    count = len(cores) if quota is None else min(len(cores), math.ceil(quota))
    return count or None


def _linux_memory(root: Path) -> float | None:
    total = re.search(r"^MemTotal:\s*(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    sizes = [1024.0 * int(total[1]) if total else None, memory_limit(root)]
    return min((size for size in sizes if size is not None), default=None)


def _caches(root: Path, cpus: list[int]) -> tuple[dict[str, float], float | None]:
    """Bytes of each cache level as the first CPU sees it, and of all last-level caches that `cpus` reach together."""
    levels: dict[str, float] = {}
    last_levels: dict[str, float] = {}
    for cpu in cpus or [0]:
        caches = {}
        for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            level, size = read_text(folder / "level"), _size(read_text(folder / "size"))
            if read_text(folder / "type") != "Instruction" and level and size:
                name = "L1d" if level == "1" else f"L{level}"
                caches[name] = (size, read_text(folder / "shared_cpu_list") or str(cpu))
        levels = levels or {name: size for name, (size, _) in sorted(caches.items())}
        if caches:
            size, shared_by = caches[max(caches)]
            last_levels[shared_by] = size
    return levels, sum(last_levels.values()) or None


def _size(text: str) -> float | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * 1024.0 ** "_KMG".index(match[2] or "_") if match else None


def _vector_bits(flags: Collection[str], root: Path) -> int | None:
    if "sve" in flags:
        length = parse_number(read_text(root / "proc/sys/abi/sve_default_vector_length"))
        if length:
            return int(8 * length)
    widths = {"avx512f": 512, "avx2": 256, "avx": 256, "sse2": 128, "asimd": 128}
    return next((bits for flag, bits in widths.items() if flag in flags), None)


def _matrix_engine(flags: Collection[str]) -> str | None:
    if "amx_tile" in flags:
        dtypes = [flag.removeprefix("amx_") for flag in ("amx_bf16", "amx_int8", "amx_fp16") if flag in flags]
        return "AMX" + (f" ({', '.join(dtypes)})" if dtypes else "")
    return "SME" if "sme" in flags else None


def _macos() -> Machine:
    """macOS tells through sysctl; on Apple silicon the first performance level is that of the fast cores."""
    facts = _sysctl()
    name = facts.get("machdep.cpu.brand_string") or "CPU"
    sizes = {
        level: parse_number(facts.get(f"hw.perflevel0.{key}", "") or facts.get(f"hw.{key}", ""))
        for level, key in (("L1d", "l1dcachesize"), ("L2", "l2cachesize"), ("L3", "l3cachesize"))
    }
    levels = {level: size for level, size in sizes.items() if size}
    cores = parse_number(facts.get("hw.physicalcpu", ""))
    features = facts.get("machdep.cpu.features", "") + " " + facts.get("machdep.cpu.leaf7_features", "")
    arm = facts.get("hw.optional.arm64") == "1"
    flags = {"asimd"} if arm else {feature.lower().replace(".0", "") for feature in features.split()}
    if facts.get("hw.optional.arm.FEAT_SME") == "1":
        flags.add("sme")
    return _machine(
        name=name,
        vendor="apple" if arm else "intel" if "Intel" in name else "unknown",
        architecture="arm64" if arm else "x86_64",
        cores=int(cores) if cores else os.cpu_count(),
        memory=parse_number(facts.get("hw.memsize", "")),
        cache_levels=levels,
        cache_bytes=levels[max(levels)] if levels else None,
        vector_bits=_vector_bits({flag.replace("avx1", "avx") for flag in flags}, Path("/")),
        matrix_engine=_matrix_engine(flags),
    )


def _sysctl() -> Mapping[str, str]:
    """What `sysctl` says about the processor, empty where it cannot be run."""
    try:
        done = subprocess.run(["sysctl", "hw", "machdep.cpu"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return _fields(done.stdout)


def _system_memory() -> float | None:
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
