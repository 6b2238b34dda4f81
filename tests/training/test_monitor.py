"""The monitor observes the steps that are due, changes no bit, and survives every failure."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regard
from full_disk import disk_of
from regard.training.row_numbers import STATISTICS
from regard.training.run_table import read_history, read_table

WIDTH, HEADS, TOKENS = 16, 2, 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = regard.nn.SelfAttention(WIDTH, HEADS, mask=regard.Causal())
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.dropout(self.down(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self, layers: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def train(
    monitor_of: Callable[[nn.Module], regard.Monitor] | None,
    *,
    model: Callable[[], nn.Module] = Model,
    steps: int = 5,
    micro_batches: int = 1,
    autocast: bool = False,
) -> list[float]:
    """Return the losses, the next random number and the sum of the final weights."""
    torch.manual_seed(0)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    monitor = None if monitor_of is None else monitor_of(trained)
    losses: list[float] = []
    for step in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(3, TOKENS, WIDTH, requires_grad=True)
            with (
                nullcontext() if monitor is None else monitor(step),
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            ):
                loss = trained(x)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    weights = sum(float(each.detach().double().sum()) for each in trained.parameters())
    return [*losses, float(torch.rand(())), weights]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="plain"),
        pytest.param({"autocast": True}, id="autocast"),
        pytest.param({"micro_batches": 3}, id="gradient accumulation"),
        pytest.param({"model": lambda: Model(reentrant=False)}, id="checkpoint"),
        pytest.param({"model": lambda: Model(reentrant=True)}, id="reentrant checkpoint"),
    ],
)
def test_losses_weights_and_random_numbers_keep_every_bit(how: dict[str, Any]) -> None:
    found: list[regard.Monitor] = []

    def monitor_of(model: nn.Module) -> regard.Monitor:
        found.append(regard.Monitor(model, every=2))
        return found[0]

    assert train(monitor_of, **how) == train(None, **how)
    assert len(found[0].latest) == 2 * len(STATISTICS)
    assert {tuple(each.rows.tolist()) for each in found[0].latest.values()} == {(27, 27), (24, 24)}


def test_only_the_first_forward_of_a_due_step_is_observed() -> None:
    model, calls = Model(1), list[int]()
    monitor = regard.Monitor(model, every=4, writers=[lambda step, _: calls.append(step)])
    for step in range(10):
        for _ in range(2):
            with monitor(step):
                model(torch.randn(1, TOKENS, WIDTH))
    assert calls == [0, 4, 8]
    assert all(not module._forward_hooks for module in model.modules())


def test_the_numbers_of_a_step_are_those_of_its_own_weights() -> None:
    model, x = Model(1), torch.randn(2, TOKENS, WIDTH)
    monitor = regard.Monitor(model, every=1, rows=4)
    for step in range(2):
        with monitor(step):
            model(x)
        with regard.observe(model) as seen, torch.no_grad():
            model(x)
        entropy = seen[0].entropy()[..., -4:]
        got = monitor.latest["blocks.0.attention", "entropy"]
        torch.testing.assert_close(got.mean.float(), entropy.mean((0, 2)))
        torch.testing.assert_close(got.max.float(), entropy.amax((0, 2)))
        assert got.rows.tolist() == [8, 8]
        with torch.no_grad():
            model.blocks[0].attention.query.weight.mul_(3)


class Fused(nn.Module):
    """Attention without regard, which can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)[:, None]
        return nn.functional.scaled_dot_product_attention(query, query, query).square().mean()


def test_a_compiled_model_is_observed_without_its_compiled_code() -> None:
    model, graphs = Fused(), list[object]()

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, TOKENS, WIDTH)
    monitor = regard.Monitor(compiled, every=2)
    for step, compilations in ((0, 0), (1, 1), (2, 1), (3, 1)):
        with monitor(step):
            loss = compiled(x)
        torch.testing.assert_close(loss, model(x))
        assert len(graphs) == compilations
    assert set(monitor.latest) == {("Fused", name) for name in STATISTICS}


