"""The monitor in the tools that people train with."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard.training.run_table import read_history

TOKENS, STEPS = 12, 5


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


def batches(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 32, (count, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in ids]


def trained(folder: Path, *, with_monitor: bool, **options: Any) -> tuple[list[float], nn.Module]:
    """Return the losses and the model after a few steps of the Trainer of transformers."""
    trained_model = model()
    arguments = transformers.TrainingArguments(
        str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    monitor = regard.Monitor(trained_model, folder / "run", every=2)
    trainer = transformers.Trainer(
        trained_model,
        arguments,
        train_dataset=batches(64),  # pyright: ignore[reportArgumentType]
        callbacks=[regard.callbacks.trainer(monitor)] if with_monitor else [],
    )
    trainer.train()
    monitor.close()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], trained_model


def hooks(observed: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in observed.modules())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing", marks=pytest.mark.full),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_trainer_of_transformers_is_observed_bit_for_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    losses, with_monitor = trained(tmp_path, with_monitor=True, **options)
    assert read_history(tmp_path / "run", "entropy").steps == [0, 2, 4]
    expected, without = trained(tmp_path / "without", with_monitor=False, **options)
    assert losses == expected
    assert hooks(with_monitor) == hooks(without)
    for mine, theirs in zip(with_monitor.parameters(), without.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_a_trainer_that_compiles_is_observed(tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    losses, with_monitor = trained(tmp_path, with_monitor=True, **options)
    assert read_history(tmp_path / "run", "entropy").steps == [0, 2, 4]
    assert hooks(with_monitor) == 0
    expected, _ = trained(tmp_path / "without", with_monitor=False, **options)
    # Observed steps run uncompiled, and the steps after them amplify other last bits.
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_forward_that_fails_in_the_trainer_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = model()
    broken.lm_head = nn.Linear(3, 3)
    monitor = regard.Monitor(broken, tmp_path, every=1)
    callback = regard.callbacks.trainer(monitor)
    callback.on_step_begin(
        transformers.TrainingArguments(str(tmp_path)),
        transformers.TrainerState(global_step=0),
        None,
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        broken(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert not broken._forward_hooks
    assert not list(tmp_path.glob("*.parquet"))
    with regard.observe(whole := model()):  # no mode of the failed step is left
        whole(input_ids=torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightning_is_observed_bit_for_bit(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs pip install lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model(), []

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    losses = []
    for name in ("with", "without"):
        module = Module()
        monitor = regard.Monitor(module, tmp_path / name, every=2)
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accumulate_grad_batches=2,
            callbacks=[regard.callbacks.lightning(monitor)] if name == "with" else [],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(batches(20), 2)  # pyright: ignore[reportArgumentType]
        trainer.fit(module, loader)
        monitor.close()
        losses.append(module.losses)
    assert losses[0] == losses[1]
    history = read_history(tmp_path / "with", "entropy")
    assert history.steps == [0, 2, 4]


# Writers

NUMBERS = {"attention/entropy/L00H00": 1.5, "attention/dead_heads/L00": 0.0}


def test_numbers_have_names_that_sort(tmp_path: Path) -> None:
    written: list[dict[str, float]] = []
    observed = model()
    statistics = ["max_score", "normalized_entropy"]
    monitor = regard.Monitor(
        observed, every=1, statistics=statistics, writers=[lambda _, each: written.append(each)]
    )
    with monitor(0):
        observed(input_ids=torch.arange(6)[None])
    cells = [f"L{layer:02}H{head:02}" for layer in range(2) for head in range(2)]
    names = [f"attention/{each}/{cell}" for each in statistics for cell in cells]
    assert sorted(written[0]) == sorted(
        [*names, "attention/dead_heads/L00", "attention/dead_heads/L01"]
    )
    latest = monitor.latest["model.layers.1.self_attn", "max_score"]
    assert written[0]["attention/max_score/L01H01"] == float(latest.max[1])


@pytest.mark.full
def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs pip install tensorboard")
    regard.writers.tensorboard(tmp_path)(7, NUMBERS)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    for name, number in NUMBERS.items():
        [event] = events.Scalars(name)
        assert (event.step, event.value) == (7, number)


@pytest.mark.full
def test_mlflow_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("training")
    with mlflow.start_run() as run:
        regard.writers.mlflow()(7, {**NUMBERS, **{f"n/{at}": 0.0 for at in range(1500)}})
    for name, number in NUMBERS.items():
        [metric] = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
        assert (metric.step, metric.value) == (7, number)


@pytest.mark.full
def test_what_is_no_run_of_wandb_is_an_error() -> None:
    with pytest.raises(TypeError, match="run is None; it must be a run of Weights & Biases"):
        regard.writers.wandb(None)


def test_wandb_gets_every_number(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="needs pip install wandb")
    run = wandb.init(mode="offline", dir=tmp_path, project="p")
    regard.writers.wandb(run)(7, NUMBERS)
    summary = dict(run.summary)
    run.finish()
    assert {name: summary[name] for name in NUMBERS} == NUMBERS
    assert summary["attention/step"] == 7


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(regard.RegardError, match=f"needs {name}, which is not installed"):
        getattr(regard.writers, name)(*(["logs"] if name == "tensorboard" else []))
