"""Runs on synthetic texts that measure the abilities of heads: to copy, repeat and retrieve.

In an ordinary text, an induction head mostly attends to the first token. A trial runs a model on a
text with something to find, and measures for each query the weight that defines the kind of head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.analysis.head_classes import Trial
from regard.analysis.head_kinds import DUPLICATE, INDUCTION, RETRIEVAL
from regard.analysis.head_survey import of_each_head
from regard.capture.observer import observe
from regard.errors import check_count
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
    """Run a model on repeated random tokens, to measure induction and duplicate-token heads.

    A text is n different random tokens, repeated once. For a query in the second half, the same
    token is n positions before. The weight on that token is the duplicate-token score. The weight
    on the next token, n - 1 positions before, is the induction score. Both are means over the
    second half and all texts. Since the n tokens differ, only the repetition can be found.

    Args:
        model: a language model in ``eval()`` mode; it is called as ``model(ids)``.
        vocabulary: the token ids to draw from. The default is all token ids of a Hugging Face
            model.
        start: the token ids before the text, as in training. The default is the ``bos_token_id``
            of a Hugging Face model, if its vocabulary contains it.
        length: n.
        texts: the number of texts, which run in one batch.
        seed: the seed of the random numbers.

    Returns:
        The scores, for ``regard.heads(seen, trial)``.

    Raises:
        TypeError: length or texts is not a whole number.
        ValueError: length is below 2, or there are fewer token ids.
        RegardError: no attention was recorded.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), regard.nn.SelfAttention(8))
        >>> trial = regard.trials.repeated_tokens(model, vocabulary=range(100))
        >>> list(trial.scores["1"])
        ['induction', 'duplicate token']

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads" (prefix matching); the
        offsets are those of TransformerLens.
    """
    check_count("length", length)
    check_count("texts", texts)
    vocabulary = _vocabulary(model) if vocabulary is None else vocabulary
    if not 2 <= length <= len(vocabulary):
        raise ValueError(
            f"length is {length}; it must be from 2 to the {len(vocabulary)} token ids that there "
            "are.\n    Random tokens are drawn once each."
        )
    generator = torch.Generator().manual_seed(seed)
    ids_of_words = torch.tensor(vocabulary, device="cpu")
    words = [
        ids_of_words[torch.randperm(len(vocabulary), generator=generator, device="cpu")[:length]]
        for _ in range(texts)
    ]
    before = torch.tensor(
        _start(model) if start is None else list(start), dtype=torch.long, device="cpu"
    )
    ids = torch.stack([torch.cat((before, text, text)) for text in words])
    keys = {INDUCTION.name: len(before) + 1, DUPLICATE.name: len(before)}
    return Trial(_weights(model, ids, len(before) + length, keys, length))


def repetition(model: nn.Module, *, limit: int, texts: int = 4) -> list[Trial]:
    """Run ``repeated_tokens`` on a Hugging Face model, with at most 64 tokens that fit its limit.

    Args:
        model: a language model in ``eval()`` mode.
        limit: the maximum number of tokens that the model reads.
        texts: the number of random texts.

    Returns:
        The trial; an empty list if the model's limit or vocabulary is too small.

    Example:
        >>> from regard.models.pretrained import Pretrained
        >>> from regard.models.trials import repetition
        >>> len(repetition(Pretrained.load().model, limit=128, texts=1))
        1
    """
    # A third of the limit leaves room for the text twice, and for the tokens before it.
    length = min(64, limit // 3, len(_vocabulary(model)))
    return [repeated_tokens(model, length=length, texts=texts)] if length >= 2 else []


def needle(
    model: nn.Module,
    tokenizer: Callable[..., Mapping[str, Any]],
    *,
    start: Sequence[int] | None = None,
    length: int = 512,
    depths: Sequence[float] = (0.2, 0.5, 0.8),
) -> Trial:
    """Run a model on long texts with a hidden sentence, to measure retrieval heads.

    Each of three sentences, the needles, is inserted at each depth of an unrelated text. The text
    is followed by a question in other words, and by the answer in the tokens of the needle. Each
    token of the answer is predicted from the token before it. The score is the weight from that
    token to the same answer token in the needle. It is the mean over the answer and all runs. This
    definition is ours: Wu et al. count how often this weight is the largest of its row while the
    model generates.

    Args:
        model: a language model in ``eval()`` mode; it is called as ``model(ids)``.
        tokenizer: a Hugging Face tokenizer; it is called as
            ``tokenizer(text, add_special_tokens=False)``.
        start: the token ids before the text, as in ``repeated_tokens``.
        length: the number of tokens of the whole text, with needle, question and answer.
        depths: the positions of the needle, from 0 (the beginning of the text) to 1.

    Returns:
        The scores, for ``regard.heads(seen, trial)``.

    Raises:
        TypeError: length is not a whole number.
        ValueError: length is too small for the text, or a depth is not from 0 to 1.
        RegardError: no attention was recorded.

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
    check_count("length", length)
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"depths has {list(depths)}; each must be from 0 to 1, and there must be one.\n"
            "    Pass for example depths=[0.5]."
        )

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    before = list(_start(model) if start is None else start)
    runs: dict[str, list[list[float]]] = {}
    for parts in _NEEDLES:
        for depth in depths:
            text = _hidden(ids_of, parts, depth, length - len(before))
            query, key = len(before) + text.query, len(before) + text.key
            ids = torch.tensor([[*before, *text.ids]], device="cpu")
            scores = _weights(model, ids, query, {RETRIEVAL.name: key}, text.answer_len)
            for layer, kinds in scores.items():
                runs.setdefault(layer, []).append(kinds[RETRIEVAL.name])
    means = {
        layer: [sum(of_head) / len(of_head) for of_head in zip(*weights, strict=True)]
        for layer, weights in runs.items()
    }
    return Trial({layer: {RETRIEVAL.name: mean} for layer, mean in means.items()})


