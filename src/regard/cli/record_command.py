"""``regard record``: save what a model attends to, here or on a server."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard.cli.options import (
    AsJson,
    Input,
    RecordOptions,
    Report,
    Server,
    option,
    parse_positions,
    reach,
    text_of,
    with_options,
)
from regard.cli.output_files import check_output, refusals, report_refused, write_json
from regard.text.escaping import visible

if TYPE_CHECKING:
    from regard.recording.recording import Recording

Output = Annotated[Path, option("--output -o FILE", "Write the recording to this file.")]


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
    from regard.recording.file_writer import check_replaceable

    check_output(output)
    check_replaceable(output)
    with progress() as report:
        if server is not None:
            seen = _record_served(options, server, text_of(text), output, report)
        else:
            words = text if options.image is not None else text_of(text)
            seen = options.observe(words, report, output)
    _write_summary(seen, output, as_json=as_json)


def _record_served(
    options: RecordOptions, url: str, text: str, output: Path, report: Report
) -> "Recording":
    """Let a server answer a prompt, and save the attention of prompt and answer."""
    options.check_served()
    report(f"recording {url}")
    seen = reach(url).record(
        text,
        output,
        layers=parse_positions("layers", options.layers),
        heads=parse_positions("heads", options.heads),
        max_tokens=max(1, options.generate),
        temperature=0,
    )
    report_refused(seen, strict=options.strict)
    return seen


def _write_summary(seen: "Recording", output: Path, *, as_json: bool) -> None:
    """Write what a file holds to standard output."""
    from regard.errors import bytes_text
    from regard.view.export.page_file import LIMIT, count_exact

    tokens, size = len(seen.key_tokens or ()), output.stat().st_size
    has_value = seen.layers[0].value is not None
    if as_json:
        write_json(
            {
                "model": seen.model,
                "tokens": tokens,
                "layers": seen.shapes,
                "refused": refusals(seen),
                "kept": "qkv" if has_value else "qk",
                "pictures": [picture.data is not None for picture in seen.pictures],
                "path": str(output),
                "bytes": size,
            }
        )
        return
    name, kept = visible(str(output)), "query, key and value" if has_value else "query and key"
    kept += " of each"
    if seen.pictures:
        with_data = any(picture.data is not None for picture in seen.pictures)
        kept += ", with the picture" if with_data else ", without the picture"
    exact, layers = count_exact(seen, LIMIT), len(seen.layers)
    hint = f"   about {exact} of {layers} layers exact; more with --limit" if exact < layers else ""
    sys.stdout.write(
        f"{visible(seen.model)}   {tokens:,} tokens · {layers} layers, {kept}\n"
        f"{name}   {bytes_text(size)}, all exact; open it with regard.load({str(output)!r})\n"
        f"    regard page {name}{hint}\n    regard segments {name} --by sentence\n"
    )
