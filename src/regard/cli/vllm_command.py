"""``regard vllm record``: save what a model of a running ``vllm serve`` attends to."""

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import AsJson, Heads, Layers, parse_positions
from regard.cli.output_files import check_output
from regard.cli.progress import progress
from regard.cli.record_command import Output, write_summary
from regard.errors import RegardError
from regard.recording.file_writer import check_replaceable

__all__ = ["vllm"]

vllm = typer.Typer(help="Record a model that vLLM serves.", no_args_is_help=True)

Url = Annotated[
    str, typer.Option("--url", metavar="URL", help="The address of vllm serve.", show_default=True)
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")]
Answer = Annotated[
    int, typer.Option("--max-tokens", min=1, metavar="N", help="The longest answer, in tokens.")
]


@vllm.command("record")
def record(
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
    check_output(output)
    check_replaceable(output)
    try:
        from regard import vllm as served
    except ModuleNotFoundError as missing:
        raise RegardError(
            f"regard vllm needs {missing.name}, which is not installed.\n"
            "    Run: pip install 'regard[models]'"
        ) from None
    chosen = parse_positions("layers", layers), parse_positions("heads", heads)
    with progress() as report:
        report(f"recording {url}")
        settings = {"max_tokens": max_tokens, "temperature": 0}
        (seen,) = served.record(
            served.Server(url), [prompt], settings, layers=chosen[0], heads=chosen[1]
        )
        report(f"writing {output}")
        seen.save(output)
    write_summary(seen, output, as_json=as_json)
