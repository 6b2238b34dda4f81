"""Where kernels run: interpreted on the CPU, and on a GPU where there is one."""

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in Triton's interpreter, as TRITON_INTERPRET=1 would have it.

    That is read where a kernel is decorated; a process whose kernels are compiled, too, has them
    exchanged instead. Functions that kernels call stand there as the interpreter rewrites them,
    since it patches all of Triton anew for every call of one of its own.
    """
    import triton.experimental.gluon  # it refuses to be imported later
    import triton.language as tl
    from triton.runtime import interpreter

    import regard.backends.triton.launch  # noqa: F401 - so that all kernels are there

    patched = interpreter._patch_lang(tl.standard.max.fn)
    exchanged: dict[int, interpreter.InterpretedFunction] = {}
    for place, module in list(sys.modules.items()):
        if not place.startswith(("triton.language", "regard.backends.triton")):
            continue
        for name, item in list(vars(module).items()):
            if isinstance(item, triton.JITFunction):
                of_it = interpreter.InterpretedFunction(item.fn)
                of_it = exchanged.setdefault(id(item), of_it)
                stand_in = of_it if name.endswith("_kernel") else of_it.rewrite()
                monkeypatch.setattr(module, name, stand_in)
    yield
    patched.restore()


@pytest.fixture(
    params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)],
    ids=["interpreted", "gpu"],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a test are."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
        return torch.device("cpu")
    return torch.device("cuda")
