"""regard.survey: statistics of every head of a model on every text of a corpus."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.capture.observer import observe
from regard.corpus.part_files import PartFiles
from regard.corpus.text_files import Corpus, Text
from regard.corpus.text_scores import SCORES, WEIGHTS_AT_ONCE, TextScores
from regard.errors import RegardError, check_count, check_path, count_text
from regard.models.pretrained import Pretrained, quiet
from regard.recording.version import version
from regard.text.tokens import Token

_Columns = dict[str, list[Any]]

# A batch of several texts has at most this many tokens.
_TOKENS_AT_ONCE = 4096


def survey(
    model: str | Path | Pretrained,
    corpus: str | Path,
    out: str | Path,
    *,
    column: str = "text",
    parts: Mapping[str, str] | None = None,
    max_tokens: int | None = None,
    block: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    r"""Measure every head of a model on every text of a corpus.

    The answer has one row for each text, layer and head; ``docs/survey.md`` defines the columns.
    Texts of equal length run as one batch, without padding.

    Each block of texts becomes one Parquet file, written whole or not at all. A survey that was
    interrupted goes on behind its last file: call it again with the same arguments. Under torchrun
    the processes take the blocks in turn, by ``RANK`` and ``WORLD_SIZE``; they do not wait for
    each other. Blank lines and blank texts are skipped; a warning has their number.

    Args:
        model: a folder, a name on the Hugging Face hub, or a ``Pretrained``.
        corpus: a file of plain text with one text per line, of JSON lines (``.jsonl``) or of
            Parquet.
        out: the folder of the files.
        column: the name of the texts in JSON lines and Parquet.
        parts: regular expressions by name. Each adds a column: the share of attention that the
            tokens of its matches receive. Where a pattern has a group, the first group counts.
        max_tokens: texts are cut to their first tokens; a text that is too long for the model is
            an error when left out.
        block: the number of texts in a file.
        progress: called with the number of finished texts and of all texts of this process.

    Returns:
        A ``pyarrow.dataset.Dataset`` of the files that are there.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a part has the name of another column or is no regular expression.
        RegardError: a line of the corpus is broken or too long for the model, the folder has files
            of another run, or a file cannot be written. The message names file and line.

    Example:
        >>> from pathlib import Path
        >>> import regard
        >>> _ = Path("texts.txt").write_text("The cat sat.\nLife is short.\n")
        >>> dataset = regard.survey("all-MiniLM-L6-v2", "texts.txt", "out")
        >>> dataset.count_rows()  # 2 texts, 6 layers, 12 heads
        144
    """
    check_count("block", block)
    patterns = _patterns(parts or {})
    pretrained = model if isinstance(model, Pretrained) else Pretrained.load(model)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
    source = Corpus(check_path(corpus), column)
    run = {
        "model": pretrained.name,
        "weights": _fingerprint(pretrained),
        "block": block,
        "max_tokens": max_tokens,
        "parts": dict(parts or {}),
        "regard": version(),
    }
    files = PartFiles(check_path(out), run, tuple(patterns))
    reader = _Reader(pretrained, patterns, max_tokens)
    with quiet():
        todo, done, total = _unfinished(files, reader, source.blocks(block))
    if source.blank and _turn()[0] == 0:
        lines = count_text(source.blank, "blank text")
        warnings.warn(f"{lines} of {corpus} skipped.", stacklevel=2)
    with quiet():
        for number, texts in enumerate(source.blocks(block)):
            if number not in todo:
                continue
            rows: list[_Columns] = []
            for batch in reader.batches(texts):
                rows += reader.rows(batch)
                if progress is not None:
                    progress(done + len(rows), total)
            rows.sort(key=lambda columns: columns["text"][0])
            merged = {name: [x for row in rows for x in row[name]] for name in rows[0]}
            files.write(number, texts, merged)
            done += len(texts)
    return files.dataset()


def _unfinished(
    files: PartFiles, reader: "_Reader", blocks: Iterable[Sequence[Text]]
) -> tuple[set[int], int, int]:
    """Check the folder and every text that this process will read, before the first one runs.

    Returns:
        The blocks that it will read, how many of its texts are finished, and how many it has.
    """
    rank, ranks = _turn()
    files.check()
    todo, done, total, count = set[int](), 0, 0, 0
    for number, texts in enumerate(blocks):
        count = number + 1
        if number % ranks != rank:
            continue
        total += len(texts)
        if files.is_finished(number, texts):
            done += len(texts)
            continue
        todo.add(number)
        for text in texts:
            reader.check(text)
    files.check_end(count)
    return todo, done, total


@dataclass(frozen=True)
class _Encoded:
    """A text as the model reads it."""

    text: Text
    tokens: tuple[Token, ...]
    inputs: dict[str, Tensor]

    @property
    def kind(self) -> tuple[int, tuple[str, ...]]:
        """Texts of one kind fit in one batch."""
        return len(self.tokens), tuple(self.inputs)


@dataclass(frozen=True)
class _Reader:
    """A model that reads batches of texts, and the questions for its heads."""

    pretrained: Pretrained
    patterns: Mapping[str, re.Pattern[str]]
    max_tokens: int | None

    def check(self, text: Text) -> None:
        """Raise a RegardError with the place of a text that the model cannot read."""
        self._encoded(text)

    def batches(self, texts: Sequence[Text]) -> Iterator[Sequence[_Encoded]]:
        """Yield the texts in batches of equal length."""
        encoded = sorted(map(self._encoded, texts), key=lambda each: each.kind)
        for (length, _), alike in groupby(encoded, lambda each: each.kind):
            size = max(1, min(_TOKENS_AT_ONCE // length, WEIGHTS_AT_ONCE // length**2))
            same = list(alike)
            for start in range(0, len(same), size):
                yield same[start : start + size]

    @torch.inference_mode()
    def rows(self, batch: Sequence[_Encoded]) -> list[_Columns]:
        """Return the columns of each text: its rows, a layer and a head each."""
        inputs = {
            name: torch.cat([each.inputs[name] for each in batch]) for name in batch[0].inputs
        }
        ids = inputs["input_ids"]
        special = [[token.special for token in each.tokens] for each in batch]
        parts = [[self._part(p, each.tokens) for each in batch] for p in self.patterns.values()]
        asked = TextScores(
            ids,
            torch.tensor(special, device=ids.device),
            torch.tensor(parts, dtype=torch.bool, device=ids.device).view(-1, *ids.shape),
        )
        with observe(self.pretrained.model, keep=[asked], strict=True) as seen:
            self.pretrained.model(**inputs)
        rows = [_Columns() for _ in batch]
        for place, layer in enumerate(seen.layers):
            answer: Tensor = layer.reduce(asked)
            self._check_numbers(answer, layer.name, batch)
            columns = asked.columns(answer, tuple(self.patterns))
            heads = range(answer.shape[1])
            for entry, (each, row) in enumerate(zip(batch, rows, strict=True)):
                numbers = {"text": each.text.number, "tokens": len(each.tokens), "layer": place}
                for name, number in numbers.items():
                    row.setdefault(name, []).extend(number for _ in heads)
                row.setdefault("head", []).extend(heads)
                for name, values in columns.items():
                    row.setdefault(name, []).extend(values[entry])
        return rows

    def _encoded(self, text: Text) -> _Encoded:
        words = text.text
        try:
            if self.max_tokens is not None:
                words = self.pretrained.first_tokens(words, self.max_tokens)
            return _Encoded(text, *self.pretrained.encode(words))
        except (ValueError, RegardError) as error:
            raise RegardError(f"{text.place}: {error}") from error

    @staticmethod
    def _part(pattern: re.Pattern[str], tokens: Sequence[Token]) -> list[bool]:
        """Return True for each token that overlaps a match."""
        texts = ["" if token.special else token.text for token in tokens]
        spans = [match.span(min(1, pattern.groups)) for match in pattern.finditer("".join(texts))]
        end, inside = 0, list[bool]()
        for text in texts:
            begin, end = end, end + len(text)
            inside.append(any(start < end and begin < stop for start, stop in spans))
        return inside

    @staticmethod
    def _check_numbers(answer: Tensor, layer: str, batch: Sequence[_Encoded]) -> None:
        wrong = answer.isnan().flatten(1).any(1)
        if bool(wrong.any()):
            place = batch[int(wrong.int().argmax())].text.place
            raise RegardError(
                f"{place}: layer {layer!r} has weights that are not numbers (NaN).\n"
                "    Run the model in another dtype, or leave out the text."
            )


def _patterns(parts: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    compiled: dict[str, re.Pattern[str]] = {}
    for name, pattern in parts.items():
        if not name or name in (*SCORES, "text", "tokens", "layer", "head"):
            raise ValueError(
                f"parts has {name!r}, which is the name of another column or empty.\n"
                "    Name the part otherwise."
            )
        try:
            compiled[name] = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"parts has {pattern!r} for {name!r}; it is no regular expression ({error})."
            ) from error
    return compiled


def _turn() -> tuple[int, int]:
    """Return the number of this process and of all processes, as torchrun tells them."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise ValueError(
            f"RANK is {rank!r} and WORLD_SIZE is {ranks!r}; RANK must be below WORLD_SIZE.\n"
            "    Start the processes with torchrun, which sets both, or remove both variables."
        )
    return int(rank), int(ranks)


def _fingerprint(pretrained: Pretrained) -> str:
    """Return a checksum of names, shapes and the ends of the weights of a model."""
    digest = sha256()
    for name, tensor in pretrained.model.state_dict().items():
        flat = tensor.detach().flatten()
        ends = torch.cat([flat[:64], flat[-64:]]).double().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + ends)
    return digest.hexdigest()[:16]
