"""Runs that show what a head can do where there is something to do: copy, repeat, find again.

In an ordinary text an induction head mostly rests on the first token. A trial gives a model a text
made for the purpose and measures one weight for each query: the one that the head's kind means.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.analysis.head_classes import Trial
from regard.analysis.head_kinds import DUPLICATE, INDUCTION, RETRIEVAL
from regard.analysis.head_survey import of_each_head
from regard.capture.observer import observe
from regard.errors import check_count, kind_text
from regard.reductions.sums import Diagonal

__all__ = ["needle", "repeated_tokens", "repetition"]

_HAY = (
    "The ferry to the island leaves at seven and comes back before dark. "
    "A good chair should let the feet rest flat on the floor. "
    "In spring the farmers open the gates and the sheep walk up to the hills. "
    "The library bought forty new maps and hung the largest beside the stairs. "
    "Clay has to dry slowly, or the bowl will crack in the kiln. "
    "Two trains meet in the valley, and one of them always has to wait. "
    "The museum keeps its oldest coins in a room without windows. "
    "Rain fell for three days, and the river rose to the third step. "
    "The carpenter measured the door twice and cut the board once. "
    "On market days the square is full by eight in the morning. "
    "Glass is made of sand, and sand is made of mountains. "
    "The orchestra tuned its strings while the last guests found their seats. "
)
_NEEDLES = (
    (
        "Nobody but Anna knows that her famous soup is made with",
        " smoked paprika, two dried apricots and a spoon of honey",
        "Question: Which ingredients does the cook keep secret?\nAnswer:",
    ),
    (
        "Before he sailed away, the old captain buried his",
        " silver compass under the third oak behind the chapel",
        "Question: What was hidden by the sailor, and where?\nAnswer:",
    ),
    (
        "The password that opens the archive of the town is",
        " yellow marble elephant and nine hundred lanterns",
        "Question: How does one get into the files?\nAnswer:",
    ),
)


def repeated_tokens(
    model: nn.Module,
    *,
    vocabulary: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
    length: int = 64,
    texts: int = 4,
    seed: int = 0,
) -> Trial:
    """Run a model on random tokens that come twice: induction and duplicate-token heads.

    With n tokens, query i of the second half has seen its token n before. Its weight there is the
    duplicate-token score, its weight on the token after that, n - 1 before, the induction score;
    both in the mean over the second half and all texts. The tokens of a text are all different, so
    that nothing but the repetition can be found again.

    Args:
        model: of language, in ``eval()``; it is called as ``model(ids)``.
        vocabulary: token ids to draw from; all of a Hugging Face model when left out.
        start: token ids before the first, as in training; the ``bos_token_id`` of a Hugging Face
            model when left out, where its vocabulary has that.
        length: n.
        texts: how many of them are read, in one batch.
        seed: of the random numbers.

    Returns:
        The scores, for ``regard.heads(seen, trial)``.

    Raises:
        TypeError: model is no ``nn.Module``, or length or texts no whole number.
        ValueError: length is below 2, or there are fewer token ids.
        RegardError: no attention was seen.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), regard.nn.SelfAttention(8))
        >>> trial = regard.trials.repeated_tokens(model, vocabulary=range(100))
        >>> list(trial.scores["1"])
        ['induction', 'duplicate token']

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads" (prefix matching); the
        offsets are those of TransformerLens.
    """
    _check_model(model)
    check_count("length", length)
    check_count("texts", texts)
    vocabulary = _vocabulary(model) if vocabulary is None else vocabulary
    if not 2 <= length <= len(vocabulary):
        raise ValueError(
            f"length is {length}; it must be from 2 to the {len(vocabulary)} token ids that there "
            "are.\n    Random tokens are drawn once each."
        )
    generator = torch.Generator().manual_seed(seed)
    known = torch.tensor(vocabulary, device="cpu")
    drawn = [
        known[torch.randperm(len(known), generator=generator, device="cpu")[:length]]
        for _ in range(texts)
    ]
    before = torch.tensor(
        _start(model) if start is None else list(start), dtype=torch.long, device="cpu"
    )
    ids = torch.stack([torch.cat((before, text, text)) for text in drawn])
    keys = {INDUCTION.name: len(before) + 1, DUPLICATE.name: len(before)}
    return Trial(_weights(model, ids, len(before) + length, keys, length))


def repetition(model: nn.Module, *, limit: int, texts: int = 4) -> list[Trial]:
    """Run ``repeated_tokens`` on a Hugging Face model, as long as the model can read.

    Args:
        model: of language, in ``eval()``.
        limit: the most tokens that it reads.
        texts: how many random texts it reads.

    Returns:
        The trial; no trial if the model reads or knows too few tokens.

    Example:
        >>> from regard.models.pretrained import Pretrained
        >>> from regard.models.trials import repetition
        >>> len(repetition(Pretrained.load().model, limit=128, texts=1))
        1
    """
    known = cast(Any, model).config.get_text_config().vocab_size
    # A third of what it reads: the text twice, and what stands before it.
    length = min(64, limit // 3, known)
    return [repeated_tokens(model, length=length, texts=texts)] if length >= 2 else []


def needle(
    model: nn.Module,
    tokenizer: Callable[..., Mapping[str, Any]],
    *,
    start: Sequence[int] | None = None,
    length: int = 512,
    depths: Sequence[float] = (0.2, 0.5, 0.8),
) -> Trial:
    """Let a model answer from one sentence in a long text: retrieval heads.

    Three sentences, the needles, are put one by one at each depth of a text about other things.
    After the text comes a question in other words, and then the answer, in the needle's own tokens.
    The score is the weight from the token before each token of the answer, the one that predicts
    it, to that same token in the needle, in the mean over the answer and all runs. Ours: Wu et al.
    count how often it is the largest weight of its row while the model generates.

    Args:
        model: of language, in ``eval()``; it is called as ``model(ids)``.
        tokenizer: of Hugging Face; called as ``tokenizer(text, add_special_tokens=False)``.
        start: as in ``repeated_tokens``.
        length: tokens of the whole text, needle, question and answer included.
        depths: where the needle is, from 0 (the beginning of the text) to 1.

    Returns:
        The scores, for ``regard.heads(seen, trial)``.

    Raises:
        TypeError: model is no ``nn.Module``, or length no whole number.
        ValueError: length leaves no room for a text, or a depth is not from 0 to 1.
        RegardError: no attention was seen.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Embedding(256, 8), regard.nn.SelfAttention(8))
        >>> def letters(text, add_special_tokens):
        ...     return {"input_ids": list(text.encode())}
        >>> trial = regard.trials.needle(model, letters, length=1000, depths=[0.5])
        >>> list(trial.scores["1"])
        ['retrieval']

    Source: Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality",
        section 2.
    """
    _check_model(model)
    check_count("length", length)
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"depths has {list(depths)}; each must be from 0 to 1, and there must be one.\n"
            "    Pass for example depths=[0.5]."
        )

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    before = list(_start(model) if start is None else start)
    runs: list[Mapping[str, Mapping[str, Sequence[float]]]] = []
    for parts in _NEEDLES:
        for depth in depths:
            text = _hidden(ids_of, parts, depth, length - len(before))
            query, key = len(before) + text.query, len(before) + text.key
            ids = torch.tensor([[*before, *text.ids]], device="cpu")
            runs.append(_weights(model, ids, query, {RETRIEVAL.name: key}, text.answer_len))
    return Trial(_mean(runs))


class _Hidden(NamedTuple):
    """A text with a needle: query + i predicts the token at key + i, for i below answer_len."""

    ids: list[int]
    query: int
    key: int
    answer_len: int


def _hidden(
    ids_of: Callable[[str], list[int]], parts: tuple[str, str, str], depth: float, length: int
) -> _Hidden:
    sentence, answer, question = (ids_of(part) for part in parts)
    stop, hay = ids_of(".\n"), ids_of(_HAY)
    room = length - len(sentence) - 2 * len(answer) - len(stop) - len(question)
    if room < 1:
        raise ValueError(
            f"length is {length}; needle, question and answer alone have {length - room} tokens.\n"
            "    Pass for example length=512."
        )
    hay = (hay * (room // len(hay) + 1))[:room]
    place = round(depth * room)
    above = [*hay[:place], *sentence]
    below = [*answer, *stop, *hay[place:], *question]
    ids = [*above, *below, *answer]
    return _Hidden(ids, len(above) + len(below) - 1, len(above), len(answer))


def _weights(
    model: nn.Module, ids: Tensor, query: int, keys: Mapping[str, int], count: int
) -> dict[str, dict[str, list[float]]]:
    """Return the mean weight from query + i to key + i, i < count: by layer, kind and head."""
    device = next((parameter.device for parameter in model.parameters()), ids.device)
    # Of these queries alone: the first one kept is row 0, and key + i lies on the diagonal at key.
    diagonals = {kind: Diagonal(key) for kind, key in keys.items()}
    wanted = slice(query, query + count)
    with (
        torch.inference_mode(),
        observe(model, queries=wanted, keep=[*diagonals.values()]) as seen,
    ):
        model(ids.to(device))
    return {
        layer.name: of_each_head(
            {kind: layer.reduce(diagonals[kind]).mean(-1) for kind in diagonals}
        )
        for layer in seen.layers
    }


def _mean(
    runs: Sequence[Mapping[str, Mapping[str, Sequence[float]]]],
) -> dict[str, dict[str, list[float]]]:
    """Return the mean of several runs of one model."""
    return {
        layer: {
            kind: [
                sum(of_head) / len(runs)
                for of_head in zip(*(run[layer][kind] for run in runs), strict=True)
            ]
            for kind in kinds
        }
        for layer, kinds in runs[0].items()
    }


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {kind_text(model)}; it must be a torch.nn.Module.\n"
            "    Pass what is called as model(ids); of a Pretrained that is its model."
        )


def _vocabulary(model: nn.Module) -> range:
    config: Any = getattr(model, "config", None)
    size = getattr(config.get_text_config() if config is not None else None, "vocab_size", None)
    if size is None:
        raise ValueError(
            f"vocabulary is None, and {type(model).__name__} has no config that says how many "
            "token ids there are.\n    Pass for example vocabulary=range(50_000)."
        )
    return range(size)


def _start(model: nn.Module) -> Sequence[int]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    first, size = getattr(text, "bos_token_id", None), getattr(text, "vocab_size", None)
    # A configuration that names a smaller vocabulary alone keeps the first token of its kind.
    if first is None or (size is not None and not 0 <= first < size):
        return []
    return [first]