class _Hidden(NamedTuple):
    """A text with a needle, in which query + i predicts the token at key + i, i < answer_len."""

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
    before = round(depth * room)
    above = [*hay[:before], *sentence]
    below = [*answer, *stop, *hay[before:], *question]
    ids = [*above, *below, *answer]
    return _Hidden(ids, len(above) + len(below) - 1, len(above), len(answer))


def _weights(
    model: nn.Module, ids: Tensor, query: int, keys: Mapping[str, int], count: int
) -> dict[str, dict[str, list[float]]]:
    """Return the mean weight from query + i to key + i, i < count: by layer, kind and head."""
    device = next((parameter.device for parameter in model.parameters()), ids.device)
    # Only these queries are recorded. Query query + i is row i, so key + i is on diagonal ``key``.
    diagonals = {kind: Diagonal(key) for kind, key in keys.items()}
    queries = slice(query, query + count)
    watching = observe(model, queries=queries, keep=[*diagonals.values()])
    with torch.inference_mode(), watching as seen:
        model(ids.to(device))
    return {
        layer.name: of_each_head(
            {kind: layer.reduce(diagonals[kind]).mean(-1) for kind in diagonals}
        )
        for layer in seen.layers
    }


def _vocabulary(model: nn.Module) -> range:
    size = getattr(_text_config(model), "vocab_size", None)
    if size is None:
        raise ValueError(
            f"vocabulary is None, and {type(model).__name__} has no config that says how many "
            "token ids there are.\n    Pass for example vocabulary=range(50_000)."
        )
    return range(size)


def _start(model: nn.Module) -> Sequence[int]:
    text = _text_config(model)
    first, size = getattr(text, "bos_token_id", None), getattr(text, "vocab_size", None)
    # A configuration with a smaller vocabulary may still have the default bos_token_id.
    if first is None or (size is not None and not 0 <= first < size):
        return []
    return [first]


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return None if config is None else config.get_text_config()
