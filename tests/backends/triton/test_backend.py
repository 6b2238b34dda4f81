"""backend="triton": answers of the kernels equal the oracle, and what it refuses is answered."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import CASES, MASKED, QUESTIONS, Case, Inputs, by_name, full_but, parametrised
from regard.backends import choose
from regard.backends.backend import Backend
from regard.backends.choose import BACKENDS
from regard.backends.sweep import Sweep

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import kernel_definitions as definitions
from regard.backends.triton import triton_backend as backend
from regard.backends.triton.launch import Launch
from regard.backends.triton.operands import operands, refused
from regard.capture.slicing import some_queries
from regard.reductions.products import TransposedOutput, WeightTile
from regard.scores.query_key import QueryKeyScores

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered")

ASKED = (
    "transposed-output",
    "logsumexp",
    "max-score",
    "entropy",
    "top-1",
    "top-3",
    "sum-keys",
    "sum-queries",
    "pool-3x4",
    "segments",
)


def taken(case: Case) -> bool:
    """Whether the kernels have such scores, masks and numbers."""
    A = case.matrix(*case.inputs.of_scores)
    return refused(A.source) is None and case.dtype != torch.float64


TAKEN = [case for case in CASES if taken(case)]
# What operands mean is asked of every case, and kernels are compared with their twins elsewhere.
# The whole way from a question to its answer needs one case of a kind: interpreting takes seconds.
WHOLE_WAY = (
    "tokens-dim",
    "one-query",
    "more-keys",
    "grouped-no-batch",
    "bias-batch",
    "alibi-grouped",
    "t5-decoder",
    "softcap",
    "sinks-empty-rows",
    "sharp-float32",
)
BY_KERNELS = [case for case in TAKEN if case.name in WHOLE_WAY]


def doubled(case: Case) -> Inputs:
    return Inputs(*map(oracle.double, case.inputs))


BIASES = {"alibi": regard.ALiBi(2), "t5": regard.T5Bias(torch.arange(16.0).view(8, 2))}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_some_rows_keep_the_position_bias_of_their_matrix_in_the_kernels(bias: regard.Bias) -> None:
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    whole, rows = regard.attend(x, x, bias=bias), range(2, 5)
    source = some_queries(whole, rows).source
    assert isinstance(source, QueryKeyScores)
    weights = definitions.weights(operands(source, None))
    torch.testing.assert_close(weights[0], whole.to_dense()[:, rows].double())


@parametrised(TAKEN)
def test_the_operands_of_the_kernels_mean_the_matrix(case: Case) -> None:
    A = case.matrix(*case.inputs.of_scores)
    found = definitions.weights(operands(A.source, A.mask))  # pyright: ignore[reportArgumentType]
    exact = case.dense(*doubled(case).of_scores).weights
    oracle.assert_close(found.reshape(exact.shape), exact, 1e-6)


@pytest.mark.parametrize("case", full_but(by_name(BY_KERNELS), "sinks-empty-rows"))
def test_an_answer_of_the_kernels_equals_the_oracle(case: Case, interpreted: None) -> None:
    inputs = case.inputs
    A = case.matrix(*inputs.of_scores)
    answers = A.reduce(*(QUESTIONS[name].ask(inputs) for name in ASKED), backend="triton")
    for name, answer in zip(ASKED, answers, strict=True):
        question = QUESTIONS[name]
        exact = question.exact(case.dense(*doubled(case).of_scores), doubled(case))
        plain = question.exact(case.dense(*inputs.of_scores), inputs)
        if not isinstance(exact, Tensor):
            # Scores that differ in float64 alone may change places.
            near = (answer.indices == exact.indices) | (answer.indices == plain.indices)
            assert bool(near.all()), name
            answer, exact, plain = answer.values, exact.values, plain.values
        budget = question.allowed_error(
            exact, plain, dtype=torch.float32, scores=case.largest_score
        )
        oracle.assert_close(answer, exact, budget)


def test_most_cases_are_taken() -> None:
    named = {case.name for case in TAKEN}
    assert len(TAKEN) > 75
    assert len(BY_KERNELS) == len(WHOLE_WAY)
    assert {case.name for case in MASKED if "either" in case.name} <= named


def test_the_output_beside_statistics_comes_from_the_fused_kernels(interpreted: None) -> None:
    query, key, value = (torch.randn(2, 9, 4) for _ in range(3))
    A = regard.attend(query, key, mask=regard.Causal())
    output, entropy = A.reduce(regard.Output(value), regard.Entropy(), backend="triton")
    torch.testing.assert_close(output, A @ value)
    torch.testing.assert_close(entropy, A.entropy())


def test_progress_counts_the_passes_of_kernels(interpreted: None) -> None:
    query, key, value = (torch.randn(2, 9, 4) for _ in range(3))
    A = regard.attend(query, key)
    asked = (regard.Output(value), regard.Entropy(), regard.Sum(-2))
    calls: list[tuple[int, int]] = []
    A.reduce(*asked, backend="triton", progress=lambda *numbers: calls.append(numbers))
    assert calls == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    with pytest.raises(CancelledError, match="cancelled after 0 of 5 blocks"):
        A.reduce(*asked, backend="triton", cancelled=lambda: True)


def test_the_memory_counts_the_parts_of_cells_and_the_output() -> None:
    x = torch.zeros(4, 8192, 64)
    A = regard.attend(x, x, mask=regard.SlidingWindow(63, 0))
    asked = (regard.Entropy(), regard.Sum(-2), regard.Pool(8, 8), regard.Output(x))
    _, memory = BACKENDS["triton"].describe(A.source, A.mask, asked)
    _, of_output = BACKENDS["sdpa"].describe(A.source, A.mask, asked[3:])
    parts = 8192 // 32  # of cells, whose sums are added by a second kernel
    assert memory == of_output + 4 * 4 * (7 * 8192 + 2 * (8192 + 8 * 8) + parts * 8)


def test_the_memory_counts_the_tiles_that_a_top_k_lists() -> None:
    x = torch.zeros(4, 128, 64)
    A = regard.attend(x, x)
    asked = [regard.TopK(2), regard.TopK(5)]
    _, memory = BACKENDS["triton"].describe(A.source, A.mask, asked)
    answers = (2 + 5) * (4 + 8)  # a weight and its key each
    listed = 8 * (4 + 16 * 4)  # a tile and the maxima of its groups, of eight tiles
    assert memory == 4 * 128 * (5 * 4 + answers + listed)


def test_the_memory_counts_the_bits_of_a_mask_that_has_no_limits() -> None:
    x = torch.zeros(4, 8192, 64)
    found = [
        BACKENDS["triton"].describe(A.source, A.mask, [regard.Entropy()])[1]
        for A in (
            regard.attend(x, x, mask=regard.Causal()),
            regard.attend(x, x, mask=regard.Causal() | regard.SlidingWindow(0, 9)),
        )
    ]
    assert found[1] - found[0] == 8192 * 8192 // 8


def test_a_smaller_k_beside_a_larger_one(interpreted: None) -> None:
    A = regard.attend(torch.randn(5, 4), torch.randn(40, 4))
    few, many = A.reduce(regard.TopK(2), regard.TopK(7), backend="triton")
    assert torch.equal(few.indices, many.indices[..., :2])
    assert torch.equal(many.indices, A.topk(7).indices)


def test_ties_go_to_the_lowest_index_across_tiles(interpreted: None) -> None:
    A = regard.attend(torch.zeros(3, 4), torch.zeros(100, 4))
    assert A.reduce(regard.TopK(5), backend="triton").indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert A.reduce(regard.TopK(1), backend="triton").indices.tolist() == [[0], [0], [0]]


def test_what_ties_gives_way_from_the_end(interpreted: None) -> None:
    key = torch.ones(150, 1).index_fill(0, torch.tensor([40, 77, 140]), 2.0)
    top = regard.attend(torch.ones(1, 1), key).reduce(regard.TopK(6), backend="triton")
    assert top.indices.tolist() == [[40, 77, 140, 0, 1, 2]]


@pytest.mark.full
@pytest.mark.parametrize("far", [2**31 - 1, 2**40])
def test_a_window_wider_than_the_matrix_hides_what_it_says(far: int, interpreted: None) -> None:
    asked = (regard.LogSumExp(), regard.Sum(-2), regard.Pool(2, 2))
    query, key = torch.randn(20, 4), torch.randn(40, 4)
    for mask in (regard.SlidingWindow(far, 0), regard.SlidingWindow(far, far)):
        A = regard.attend(query, key, mask=mask)
        found, exact = (A.reduce(*asked, backend=name) for name in ("triton", "sweep"))
        torch.testing.assert_close(found, exact)


def test_a_sink_of_any_size_leaves_what_the_sweep_leaves(interpreted: None) -> None:
    sinks = torch.tensor([torch.inf, -torch.inf, torch.nan, 100.0])
    A = regard.attend(torch.randn(4, 3, 4), torch.randn(4, 5, 4), sink_bias=sinks)
    asked = (regard.LogSumExp(), regard.Entropy(), regard.Sum(-1), regard.TopK(1), regard.Sum(-2))
    found, exact = (A.reduce(*asked, backend=name) for name in ("triton", "sweep"))
    torch.testing.assert_close(found, exact, equal_nan=True)


def test_nan_reaches_its_own_row_alone(interpreted: None) -> None:
    query = torch.randn(20, 4)
    query[3, 0] = torch.nan
    A = regard.attend(query, torch.randn(40, 4))
    asked = (
        *(regard.LogSumExp(), regard.MaxScore()),
        *(regard.Entropy(), regard.Sum(-1), regard.TopK(3)),
    )
    lse, maximum, entropy, mass, top = A.reduce(*asked, backend="triton")
    largest = A.reduce(regard.TopK(1), backend="triton")
    row = torch.arange(20) == 3
    for answer in (lse, maximum, entropy, mass, largest.values[:, 0], top.values[:, 0]):
        assert torch.equal(answer.isnan(), row)


@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(lambda f: torch.func.vmap(f)(torch.zeros(2, 5, 4)), id="vmap"),
        pytest.param(
            lambda f: torch.func.jvp(f, (torch.zeros(5, 4),), (torch.ones(5, 4),)), id="jvp"
        ),
    ],
)
# PyTorch scripts the derivatives of its own operations, and warns itself of it.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_transformed_question_is_an_error_in_our_words(
    transformed: Callable[..., Any], interpreted: None
) -> None:
    key = torch.zeros(5, 4)
    with pytest.raises(RuntimeError, match="it has a backward pass only"):
        transformed(lambda q: regard.attend(q, key).reduce(regard.Entropy(), backend="triton"))


# What it refuses


class LargestWeight(regard.Reduction):
    """A question of a user's own."""

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
        return (regard.Contribution(block.box.at_rows, block.weights.amax(-1)),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return buffers[0]


x = torch.zeros(5, 4)
A = regard.attend(x, x)
STATISTIC = regard.Entropy()
REFUSED: dict[str, tuple[regard.AttentionMatrix, list[regard.Reduction], str]] = {
    "another-question": (A, [LargestWeight()], "no Triton kernel gives LargestWeight"),
    "some-rows": (
        A,
        [WeightTile(range(2), range(5))],
        "Triton kernels give tiles of all rows and of at most 64 columns",
    ),
    "output-alone": (A, [regard.Output(x)], "no Triton kernel gives Output by itself"),
    "large-k": (
        regard.attend(x, torch.zeros(80, 4)),
        [regard.TopK(65)],
        "the Triton kernel for TopK takes a k up to 64, and it is 65",
    ),
    "dtype-of-an-operand": (
        A,
        [TransposedOutput(torch.zeros(5, 2).double())],
        "no Triton kernel multiplies float64",
    ),
    "width": (
        A,
        [TransposedOutput(torch.zeros(5, 257))],
        "Triton kernels multiply a width up to 256, not 257",
    ),
    "given-scores": (
        regard.AttentionMatrix.from_scores(torch.zeros(3, 3)),
        [STATISTIC],
        "Triton kernels start from query and key, not from scores",
    ),
    "score-mod": (
        regard.attend(x, x, score_mod=lambda score, *_: score),
        [STATISTIC],
        "no Triton kernel has a score_mod",
    ),
    "batch-axes": (
        regard.attend(torch.zeros(2, 2, 2, 3, 4), torch.zeros(2, 2, 2, 3, 4)),
        [STATISTIC],
        "Triton kernels have one batch axis, and the matrix has 2",
    ),
    "dtype": (
        regard.attend(x.double(), x.double()),
        [STATISTIC],
        "no Triton kernel takes float64",
    ),
    "head-dim": (
        regard.attend(torch.zeros(2, 257), torch.zeros(2, 257)),
        [STATISTIC],
        "Triton kernels take a head_dim up to 256, and it is 257",
    ),
}


@pytest.mark.parametrize(("matrix", "asked", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_kernel_is_refused_with_its_reason(
    matrix: regard.AttentionMatrix, asked: list[regard.Reduction], reason: str, interpreted: None
) -> None:
    with pytest.raises(ValueError, match="backend is") as raised:
        matrix.reduce(*asked, backend="triton")
    text = f"backend is 'triton'; {reason}.\n    Leave it out to have the fastest chosen."
    assert str(raised.value) == text


def test_a_matrix_on_the_cpu_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="backend is") as raised:
        A.reduce(STATISTIC, backend="triton")
    assert str(raised.value) == (
        "backend is 'triton'; Triton kernels run on NVIDIA GPUs, and the matrix is on cpu.\n"
        "    Leave it out to have the fastest chosen."
    )


def test_a_matrix_on_the_cpu_is_answered_without_a_word() -> None:
    assert regard.explain(A, STATISTIC).refusals == {"sdpa": "no fused kernel gives Entropy"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert A.entropy().shape == (5,)


# On a GPU: scores that say that they are there; what is chosen for them is not run


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every matrix says that it is on a GPU, and nothing has been warned of."""
    monkeypatch.setattr(QueryKeyScores, "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    backend.warn_once.cache_clear()
    yield
    backend.warn_once.cache_clear()


def chosen(matrix: regard.AttentionMatrix, *asked: regard.Reduction) -> Backend:
    return choose.choose(matrix.source, matrix.mask, asked, None)


def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda _: None)


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))


def amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")


LACKING: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no-triton": (no_triton, "triton is not installed"),
    "old": (old_gpu, "Triton kernels need compute capability 8.0, and the GPU has 7.5"),
    "amd": (amd_gpu, "Triton kernels are written for NVIDIA GPUs, and this is one of AMD"),
}


def warning_of(reason: str) -> str:
    return (
        f"the Triton kernels do not answer: {reason}; the sweep over blocks does, in the time of "
        "about 130 fused forward passes.\n"
        "    Ask with backend='sweep' to choose it."
    )


def test_a_matrix_on_a_gpu_is_given_to_the_kernels(on_cuda: None) -> None:
    assert isinstance(chosen(A, STATISTIC), backend.Triton)
    found = regard.explain(A, STATISTIC, regard.Sum(-2), regard.TopK(3))
    assert found.backend == "triton"
    assert found.how == "Triton kernels that keep tiles of scores in registers"


def test_the_price_of_a_question_without_a_kernel_is_said_before_it_starts(on_cuda: None) -> None:
    query = torch.zeros(1, 1, 1, 8).expand(1, 16, 8192, 8)  # 2^30 scores, of a few bytes
    long = regard.attend(query, query, score_mod=lambda score, *_: score * 2)
    with pytest.warns(RuntimeWarning) as said:
        found = [chosen(long, STATISTIC) for _ in range(2)]
    assert all(isinstance(each, Sweep) for each in found)
    assert [str(each.message) for each in said] == [warning_of("no Triton kernel has a score_mod")]
    row = WeightTile(range(5, 6), range(8192))
    short = regard.attend(query[..., :9, :], query, score_mod=lambda score, *_: score * 3)
    backend.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(chosen(short, STATISTIC), Sweep)
        assert isinstance(chosen(regard.attend(query, query), row), Sweep)


@pytest.mark.parametrize(("lack", "reason"), LACKING.values(), ids=LACKING)
def test_what_a_gpu_lacks_is_said_once(
    lack: Callable[[pytest.MonkeyPatch], None],
    reason: str,
    on_cuda: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lack(monkeypatch)
    with pytest.warns(RuntimeWarning) as said:
        found = [chosen(A, STATISTIC) for _ in range(2)]
    assert all(isinstance(each, Sweep) for each in found)
    assert [str(warning.message) for warning in said] == [warning_of(reason)]
    with pytest.raises(ValueError, match=reason):
        A.reduce(STATISTIC, backend="triton")


@pytest.mark.parametrize("name", ["dtype", "head-dim"])
def test_numbers_without_a_kernel_are_said_once(name: str, on_cuda: None) -> None:
    matrix, asked, reason = REFUSED[name]
    with pytest.warns(RuntimeWarning) as said:
        assert isinstance(chosen(matrix, *asked), Sweep)
    assert [str(warning.message) for warning in said] == [warning_of(reason)]


@pytest.mark.parametrize("name", ["another-question", "score-mod"])
def test_a_question_without_a_kernel_goes_to_blocks_without_a_word(
    name: str, on_cuda: None
) -> None:
    matrix, asked, _ = REFUSED[name]
    assert isinstance(chosen(matrix, *asked), Sweep)


def failing(error: Exception) -> Callable[..., Any]:
    """A launch that raises this."""

    def launch(*_: Any, **__: Any) -> Any:
        raise error

    return launch


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(torch.OutOfMemoryError(), "the memory of the GPU is full", id="memory"),
        pytest.param(
            OutOfResources(200000, 101376, "shared memory"),
            "a multiprocessor of this GPU is too small for a tile (out of resource: shared memory, "
            "Required: 200000, Hardware limit: 101376. Reducing block sizes or `num_stages` may "
            "help.)",
            id="tile",
        ),
        pytest.param(
            RuntimeError("Failed to find C compiler. Please specify via CC"),
            "this machine does not compile them (Failed to find C compiler. Please specify via CC)",
            id="c-compiler",
        ),
        pytest.param(
            CalledProcessError(1, ["cc", "main.c"]),
            "this machine does not compile them (Command '['cc', 'main.c']' returned non-zero exit "
            "status 1.)",
            id="c-headers",
        ),
        pytest.param(
            PermissionError(13, "Permission denied", "/root/.triton"),
            "this machine does not compile them ([Errno 13] Permission denied: '/root/.triton')",
            id="unwritable-cache",
        ),
        pytest.param(
            RuntimeError("Could not create or locate cache dir"),
            "this machine does not compile them (Could not create or locate cache dir)",
            id="cache",
        ),
        pytest.param(
            AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"),
            "this machine does not compile them (libcuda.so cannot found! Please make sure GPU is "
            "set up)",
            id="libcuda",
        ),
        pytest.param(
            RuntimeError("0 active drivers ([]). There should only be one."),
            "this machine does not compile them (0 active drivers ([]). There should only be one.)",
            id="driver",
        ),
        pytest.param(
            PTXASError("Value 'sm_121'\n is not defined"),
            "this machine does not compile them (PTXAS error: Value 'sm_121' is not defined)",
            id="ptxas",
        ),
        pytest.param(
            CompilationError(None, None, "no such operation"),
            "this machine does not compile them (<source unavailable> no such operation)",
            id="compiler",
        ),
    ],
)
def test_where_a_machine_cannot_run_a_kernel_blocks_answer(
    error: Exception, reason: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "rows", failing(error))
    backend.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning) as said:
        answers = backend.Triton(instead=Sweep()).reduce(A.source, None, [STATISTIC])
    assert torch.equal(answers[0], A.entropy())
    assert [str(warning.message) for warning in said] == [warning_of(reason)]
    with pytest.raises(type(error)):
        A.reduce(STATISTIC, backend="triton")


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(RuntimeError("an illegal memory access was encountered"), id="cuda"),
        pytest.param(AssertionError(), id="a mistake of ours"),
    ],
)
def test_an_error_that_is_not_the_machines_is_raised(
    error: Exception, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "rows", failing(error))
    with pytest.raises(type(error)) as raised:
        backend.Triton(instead=Sweep()).reduce(A.source, None, [STATISTIC])
    assert raised.value is error


class Mean(regard.Reduction):
    """The mean shifted score of each row, times the keys that it sees: a user's own statistic."""

    reads_statistics = True

    def start(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
        numbers = block.mean_shifted * block.visible_keys + block.log_normalizer * block.row_sum
        return (regard.Contribution(block.box.at_rows, numbers),)

    def finish(self, buffers: tuple[torch.Tensor, ...], shape: torch.Size) -> torch.Tensor:
        return buffers[0]


def test_the_kernels_give_a_users_own_statistic_and_its_gradient(interpreted: None) -> None:
    leaves = [torch.randn(2, 9, 4, requires_grad=True) for _ in range(2)]
    answers: list[torch.Tensor] = []
    for name, dtype in (("triton", torch.float32), ("dense", torch.float64)):
        pair = (leaf.to(dtype) for leaf in leaves)
        answer = regard.attend(*pair, mask=regard.Causal()).reduce(Mean(), backend=name)
        gradients = torch.autograd.grad(answer.square().sum(), leaves)
        answers.append(torch.cat([each.double().flatten() for each in (answer, *gradients)]))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)
