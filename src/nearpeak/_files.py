"""`cache_folder`: where nearpeak stores files; `replace_file`: writes a file whole, or leaves the old one."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes beside, then renames: a reader sees the old file or the new one, never a half, and no rest stays.

    OSError where it cannot be written. A link is followed, so that the file behind it is replaced and not the link.
    """
    target = path.resolve()
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(4).hex()}.tmp")
    # os.open and not tempfile: who may read the file is for the user's umask to say
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems say only here that the disk is full
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cache_folder() -> Path:
    """NEARPEAK_CACHE_DIR where it is set, else the user's cache folder of this system."""
    chosen = os.environ.get("NEARPEAK_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("nearpeak", appauthor=False))
