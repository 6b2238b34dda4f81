"""The mistakes that people make in attention code, as data: what each is, and how to mend it.

Each has been made in public, by people who teach attention among others; ``sources`` says where.
Wrong attention trains, so that no error message and no loss curve shows it.
"""

from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["fault", "difference", "note"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake that can be told from outside or from the operations.

    Attributes:
        name: what findings call it.
        sentence: what such code does, with what attention does instead.
        mending: what to write instead, in a line or two.
        sources: where others made it.
        severity: ``fault`` where the numbers are wrong, ``difference`` where somebody may mean them
            so, ``note`` where they are right.
        number: its place in the catalogue, from 1; 0 for a note that is no mistake of its own.
    """

    name: str
    sentence: str
    mending: str
    sources: tuple[str, ...] = ()
    severity: Severity = "fault"
    number: int = 0


_IN_ORDER = (
    Fault(
        "heads-merged-without-transpose",
        "The heads are merged by a reshape without a transpose: parts of different tokens are "
        "glued together where the heads of one token belong side by side.",
        "output = output.transpose(-3, -2).flatten(-2)  # (..., heads, tokens, dim) to "
        "(..., tokens, heads · dim)",
        (
            "jsbaan/transformer-from-scratch PR 6",
            "BangLiu/QANet-PyTorch#2",
            "pytorch/opacus PR 825",
        ),
    ),
    Fault(
        "heads-split-without-transpose",
        "The heads are split by view(batch, heads, tokens, dim): each head gets some tokens whole, "
        "where it should get some columns of every token.",
        "x = x.view(batch, tokens, heads, dim).transpose(1, 2)",
        (
            "hyunwoongko/transformer#15",
            "FuxiCTR#30",
            "jadore801120/attention-is-all-you-need-pytorch#177",
        ),
    ),
    Fault(
        "softmax-wrong-axis",
        "The softmax runs over another axis than the keys: the weights of a query do not sum to 1.",
        "weights = scores.softmax(dim=-1)  # scores: (..., queries, keys)",
        ("labml#146", "PyTorch-NLP#2", "fastNLP#254"),
    ),
    Fault(
        "scale-by-embed-dim",
        "The scores are divided by sqrt(embed_dim) where each head is only head_dim wide: the "
        "weights are flatter than attention's.",
        "scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # the width of one head",
        ("karpathy/ng-video-lecture PR 6", "lucidrains/vit-pytorch#65"),
    ),
    Fault(
        "no-scale",
        "The scores are not divided by sqrt(head_dim): the weights are sharper than attention's, "
        "the more the wider the heads.",
        "scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5",
        ("tiny-transformers#71",),
    ),
    Fault(
        "wrong-scale",
        "The scores are scaled by another number than 1/sqrt(head_dim).",
        "scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5",
        ("krasserm/perceiver-io#9", "tt-metal PR 56789"),
    ),
    Fault(
        "mask-inverted",
        "The mask means the opposite of what it says: what may be attended to is shut out, and the "
        "rest is attended to.",
        "scores = scores.masked_fill(~mask, float('-inf'))  # where mask is True = may attend",
        ("rasbt/LLMs-from-scratch#1061", "pytorch PR 170415"),
    ),
    Fault(
        "mask-added-as-numbers",
        "The mask's 0 and 1 are added to the scores: what is forbidden is still attended to.",
        "scores = scores.masked_fill(mask == 0, float('-inf'))",
        ("pytorch#21518",),
    ),
    Fault(
        "mask-after-softmax",
        "The mask is applied after the softmax: the rows of weights sum to less than 1.",
        "weights = scores.masked_fill(~mask, float('-inf')).softmax(dim=-1)",
        ("timm PR 2236",),
    ),
    Fault(
        "mask-fill-value",
        "What is forbidden is filled with a number that does not forbid it: +inf gives NaN, a "
        "small number still lets some weight through, and -1e9 does not exist in half precision.",
        "scores = scores.masked_fill(~mask, float('-inf'))",
        ("memory-compressed-attention#2", "IBM/pytorch-seq2seq#191"),
    ),
    Fault(
        "causal-off-by-one",
        "The diagonal of the causal mask is off by one: a token does not attend to itself, or it "
        "attends to the next one as well.",
        "mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()  # True = may attend",
        ("GPT-SoVITS#965", "pytorch/tutorials#2250"),
    ),
    Fault(
        "not-causal",
        "Tokens attend to the tokens after them, though the attention is meant to be causal.",
        "scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), "
        "float('-inf'))",
        ("keras#23038", "xformers#103"),
    ),
    Fault(
        "causal-top-left",
        "With fewer queries than keys the causal mask starts at the top left: the last query, "
        "which follows all the keys, attends to the first few only.",
        "mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)",
        ("pytorch#103082", "mlx#2835", "flash-attention#1778"),
    ),
    Fault(
        "nan-rows",
        "A row with nothing to attend to gives NaN, which spreads to all that reads it.",
        "weights = scores.softmax(dim=-1).nan_to_num()  # or let such a row attend to itself",
        ("pytorch#103749", "transformers#38690"),
    ),
    Fault(
        "padding-on-queries",
        "The padding mask shuts out rows, the queries, where it should shut out columns, the "
        "keys: real tokens attend to padding.",
        "mask = padding[:, None, None, :]  # (batch, 1, 1, keys): the last axis is the keys'",
        ("hyunwoongko/transformer PR 40", "bentrevett#96"),
    ),
    Fault(
        "mask-unused",
        "The mask changes nothing: what it forbids is attended to.",
        "scores = scores.masked_fill(~mask, float('-inf'))  # and use the result",
        ("OpenNMT-py#30", "esm#299"),
    ),
    Fault(
        "mask-of-another-sample",
        "The mask is laid along the wrong axis or taken from one sample for all: a sample's mask "
        "shuts out keys of another sample or of the wrong head.",
        "mask = mask[:, None, None, :]  # (batch, 1, 1, keys): batch first",
        ("mlx-lm PR 1903", "candle#3582"),
    ),
    Fault(
        "attends-across-batch",
        "The samples of a batch attend to each other or move each other: the axis of the batch is "
        "taken for the tokens', or a mean runs over it.",
        "scores = query @ key.transpose(-2, -1)  # (batch, tokens, dim); nn.MultiheadAttention and "
        "nn.TransformerEncoderLayer take batch_first=True",
        ("OmDet#19", "IBM/TabFormer PR 14"),
    ),
    Fault(
        "dropout-in-eval",
        "Dropout stays active in eval mode: two equal calls give two outputs.",
        "dropout_p = self.dropout if self.training else 0.0",
        ("timm PR 1978", "pytorch#124464"),
    ),
    Fault(
        "heads-share-projection",
        "All heads share one small projection: each part of the embedding is projected by the same "
        "matrix.",
        "self.query = nn.Linear(embed_dim, embed_dim)  # and split into heads after it",
        ("pbloem/former#13",),
    ),
    Fault(
        "wrong-projection",
        "Query, key and value are mixed up before the softmax: the scores are not query times key.",
        "scores = query @ key.transpose(-2, -1)",
        ("Khaliladib11#1", "deep-ml problem 53"),
    ),
    Fault(
        "wrong-values",
        "The weights are multiplied with another tensor than the values.",
        "output = weights @ value",
        ("SeekDeeper#9",),
    ),
    Fault(
        "kv-heads-repeated-in-wrong-order",
        "The key and value heads of grouped-query attention are repeated as 0 1 0 1, where "
        "neighbouring query heads share one: 0 0 1 1.",
        "key = key.repeat_interleave(groups, dim=1)",
        ("transformers PR 41423", "prime-rl PR 2681"),
    ),
    Fault(
        "heads-and-tokens-exchanged",
        "The axes of heads and tokens are exchanged: the heads of a token attend to each other, "
        "and no token attends to another.",
        "query = query.transpose(1, 2)  # (batch, tokens, heads, dim) to "
        "(batch, heads, tokens, dim)",
        ("xformers#922", "xformers#967"),
    ),
    Fault(
        "keys-not-transposed",
        "Queries are multiplied with keys that are not transposed: as they are, which only works "
        "where there are as many tokens as columns, or viewed in the other shape, which leaves "
        "every number where it was.",
        "scores = query @ key.transpose(-2, -1)",
    ),
    Fault(
        "transpose-of-batch",
        "The keys are transposed in a way that holds for one sentence only: .T turns all the axes "
        "of a batch round, and .t() refuses one.",
        "scores = query @ key.transpose(-2, -1)",
        (),
        "note",
    ),
    Fault(
        "values-mixed-along-wrong-axis",
        "The weights multiply the columns of the values, or the sum runs over the wrong axis: "
        "the output is no average of the rows of the values.",
        "output = weights @ value  # (queries, keys) @ (keys, dim)",
    ),
    Fault(
        "no-positions",
        "No position enters: tokens in another order give the same outputs in that order. Right "
        "where positions are added before the layer.",
        "x = x + positions  # before the first layer: regard.nn.SinusoidalPositions",
        (),
        "note",
    ),
)

FAULTS = tuple(replace(entry, number=number) for number, entry in enumerate(_IN_ORDER, 1))
"""The number of a mistake is public, so a new one goes to the end."""

NOTES = (
    Fault(
        "unbatched-only",
        "It takes one sentence, (tokens, dim), and no batch of them.",
        "Count axes from the end, -2 and -1, so that any axes before them are the batch's.",
        (),
        "note",
    ),
)

_BY_NAME = {entry.name: entry for entry in (*FAULTS, *NOTES)}


def fault(name: str) -> Fault:
    """Return the entry of that name.

    Raises:
        KeyError: there is none.
    """
    return _BY_NAME[name]


def is_mistake(name: str) -> bool:
    """Return True if an entry has that name."""
    return name in _BY_NAME
