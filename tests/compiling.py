"""Kernels compiled for a GPU that is not there, and what the compiler says of them.

What is launched inside ``only_compiled`` goes through Triton's own way to a launch, with tensors of
the meta device, and stops before the driver: signatures, specialisations and configs are those of
a real call.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have, by architecture
CONSUMERS_SHARED = 99 * 1024  # of those that are no data centre's


@dataclass(frozen=True)
class Report:
    """What the compiler says of one kernel.

    Attributes:
        kernel: its name.
        num_warps, num_stages: what it was compiled with.
        constants: its constexpr arguments and those that Triton took for constants, as text.
        registers: of each thread.
        spilled: bytes of local memory of each thread: registers that did not fit, arrays with an
            index known at run time only.
        shared: bytes of shared memory of each program.
        wgmma: how often the instruction of Hopper's matrix units stands in the PTX.
        mma: how often that of those before.
        unset: registers of the whole warp that an instruction reads before any sets them.
    """

    kernel: str
    num_warps: int
    num_stages: int
    constants: str
    registers: int
    spilled: int
    shared: int
    wgmma: int
    mma: int
    unset: tuple[str, ...] = ()


class _Compiler:
    """Stands for the driver of a GPU of some architecture, as far as compiling asks for one."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # so that kernels of two architectures have two caches

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def only_compiled(architecture: int) -> Iterator[list[Report]]:
    """Compile for this architecture what is launched inside, and run nothing; fills the list."""
    reports: list[Report] = []
    run = JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found = run(kernel, *args, grid=grid, warmup=True, **options)
        reports.append(_report(found))
        return found

    before = driver._active
    JITFunction.run = compiled
    driver.set_active(_Compiler(architecture))
    try:
        yield reports
    finally:
        JITFunction.run = run
        driver._active = before


def _report(kernel: Any) -> Report:
    ptx = kernel.asm["ptx"]
    usage = _resource_usage(kernel.asm["cubin"])
    constants = {
        kernel.src.fn.arg_names[path[0]]: kernel.src.constants[path]
        for path in kernel.src.constants
    }
    return Report(
        kernel=kernel.src.fn.__name__,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        constants=", ".join(f"{name}={value}" for name, value in constants.items()),
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=kernel.metadata.shared,
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        unset=_unset_registers(kernel.asm["cubin"]),
    )


def _unset_registers(cubin: bytes) -> tuple[str, ...]:
    """Return the uniform registers that are read before they are set, in the order of the text.

    NVIDIA's compiler of 2025 has made such code of a right product.
    """
    unset: dict[str, None] = {}
    written: set[str] = set()
    shown = _shown(cubin, triton.knobs.nvidia.nvdisasm.path, "-c")
    for instruction in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", shown, re.MULTILINE):
        operation, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
        target = re.match(r"UR(\d+),", operands)
        read = operands[target.end() :] if target else operands
        # A product names the first of the registers of two descriptors, of which it may read one.
        names = () if operation.startswith("HGMMA") else re.findall(r"\bUR\d+", read)
        unset |= dict.fromkeys(name for name in names if name not in written)
        if target:
            first = int(target[1])
            pair = "64" in operation or "WIDE" in operation
            written |= {f"UR{first}", f"UR{first + pair}"}
    return tuple(unset)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What ptxas gave the one kernel of a cubin: REG, STACK, LOCAL and more."""
    shown = _shown(cubin, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    (line,) = re.findall(r"^\s*(REG:.*)$", shown, re.MULTILINE)
    return {name: int(number) for name, number in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}


def _shown(cubin: bytes, *command: str) -> str:
    """Return what a tool of NVIDIA prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [*command, file.name], check=True, capture_output=True, text=True
        ).stdout
