"""``regard record`` and ``regard vllm record``: save what a model attends to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import (
    AsJson,
    Heads,
    Input,
    Layers,
    RecordOptions,
    parse_positions,
    text_of,
    with_options,
)

if TYPE_CHECKING:
    from regard.recording.recording import Recording

__all__ = ["record", "vllm"]

vllm = typer.Typer()

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Write the recording to this file."),
]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="The address of vllm serve.")]
Prompt = Annotated[
    str, typer.Argument(metavar="INPUT", help="The prompt: a text in quotes, or a text file.")
]
Answer = Annotated[
    int, typer.Option("--max-tokens", min=1, metavar="N", help="The longest answer, in tokens.")
]


@vllm.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Record a model that vLLM serves."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@with_options
def record(
    options: RecordOptions,
    text: Input = None,
    output: Output = Path("run.safetensors"),
    as_json: AsJson = False,
) -> None:
    """Save what a model attends to in a text, a picture, or both."""
    from regard.cli.progress import progress

    _check_place(output)
    if options.image is not None:
        with progress() as report:
            report(f"loading and running {options.name}")
            seen = options.observe_picture(text)
            report(f"writing {output}")
            seen.save(output)
        _write_summary(seen, output, as_json=as_json)
        return
    words = text_of(text)
    with progress() as report:
        report(f"loading {options.name}")
        pretrained, words = options.load_for(words)

        def report_progress(done: int, total: int | None) -> None:
            what = f"running {options.name}" if done != total else f"writing {output}"
            report(what, done, total)

        seen = options.observe(pretrained, words, output, report_progress)
    _write_summary(seen, output, as_json=as_json)


@vllm.command("record")
def record_served(
    prompt: Prompt,
    url: Url = "http://localhost:8000",
    max_tokens: Answer = 32,
    layers: Layers = None,
    heads: Heads = None,
    output: Output = Path("run.safetensors"),
    as_json: AsJson = False,
) -> None:
    """Let the server answer a prompt, and save the attention of prompt and answer.

    The server must run on this machine, with regard's worker extension and in vLLM's development
    mode.
    """
    from regard.cli.output_files import report_refused
    from regard.cli.progress import progress
    from regard.errors import RegardError

    _check_place(output)
    try:
        from regard import vllm as served
    except ModuleNotFoundError as missing:
        raise RegardError(
            f"regard vllm needs {missing.name}, which is not installed.\n"
            "    Run: pip install 'regard[models]'"
        ) from None
    chosen = parse_positions("layers", layers), parse_positions("heads", heads)
    words = text_of(prompt)
    with progress() as report:
        report(f"recording {url}")
        settings = {"max_tokens": max_tokens, "temperature": 0}
        (seen,) = served.record(
            served.Server(url), [words], settings, layers=chosen[0], heads=chosen[1]
        )
        report(f"writing {output}")
        report_refused(seen)
        seen.save(output)
    _write_summary(seen, output, as_json=as_json)


def _check_place(output: Path) -> None:
    """Refuse an output before any work is done for it."""
    from regard.cli.output_files import check_output
    from regard.recording.file_writer import check_replaceable

    check_output(output)
    check_replaceable(output)


def _write_summary(seen: "Recording", output: Path, *, as_json: bool) -> None:
    """Write what a file holds to standard output."""
    from regard.cli.output_files import write_json
    from regard.text.escaping import visible
    from regard.view.export.page_file import LIMIT, count_exact

    tokens, size = len(seen.key_tokens or ()), output.stat().st_size
    has_value = seen.layers[0].value is not None
    if as_json:
        write_json(
            {
                "model": seen.model,
                "tokens": tokens,
                "layers": seen.shapes,
                "refused": [refusal._asdict() for refusal in seen.refused],
                "kept": "qkv" if has_value else "qk",
                "pictures": [picture.data is not None for picture in seen.pictures],
                "path": str(output),
                "bytes": size,
            }
        )
        return
    kept, name = "query, key and value" if has_value else "query and key", visible(str(output))
    exact = count_exact(seen, LIMIT)
    held = ""
    if exact < len(seen.layers):
        held = f"   about {exact} of {len(seen.layers)} layers exact; more with --limit"
    pictures = sum(picture.data is not None for picture in seen.pictures)
    kept += " of each"
    if seen.pictures:
        kept += ", with the picture" if pictures else ", without the picture"
    sys.stdout.write(
        f"{visible(seen.model)}   {tokens:,} tokens · {len(seen.layers)} layers, {kept}\n"
        f"{name}   {size / 1e6:,.1f} MB, every weight exact; open it with "
        f"regard.load({str(output)!r})\n"
        f"    regard page {name}{held}\n    regard segments {name} --by sentence\n"
    )
