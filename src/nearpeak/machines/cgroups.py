"""The limits that Linux control groups (cgroups, versions 1 and 2) set for a container: CPU time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The CPU quota of this process in CPUs (2.5 = two and a half CPUs), or None without a limit.

    A cgroup is bound by its ancestors too, so the smallest limit on the way to the root counts.
    """
    limits = []
    for folder in _groups(root, "cpu"):
        quota, period = _version_2_quota(folder) or _version_1_quota(folder) or (0.0, 0.0)
        if quota > 0 and period > 0:
            limits.append(quota / period)
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> float | None:
    """The memory limit of this process in bytes, or None without a limit."""
    limits = []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = parse_number(read_text(folder / name))
            if value is not None and 0 < value < 2**60:  # version 1 writes nearly 2**63 for "no limit"
                limits.append(value)
    return min(limits, default=None)


def read_text(path: Path) -> str:
    """The text of a small system file without the whitespace around it, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def parse_number(text: str) -> float | None:
    """`text` as a number, or None where it is not one ("max", "")."""
    try:
        return float(text)
    except ValueError:
        return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups for `controller`, each followed by its ancestors.

    Inside a container the path in /proc may be the host's and not exist here; the root is then the container's cgroup.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controllers, mount / controller]
        else:
            continue
        inside = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for base in bases:
            for folder in (inside, *inside.parents):
                yield base / folder


def _version_2_quota(folder: Path) -> tuple[float, float] | None:
    parts = read_text(folder / "cpu.max").split()
    quota, period = (parse_number(part) for part in parts) if len(parts) == 2 else (None, None)
    return None if quota is None or period is None else (quota, period)


def _version_1_quota(folder: Path) -> tuple[float, float] | None:
    quota = parse_number(read_text(folder / "cpu.cfs_quota_us"))
    period = parse_number(read_text(folder / "cpu.cfs_period_us"))
    return None if quota is None or period is None else (quota, period)
