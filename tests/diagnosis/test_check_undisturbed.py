"""``regard.check`` in our own process: what somebody's code does to it is put back, or told."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def ending(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sys.exit(0)


class Ending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sys.exit("no")


def on_a_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q.cuda(), k, v)


class OnAGpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(2, device="cuda")


def _line(thing: Any, further: int) -> int:
    return thing.__code__.co_firstlineno + further


@pytest.mark.parametrize(
    ("thing", "line", "code"),
    [
        pytest.param(ending, _line(ending, 1), "sys.exit(0)", id="function"),
        pytest.param(Ending, _line(Ending.__init__, 2), 'sys.exit("no")', id="class"),
    ],
)
def test_code_that_ends_python_is_one_clear_error(thing: Any, line: int, code: str) -> None:
    with pytest.raises(ValueError, match="ends Python") as error:
        regard.check(thing)
    assert str(error.value) == (
        f"test_check_undisturbed.py ends Python on line {line}; check needs it to go on.\n"
        f"    {line} | {code}"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("thing", "line", "code"),
    [
        pytest.param(
            on_a_gpu, _line(on_a_gpu, 1), "return attention(q.cuda(), k, v)", id="function"
        ),
        pytest.param(
            OnAGpu,
            _line(OnAGpu.__init__, 2),
            'self.mask = torch.ones(2, device="cuda")',
            id="class",
        ),
    ],
)
def test_code_for_a_gpu_is_told_as_in_the_shell(thing: Any, line: int, code: str) -> None:
    with pytest.raises(ValueError, match="needs CUDA") as error:
        regard.check(thing)
    assert str(error.value) == (
        f"test_check_undisturbed.py needs CUDA on line {line}, and there is none here; check runs "
        f"on the CPU.\n    {line} | {code}\n"
        '    Write device = "cuda" if torch.cuda.is_available() else "cpu".'
    )


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "environment": (
        lambda: os.environ.update(REGARD_WAS_HERE="1", PATH=""),
        lambda: dict(os.environ),
    ),
    "folder": (lambda: os.chdir("/"), Path.cwd),
    "sys.path": (lambda: sys.path.insert(0, "/nowhere"), lambda: list(sys.path)),
    "sys.modules": (
        lambda: sys.modules.update(math=sys, json=sys),
        lambda: [sys.modules["math"], sys.modules["json"]],
    ),
    "recursion limit": (lambda: sys.setrecursionlimit(765), sys.getrecursionlimit),
    "signals": (
        lambda: (
            threading.current_thread() is threading.main_thread()
            and signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "matrix products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "fused kernels": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "NumPy's errors": (lambda: np.seterr(over="raise"), np.geterr),
    "NumPy's random numbers": (lambda: np.random.rand(3), lambda: str(np.random.get_state())),
    "a function of PyTorch": (
        lambda: setattr(F, "softmax", lambda *_, **__: None),
        lambda: F.softmax,
    ),
    "a method of PyTorch": (
        lambda: setattr(torch.Tensor, "cosh", torch.Tensor.sinh),
        lambda: torch.Tensor.cosh,
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(
            not torch.are_deterministic_algorithms_enabled()
        ),
        torch.are_deterministic_algorithms_enabled,
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("change", "state"), CHANGES.values(), ids=CHANGES)
def test_what_the_code_changes_is_put_back(
    change: Callable[[], object], state: Callable[[], object]
) -> None:
    before, seen = state(), []

    def changing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        change()
        seen.append(state())
        return attention(q, k, v)

    assert regard.check(changing).ok
    assert seen[0] != before
    assert state() == before


class Settings:
    """An object that somebody's layer takes."""

    def __init__(self) -> None:
        self.dim, self.calls = 16, 0


class Configured(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        config.calls += 1
        self.qkv = nn.Linear(config.dim, 3 * config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return attention(*self.qkv(x).chunk(3, -1))


def test_an_object_for_a_class_stays_as_it_is() -> None:
    config = Settings()
    assert regard.check(Configured, config).ok
    assert config.calls == 0


def test_an_object_in_an_example_stays_as_it_is() -> None:
    config = Settings()

    def counting(q: Tensor, k: Tensor, v: Tensor, config: Settings) -> Tensor:
        config.calls += 1
        return attention(q, k, v)

    assert regard.check(counting, args=(*torch.rand(3, 2, 7, 8), config)).ok
    assert config.calls == 0


class CopiesNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def __deepcopy__(self, memo: object) -> "CopiesNothing":
        return self

    def forward(self, x: Tensor) -> Tensor:
        return attention(*self.qkv(x).chunk(3, -1))


def test_a_module_whose_copy_is_itself_is_refused_and_stays_as_it_is() -> None:
    layer = CopiesNothing().bfloat16().train()
    with pytest.raises(ValueError, match="CopiesNothing cannot be copied \\(its copy shares"):
        regard.check(layer)
    assert layer.training
    assert layer.qkv.weight.dtype == torch.bfloat16


def test_check_runs_in_a_thread_as_well() -> None:
    verdicts: list[str] = []
    thread = threading.Thread(target=lambda: verdicts.append(regard.check(attention).verdict))
    thread.start()
    thread.join()
    assert verdicts == ["right"]


def test_checks_on_several_threads_leave_the_process_as_it_was() -> None:
    def known() -> tuple[object, ...]:
        return torch.get_default_dtype(), sys.stdout, list(warnings.filters)

    before, verdicts = known(), list[str]()
    checks = [
        threading.Thread(target=lambda: verdicts.append(regard.check(attention).verdict))
        for _ in range(4)
    ]
    for thread in checks:
        thread.start()
    for thread in checks:
        thread.join()
    assert verdicts == ["right"] * 4
    assert known() == before
