"""``regard record``: run a model on a text, and save its attention."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import (
    AsJson,
    Chat,
    Device,
    Dtype,
    Generate,
    Heads,
    Layers,
    MaxTokens,
    Model,
    Text,
    TextFile,
    Values,
    cut_to_tokens,
    parse_positions,
)
from regard.cli.output_files import check_output, write_json
from regard.cli.progress import progress
from regard.cli.text_argument import read_text
from regard.models.pretrained import DEFAULT_MODEL, Pretrained, check_text
from regard.recording.file_writer import check_replaceable
from regard.recording.recording import Recording
from regard.text.escaping import visible

__all__ = ["Output", "record", "write_summary"]

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Write the recording to this file."),
]


def record(
    text: Text = None,
    file: TextFile = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "cpu",
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    chat: Chat = False,
    generate: Generate = 0,
    layers: Layers = None,
    heads: Heads = None,
    output: Output = Path("run.safetensors"),
    values: Values = False,
    as_json: AsJson = False,
) -> None:
    """Save what a model attends to when it reads a text."""
    check_output(output)
    check_replaceable(output)
    words = check_text(read_text(text, file))
    with progress() as report:
        report(f"loading {model}")
        pretrained = Pretrained.load(model, device=device, dtype=dtype)
        words = cut_to_tokens(pretrained, words, max_tokens)

        def report_progress(done: int, total: int | None) -> None:
            report(f"running {model}" if done != total else f"writing {output}", done, total)

        seen = pretrained.observe(
            words,
            keep="qkv" if values else "qk",
            layers=parse_positions("layers", layers),
            heads=parse_positions("heads", heads),
            chat=chat,
            generate=generate,
            path=output,
            progress=report_progress,
        )
    write_summary(seen, output, as_json=as_json)


def write_summary(seen: Recording, output: Path, *, as_json: bool) -> None:
    """Write what a file holds to standard output."""
    if as_json:
        write_json(_as_json(seen, output))
    else:
        sys.stdout.write(_as_text(seen, output))


def _as_text(seen: Recording, output: Path) -> str:
    kept = {"qk": "query and key", "qkv": "query, key and value"}[_kept_tensors(seen)]
    size = f"{output.stat().st_size / 1e6:,.1f} MB"
    lengths = f"{len(seen.key_tokens or ()):,} tokens · {len(seen.layers)} layers"
    name = visible(str(output))
    return (
        f"{visible(seen.model)}   {lengths}, {kept} of each\n"
        f"{name}   {size}; open it with regard.load({str(output)!r})\n"
        f"    regard page {name}\n    regard segments {name} --by sentence\n"
    )


def _kept_tensors(seen: Recording) -> str:
    return "qk" if seen.layers[0].value is None else "qkv"


def _as_json(seen: Recording, output: Path) -> dict[str, object]:
    return {
        "model": seen.model,
        "tokens": len(seen.key_tokens or ()),
        "layers": {name: list(shape) for name, shape in seen.shapes.items()},
        "kept": _kept_tensors(seen),
        "path": str(output),
        "bytes": output.stat().st_size,
    }