def run(monitor: regard.Monitor, x: Tensor, steps: int = 3) -> None:
    for step in range(steps):
        with monitor(step):
            monitor.model(x)


# The table


def test_the_table_has_a_row_for_each_step_layer_head_and_statistic(tmp_path: Path) -> None:
    train(lambda model: regard.Monitor(model, tmp_path / "run", every=2, rows=4))
    table = read_table(tmp_path / "run").to_table().to_pydict()
    cells = set(zip(*(table[name] for name in ("step", "layer", "head", "statistic")), strict=True))
    wanted = {*product((0, 2, 4), (0, 1), (0, 1), STATISTICS)}
    assert cells == wanted
    assert len(table["step"]) == len(wanted)
    assert set(table["name"]) == {"blocks.0.attention", "blocks.1.attention"}
    history = read_history(tmp_path / "run", "entropy")
    assert (history.steps, history.rows, tuple(history.values.shape)) == ([0, 2, 4], 4, (4, 3))


def test_a_resumed_run_appends_and_replaces_what_it_repeats(tmp_path: Path) -> None:
    with regard.Monitor(model := Model(1), tmp_path, every=1) as monitor:
        for step in range(3):
            with monitor(step):
                model(torch.zeros(1, TOKENS, WIDTH))
    before = read_history(tmp_path, "query_norm").values
    with regard.Monitor(model, tmp_path, every=1) as monitor:
        for step in range(2, 5):
            with monitor(step):
                model(torch.ones(1, TOKENS, WIDTH))
    after = read_history(tmp_path, "query_norm")
    assert after.steps == [0, 1, 2, 3, 4]
    torch.testing.assert_close(after.values[:, :2], before[:, :2])
    assert not torch.equal(after.values[:, 2], before[:, 2])


def test_a_run_that_goes_back_is_told_of_the_steps_it_left(tmp_path: Path) -> None:
    model, x = Model(1), torch.zeros(1, TOKENS, WIDTH)
    with regard.Monitor(model, tmp_path, every=1) as monitor:
        for step in (5, 9):
            with monitor(step):
                model(x)
    with (
        regard.Monitor(model, tmp_path, every=1) as monitor,
        pytest.warns(UserWarning, match="has steps after 5, up to step-000000009"),
        monitor(5),
    ):
        model(x)
    with regard.Monitor(model, tmp_path, every=1) as monitor, monitor(9):
        model(x)  # the last step of the folder is no later one


def test_a_crash_leaves_the_table_up_to_the_last_step(tmp_path: Path) -> None:
    model = Model(1)
    monitor = regard.Monitor(model, tmp_path, every=1)
    with monitor(0):
        model(torch.zeros(1, TOKENS, WIDTH))
    (tmp_path / "step-000000001.partial").write_bytes(b"half of a file")
    with pytest.raises(ValueError, match="embed_dim"), monitor(1):
        model(torch.zeros(1, TOKENS, WIDTH + 1))
    assert read_history(tmp_path, "entropy").steps == [0]


def test_another_model_in_the_folder_is_an_error(tmp_path: Path) -> None:
    for layers in (1, 2):
        model = Model(layers)
        with regard.Monitor(model, tmp_path) as monitor:
            if layers == 1:
                with monitor(0):
                    model(torch.zeros(1, TOKENS, WIDTH))
                continue
            with pytest.raises(regard.RegardError) as raised, monitor(100):
                model(torch.zeros(1, TOKENS, WIDTH))
    assert str(raised.value) == (
        f"{tmp_path / 'step-000000000.parquet'} is of another model: layer 'blocks.1.attention' "
        "has 0 heads there and 2 heads here.\n    Give this run a folder of its own."
    )


