"""Scripts that several processes run together, one for each rank."""

import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, ranks: int, *arguments: object, limit: float) -> None:
    """Run all ranks to their end; what one of them says is the failure.

    Args:
        script: what each process runs, with its rank and the number of ranks as first arguments.
        ranks: how many processes.
        arguments: further arguments of the script.
        limit: in seconds.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, script, *map(str, (rank, ranks, *arguments))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=limit)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
