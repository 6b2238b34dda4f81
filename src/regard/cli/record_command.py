"""``regard record``: save what a model attends to, here or on a server."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import (
    AsJson,
    Input,
    RecordOptions,
    Server,
    parse_positions,
    reach,
    text_of,
    with_options,
)

if TYPE_CHECKING:
    from regard.recording.recording import Recording

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Write the recording to this file."),
]


@with_options
def record(
    options: RecordOptions,
    text: Input = None,
    output: Output = Path("run.safetensors"),
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Save what a model attends to in a text, a picture, or both."""
    from regard.cli.progress import progress

    _check_place(output)
    if server is not None:
        seen = _record_served(options, server, text, output)
        _write_summary(seen, output, as_json=as_json)
        return
    if options.image is not None:
        with progress() as report:
            report(f"loading and running {options.vision_name}")
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


def _record_served(options: RecordOptions, url: str, text: str | None, output: Path) -> "Recording":
    """Let a server answer a prompt, and save the attention of prompt and answer."""
    from regard.cli.output_files import report_refused
    from regard.cli.progress import progress

    options.check_served()
    with progress() as report:
        report(f"recording {url}")
        seen = reach(url).record(
            text_of(text),
            output,
            layers=parse_positions("layers", options.layers),
            heads=parse_positions("heads", options.heads),
            max_tokens=max(1, options.generate),
            temperature=0,
        )
    report_refused(seen, strict=options.strict)
    return seen


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
