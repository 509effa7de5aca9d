"""How much memory this process can have."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> int | None:
    """The memory of this machine, or of this container where it is allowed less; None if neither
    says."""
    sizes = []
    with suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):  # ValueError: "max"
        sizes.append(int(_CONTAINER.read_text()))
    return min(sizes, default=None)