def test_other_rows_in_the_folder_are_an_error(tmp_path: Path) -> None:
    model = Model(1)
    with regard.Monitor(model, tmp_path, rows=2) as monitor, monitor(0):
        model(torch.zeros(1, TOKENS, WIDTH))
    again = regard.Monitor(model, tmp_path)
    with pytest.raises(regard.RegardError) as raised, again(100):
        model(torch.zeros(1, TOKENS, WIDTH))
    assert str(raised.value) == (
        f"{tmp_path / 'step-000000000.parquet'} has statistics of the last 2 rows of each "
        "sequence, and this monitor asks for all rows.\n    Give this run a folder of its own."
    )


def test_the_table_waits_for_processes_that_a_launcher_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    model = Model(1)
    with regard.Monitor(model, tmp_path / "run") as monitor:
        assert not (tmp_path / "run").exists()
        with monitor(0):
            model(torch.randn(1, TOKENS, WIDTH))
    assert (tmp_path / "run" / "step-000000000.parquet").exists()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)[:, None]
        return F.scaled_dot_product_attention(query, x[:, None], x[:, None], dropout_p=0.1)


def test_weights_of_nan_fire_an_alarm_though_they_have_no_scores() -> None:
    model, alerts = Dropped(), list[object]()
    alarm = regard.alarms.not_finite()
    with regard.Monitor(model, every=1, alarm=alarm, then=alerts.extend) as monitor:
        with monitor(0):
            model(torch.randn(2, TOKENS, WIDTH))
        assert alerts == []
        nn.init.constant_(model.query.weight, torch.nan)
        with monitor(1):
            model(torch.randn(2, TOKENS, WIDTH))
    assert len(alerts) == 1


def test_a_model_in_float64_has_all_statistics() -> None:
    model = Model(1).double()
    with regard.Monitor(model, every=1) as monitor, monitor(0):
        model(torch.randn(1, TOKENS, WIDTH, dtype=torch.float64))
    assert {name for _, name in monitor.latest} == {*STATISTICS}


def test_a_monitor_without_a_step_warns() -> None:
    with (
        pytest.warns(UserWarning, match=r"observed no step.\n    Write with monitor\(step\)"),
        regard.Monitor(model := Model(1), every=1),
    ):
        model(torch.randn(1, TOKENS, WIDTH))
    with pytest.raises(ValueError, match="step is -1"):
        regard.Monitor(model)(-1)
    with pytest.raises(TypeError, match="writers has a str"):
        regard.Monitor(model, writers=["tensorboard"])
    with pytest.raises(TypeError, match="writers has an int"):
        regard.Monitor(model, writers=3)  # type: ignore[arg-type] # refused


def test_two_monitors_share_a_model_but_no_folder(tmp_path: Path) -> None:
    model = Model(1)
    first = regard.Monitor(model, tmp_path / "first", every=1)
    with pytest.raises(regard.RegardError, match=r"another monitor writes to .*first"):
        regard.Monitor(model, tmp_path / "first")
    second = regard.Monitor(model, tmp_path / "second", every=1)
    with first(0), second(0):
        model(torch.randn(1, TOKENS, WIDTH))
    assert first.latest.keys() == second.latest.keys()
    for key, summary in first.latest.items():
        assert torch.equal(torch.stack(summary[1:]), torch.stack(second.latest[key][1:]))
    first.close()
    regard.Monitor(model, tmp_path / "first").close()


def test_a_full_disk_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    model = Model(1)
    monitor = regard.Monitor(model, tmp_path, every=1)
    with monitor(0):
        model(torch.zeros(1, TOKENS, WIDTH))
    full = pytest.warns(UserWarning, match=r"step-000000001.parquet cannot be written")
    with disk_of(100), full, monitor(1):
        model(torch.zeros(1, TOKENS, WIDTH))
    with monitor(2):
        model(torch.zeros(1, TOKENS, WIDTH))
    assert read_history(tmp_path, "entropy").steps == [0, 2]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(regard.RegardError, match="has no observed step"):
        read_history(tmp_path, "entropy")
    (tmp_path / "step-000000000.parquet").write_bytes(b"no table")
    with pytest.raises(regard.RegardError, match="is not of a monitor, or damaged"):
        read_history(tmp_path, "entropy")


