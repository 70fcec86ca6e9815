"""How much memory a device has: all of it, and what is free. None where nobody says."""

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")


def total_bytes(device: torch.device) -> int | None:
    """Of the GPU, else of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return None


def free_bytes(device: torch.device) -> int | None:
    """What can be taken without another program's loss. A GPU says no by itself, in time; Linux kills instead."""
    if device.type != "cpu" or not MEMINFO.exists():
        return None
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    free = fields.get("MemAvailable", "").split()
    return int(free[0]) << 10 if free else None
