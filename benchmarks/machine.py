"""What the numbers were measured on: enough to compare, nothing that names the machine."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from regard.recording.version import version

__all__ = ["commit", "description", "file_name"]

ROOT = Path(__file__).parent.parent


def processor() -> str:
    """The processor's model, as Linux or Python knows it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"^model name\s*: (.+)$", information.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that was measured; a + after it where files have changed since."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def description() -> dict[str, str | int]:
    """Processor, cores, the threads that PyTorch uses, and versions."""
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "regard": version(),
    }


def file_name() -> str:
    """A name for the results file: `intel-xeon-2-cores.json`."""
    facts = description()
    text = f"{facts['processor']} {facts['cores']} cores".lower()
    text = re.sub(r"\((r|tm)\)|processor", "", text)
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") + ".json"