# Failures


def test_a_writer_that_raises_is_named_once(tmp_path: Path) -> None:
    def broken(step: int, numbers: object) -> None:
        raise ValueError("no connection")

    steps: list[int] = []
    model = Model(1)
    writers = [broken, lambda step, _: steps.append(step)]
    monitor = regard.Monitor(model, every=1, writers=writers)
    with pytest.warns(UserWarning, match="no connection") as caught:
        run(monitor, torch.zeros(1, TOKENS, WIDTH))
    assert steps == [0, 1, 2]
    assert [str(each.message) for each in caught] == [
        f"the writer {broken.__qualname__} failed: ValueError: no connection"
    ]


class Refused(nn.Module):
    """An attention by its class name in which no weights can be seen."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT @ x


class LinearAttention(Refused):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) @ torch.ones(WIDTH, WIDTH)


def test_refused_layers_are_named_once_and_the_rest_goes_on() -> None:
    model = nn.Sequential(Block(), LinearAttention())
    monitor = regard.Monitor(model, every=1)
    with pytest.warns(regard.RefusedWarning, match="'1'") as caught:
        run(monitor, torch.randn(1, TOKENS, WIDTH))
    assert len(caught) == 1
    assert {name for name, _ in monitor.latest} == {"0.attention"}


def test_steps_without_attention_are_named_once() -> None:
    model = nn.Linear(2, 2)
    monitor = regard.Monitor(model, every=1)
    with pytest.warns(regard.RefusedWarning, match="a step was not observed") as caught:
        run(monitor, torch.zeros(1, 2))
    assert len(caught) == 1
    assert monitor.latest == {}


def test_numbers_that_are_nan_are_written(tmp_path: Path) -> None:
    model = Model(1)
    with regard.Monitor(model, tmp_path, every=1) as monitor, monitor(0):
        model(torch.full((1, TOKENS, WIDTH), torch.nan))
    assert read_history(tmp_path, "entropy").values.isnan().all()


# Alarms


def large_scores(factor: float = 50.0) -> Tensor:
    return factor * torch.randn(1, 4 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_an_alarm_warns_with_layer_head_step_and_number() -> None:
    model = Model(1)
    monitor = regard.Monitor(model, every=1, alarm=regard.alarms.max_score(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monitor(0):
            model(torch.zeros(1, TOKENS, WIDTH))
    with pytest.warns(UserWarning, match="step 7") as caught, monitor(7):
        model(large_scores())
    number = float(monitor.latest["blocks.0.attention", "max_score"].max[0])
    assert str(caught[0].message) == (
        f"step 7, layer 0 (blocks.0.attention), head 0: max_score is {number:.6g}, above 5.\n"
        "    1 more head fired an alarm."
    )


def test_an_alarm_raises_and_saves_a_recording(tmp_path: Path) -> None:
    model, save = Model(1), tmp_path / "alarms"
    alarm = regard.alarms.max_score(5)
    monitor = regard.Monitor(model, every=1, alarm=alarm, then="raise", save=save)
    x = large_scores()
    with pytest.raises(regard.RegardError, match="step 3, layer 0"), monitor(3):
        model(x)
    saved = regard.load(save / "step-000000003.safetensors")
    highest = saved[0].reduce(regard.MaxScore()).amax((0, 2))
    torch.testing.assert_close(
        highest.double(), monitor.latest["blocks.0.attention", "max_score"].max
    )


def test_what_is_finite_of_a_batch_with_nan_is_saved(tmp_path: Path) -> None:
    model = Model(2)
    monitor = regard.Monitor(model, every=1, alarm=regard.alarms.not_finite(), save=tmp_path)
    with torch.no_grad():
        model.blocks[1].attention.query.weight[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="step 0, layer 1") as caught, monitor(0):
        model(large_scores())
    assert len(caught) == 1
    assert list(regard.load(tmp_path / "step-000000000.safetensors")) == ["blocks.0.attention"]
    with pytest.warns(UserWarning) as caught, monitor(1):  # noqa: PT030  of save and of the alarm
        model(large_scores(torch.nan))
    assert "every layer has NaN or infinity" in str(caught[0].message)
    assert "step 1, layer 0" in str(caught[1].message)


def test_a_limit_that_no_number_can_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is NaN"):
        regard.alarms.max_score(float("nan"))
    with pytest.raises(ValueError, match="limit is 5; a normalised entropy lies between"):
        regard.alarms.entropy_collapse(5)


@pytest.mark.parametrize(
    ("alarm", "x", "heads"),
    [
        pytest.param(regard.alarms.entropy_collapse(0.3), large_scores(), 2, id="collapse"),
        pytest.param(regard.alarms.entropy_collapse(0.3), 0 * large_scores(), 0, id="none"),
        pytest.param(regard.alarms.not_finite(), large_scores(torch.nan), 2, id="NaN"),
        pytest.param(regard.alarms.not_finite(), large_scores(), 0, id="finite"),
        pytest.param(regard.alarms.dead_heads(), 0 * large_scores(), 2, id="uniform"),
        pytest.param(regard.alarms.dead_heads(), large_scores(1e4), 2, id="one key"),
        pytest.param(regard.alarms.dead_heads(), large_scores(5), 0, id="alive"),
        pytest.param(regard.alarms.dead_heads(10), 0 * large_scores(), 0, id="too early"),
    ],
)
def test_alarms_call_a_function_with_every_head(alarm: Any, x: Tensor, heads: int) -> None:
    alerts: list[Any] = []
    model = Model(1)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_() if each.ndim == 1 else None
    monitor = regard.Monitor(model, every=1, alarm=[alarm], then=alerts.extend)
    with monitor(1):
        model(x)
    assert [(each.step, each.layer, each.head) for each in alerts] == [
        (1, 0, head) for head in range(heads)
    ]


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        pytest.param(
            {"model": 1}, TypeError, "model is an int; it must be a torch.nn.Module", id="model"
        ),
        pytest.param({"every": 0}, ValueError, "every is 0; it must be at least 1", id="every"),
        pytest.param({"rows": 0}, ValueError, "rows is 0; it must be at least 1", id="rows"),
        pytest.param({"statistics": "entropy"}, TypeError, "statistics is ", id="one text"),
        pytest.param({"statistics": ["sinks"]}, ValueError, "statistics has 'sinks'", id="unknown"),
        pytest.param({"statistics": []}, ValueError, "statistics is empty", id="none"),
        pytest.param({"alarm": 100}, TypeError, "alarm is an int", id="alarm"),
        pytest.param(
            {"alarm": regard.alarms.max_score(1), "statistics": ["entropy"]},
            ValueError,
            "an alarm needs 'max_score'",
            id="alarm without its statistic",
        ),
        pytest.param({"then": "stop"}, ValueError, "then is 'stop'", id="then"),
        pytest.param({"then": "raise"}, ValueError, "need an alarm", id="then without alarm"),
        pytest.param({"save": "alarms"}, ValueError, "need an alarm", id="save without alarm"),
        pytest.param(
            {"save": __file__, "alarm": regard.alarms.max_score(1)},
            regard.RegardError,
            "which is a file",
            id="save",
        ),
        pytest.param({"path": ""}, ValueError, "path is empty", id="path"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        regard.Monitor(**{"model": Model(1), **arguments})


def test_a_step_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match="step is"):
        regard.Monitor(Model(1))(1.5)
