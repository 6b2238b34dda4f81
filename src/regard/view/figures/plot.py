"""Pictures for papers, drawn with matplotlib: one head, all heads, their entropy, parts of a text.

Each takes the axes to draw on, or makes new ones of a fitting size, and gives them back:
``regard.plot.map(A).figure.savefig("map.pdf")``. The scale is the page's own, from the ground of
the axes to ink; it ends at 100 % for every head, so that pictures can be compared.
"""

from collections.abc import Sequence
from operator import itemgetter
from os import PathLike
from statistics import fmean
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from regard.analysis.head_classes import Trial, classify, trials_of
from regard.analysis.head_kinds import KINDS, Head
from regard.analysis.span_shares import Shares
from regard.errors import check_index_bounds, check_path, kind_text
from regard.matrix.attention_matrix import AttentionMatrix
from regard.recording.layers import Layer
from regard.recording.recording import Recording, check_recording
from regard.reductions.sums import Pool
from regard.text.tokens import Token
from regard.training.run_table import SHOWN, read_history
from regard.view.figures import figure_style as style
from regard.view.figures import picture_overlay as overlay
from regard.view.row_steps import checked_tokens, one_head

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["entropy", "heads", "image", "map", "segments", "training"]

_MOST_CELLS = 512
_SMALL_MAP = 32
# From here on weights are small beside 100 %, and a linear scale is empty; as on the page.
_LONG = 48
# Inches.
_NUMBER, _LABEL, _MAP, _MAP_OF_A_HEAD, _SCORE_OF_A_HEAD = 0.36, 0.18, 4.5, 0.5, 0.34
_LEAST, _BESIDE = 2.3, 1.3
_FEW = 16


@torch.no_grad()
def map(  # noqa: A001 - what every map is called; the namespace tells it from the built-in
    matrix: AttentionMatrix,
    tokens: Sequence[Token | str] | None = None,
    key_tokens: Sequence[Token | str] | None = None,
    *,
    scale: style.Scale | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the weights of one head, queries down and keys across; a long matrix as block means.

    The matrix is never formed: beyond 512 tokens a cell is the mean weight of a block of tokens.

    Args:
        matrix: of one head, ``A[0, 3]``.
        tokens: one for each query; they label the axis while they fit beside each other.
        key_tokens: one for each key; the same tokens when left out.
        scale: "linear" or "log"; log for more than 48 keys when left out.
        ax: where to draw; new axes when left out.

    Returns:
        The axes.

    Raises:
        TypeError: matrix is no AttentionMatrix, or the tokens are a text.
        ValueError: it has several heads, the tokens are too few or too many, or another scale.
        RegardError: matplotlib is not installed.

    Example:
        >>> import torch, regard
        >>> A = regard.attend(torch.eye(3), torch.eye(3), mask=regard.Causal())
        >>> axes = regard.plot.map(A, ["Life", " is", " short"])
        >>> [label.get_text() for label in axes.get_xticklabels()]
        ['Life', 'is', 'short']
    """
    q_len, kv_len = one_head("plot.map()", matrix).shape
    queries = checked_tokens("tokens", tokens, "q_len", q_len)
    shared = tokens if key_tokens is None and q_len == kv_len else key_tokens
    keys = checked_tokens("key_tokens", shared, "kv_len", kv_len)
    chosen = _checked_scale(scale, kv_len)
    style.check_package("plot.map()")
    weights = matrix.pool(_MOST_CELLS, _MOST_CELLS).flatten(0, -2)
    unit = "share of a query's attention"
    if weights.shape != (q_len, kv_len):
        down, across = _cell(q_len), _cell(kv_len)
        each = f"{down} tokens each way" if down == across else f"{down} × {across} tokens"
        unit = f"mean share in cells of {each}"
    across, down = (style.room_for(token.text for token in side or ()) for side in (queries, keys))
    ax = style.axes_of(ax, across + _length_of(kv_len) + _BESIDE, down + _length_of(q_len))
    style.draw_cells(
        ax, style.Picture(weights, chosen, unit, (q_len, kv_len), style.log_floor(kv_len))
    )
    if weights.shape == (q_len, kv_len):
        style.write_shares(ax, weights)
    style.label_tokens(ax.xaxis, keys, kv_len, "key")
    style.label_tokens(ax.yaxis, queries, q_len, "query")
    return ax


@torch.no_grad()
def heads(
    seen: Recording, *trials: Trial, score: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Every head of a recording, layers down and heads across: small maps, or a score as colour.

    Args:
        seen: the recording, of whatever length.
        trials: what runs made for it show, as for ``seen.heads``: scores of more kinds.
        score: None for a small map of each head; the name of a kind, as "previous token", for the
            score of that kind; "kind" for the score of the kind that each head is. Beside a score
            stands the letter of the head's kind, a capital where it is that strongly.
        ax: where to draw; new axes when left out.

    Returns:
        The axes.

    Raises:
        TypeError: seen is no recording, or a trial is none.
        ValueError: it has no layers, or a score that no head has; the message names those that were
            measured.
        RegardError: matplotlib is not installed, or query and key were not kept.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 4, 1), torch.zeros(2, 4, 1))
        >>> axes = regard.plot.heads(regard.Recording({"layer": even}), score="kind")
        >>> [text.get_text() for text in axes.texts]
        ['U', 'U']
    """
    _check_recording("plot.heads()", seen)
    style.check_package("plot.heads()")
    grid = _Grid(seen.layers)
    rows, columns = grid.shape
    if score is None:
        found, side, picture = (), _MAP_OF_A_HEAD, _small_maps(seen.layers, grid)
    else:
        every = (*trials_of(seen), *trials)
        found = classify(seen.layers, seen.query_tokens, seen.key_tokens, trials=every)
        side, picture = _SCORE_OF_A_HEAD, _scores(found, score, grid)
    ax = style.axes_of(ax, max(_LEAST, side * columns) + _BESIDE, max(_LEAST, side * rows) + 0.5)
    style.draw_cells(ax, picture)
    for head in found:
        row, column = grid.place(head)
        style.write_on(ax, row, column, float(picture.weights[row, column]), head.letter)
    for at in (n - 0.5 for n in range(1, rows)):
        ax.axhline(at, color=style.GREY, linewidth=0.3)
    for at in (n - 0.5 for n in range(1, columns)):
        ax.axvline(at, color=style.GREY, linewidth=0.3)
    style.label_places(ax.xaxis, grid.heads, "head")
    style.label_places(ax.yaxis, grid.layers, "layer")
    if found:
        present = {head.kind for head in found}
        style.explain_letters(
            ax, {kind.letter: kind.name for kind in KINDS if kind.name in present}
        )
    return ax


@torch.no_grad()
def entropy(seen: Recording, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the mean entropy of the rows of each head in nats, layer by layer.

    Each head is a dot; a line joins the means of the layers. The head that looks most widely and
    the one that looks most narrowly are named.

    Args:
        seen: the recording; kept answers to ``regard.Entropy()`` are enough.
        ax: where to draw; new axes when left out.

    Returns:
        The axes.

    Raises:
        TypeError: seen is no recording.
        ValueError: it has no layers.
        RegardError: matplotlib is not installed, or no layer can answer.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 4, 1), torch.zeros(2, 4, 1))
        >>> axes = regard.plot.entropy(regard.Recording({"layer": even}))
        >>> axes.get_ylabel()
        'mean entropy of a row, nats'
    """
    _check_recording("plot.entropy()", seen)
    style.check_package("plot.entropy()")
    answers = seen.entropy()
    dots: list[tuple[int, float, str]] = []
    for index, layer in enumerate(seen.layers):
        if layer.name in answers:
            place = layer.model_index(index)
            values = _of_each_head(answers[layer.name].mean(-1), layer, 0)
            dots += [
                (place, float(value), f"L{place}H{layer.head(head)}")
                for head, value in enumerate(values)
            ]
    places = sorted({place for place, _, _ in dots})
    means = [fmean(value for at, value, _ in dots if at == place) for place in places]
    ax = style.axes_of(ax, max(3.2, 0.2 * len(places) + 1.5), 3.0)
    colours = style.ramp(ax)
    ax.plot(places, means, color=colours(0.4), linewidth=1.5, zorder=1)
    ax.scatter(
        [dot[0] for dot in dots], [dot[1] for dot in dots], s=14, color=colours(0.75), zorder=2
    )
    for place, value, name in (max(dots, key=itemgetter(1)), min(dots, key=itemgetter(1))):
        style.write_beside(ax, place, value, name, colours(0.75))
    style.write_beside(ax, places[-1], means[-1], "mean", colours(0.4))
    style.keep_quiet(ax)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_ylim(bottom=0)
    style.number(ax.xaxis, "layer")
    ax.set_ylabel("mean entropy of a row, nats")
    return ax


@torch.no_grad()
def image(
    seen: Recording,
    layer: str | int,
    head: int | None = None,
    *,
    query: int | str | Sequence[int] | None = None,
    grid: int | None = None,
    picture: int = 0,
    without: Sequence[int | str] = (),
    smooth: bool = False,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the attention to the parts of a picture, over the picture in grey.

    Each part has one colour. Thin lines between the parts show how finely the model looks.

    Args:
        seen: a recording with pictures; see ``Recording.with_pictures``.
        layer: the layer, as in ``Recording.image``.
        head: the head; the mean over all when left out.
        query: the query or queries, as in ``Recording.image``; the mean over all when left out.
        grid: the grid of the layer to draw. It is needed if grids overlap, as those of a thumbnail
            and of tiles do. All grids of the picture are drawn when left out.
        picture: the index of the picture to draw; ignored with a grid.
        without: keys to ignore, as in ``Recording.image``.
        smooth: if True, interpolate between the middles of the parts of one grid. The legend says
            so, because the model sees no finer than its parts.
        ax: where to draw; new axes when left out.

    Returns:
        The axes, in pixels of the picture.

    Raises:
        TypeError: seen is no recording.
        IndexError: the layer, head, query, grid or picture is out of range.
        ValueError: grids overlap, or several of them are to be smooth.
        RegardError: matplotlib is not installed, or the layer has no grid.

    Example:
        >>> import torch, regard
        >>> from PIL import Image
        >>> x = torch.zeros(1, 2, 5, 4)
        >>> seen = regard.Recording({"layer": regard.attend(x, x)})
        >>> seen = seen.with_pictures([Image.new("RGB", (64, 64))], regard.grid(range(1, 5), 2, 2))
        >>> regard.plot.image(seen, "layer", query=0).get_title(loc="left")
        '80 % of the attention lies on the picture'
    """
    _check_recording("plot.image()", seen)
    style.check_package("plot.image()")
    values = seen.image(layer, head, query=query, grid=grid, without=without).flatten()
    grids = seen.layer_grids(layer)
    if grid is not None:
        grids = (grids[grid],)
        picture = grids[0].picture
    shown = seen.pictures[check_index_bounds(picture, len(seen.pictures), 0)]
    parts = cast(Sequence[Tensor], values.split([len(each.tokens) for each in grids]))
    chosen = [each for each in zip(grids, parts, strict=True) if each[0].picture == picture]
    grids, values = [each for each, _ in chosen], torch.cat([part for _, part in chosen])
    boxes = overlay.boxes_in(shown, grids)
    if smooth and len(grids) > 1:
        raise ValueError(
            f"smooth is True and the picture has {len(grids)} grids; only one can be smooth.\n"
            "    Choose one of them, grid=0, or leave out smooth."
        )
    ax = style.axes_of(ax, _MAP + _BESIDE, max(1.0, _MAP * min(2, shown.height / shown.width)))
    overlay.draw_grey(ax, shown)
    unit = "share of the attention, for each part"
    if smooth:
        box = grids[0].box or (0, 0, shown.width, shown.height)
        table = values.view(grids[0].rows, grids[0].columns)
        overlay.draw_smooth(ax, box, table, f"{unit}\ninterpolated between their middles")
    else:
        overlay.draw_parts(ax, boxes, values, unit)
    share = f"{100 * float(values.sum()):.3g} % of the attention lies on the picture"
    ax.set_title(share, fontsize="small", color=style.GREY, loc="left")
    return ax


def segments(shares: Shares, *, ax: "Axes | None" = None) -> "Axes":
    """Draw how much the parts of a text attend to each other, as a mean over layers and heads.

    For one layer ask that layer alone: ``regard.segment_shares(seen.part([3]), parts)``.

    Args:
        shares: from ``regard.segment_shares(seen, parts)``.
        ax: where to draw; new axes when left out.

    Returns:
        The axes.

    Raises:
        TypeError: shares are none.
        RegardError: matplotlib is not installed.

    Example:
        >>> import torch, regard
        >>> even = regard.attend(torch.zeros(2, 4, 2), torch.zeros(2, 4, 2))
        >>> seen = regard.Recording({"layer": even})
        >>> shares = regard.segment_shares(seen, {"question": (0, 1), "text": (1, 4)})
        >>> axes = regard.plot.segments(shares)
        >>> [text.get_text() for text in axes.texts]
        ['25', '75', '25', '75']
    """
    if not isinstance(shares, Shares):
        raise TypeError(
            f"shares is {kind_text(shares)}; plot.segments() draws Shares.\n"
            "    Pass regard.segment_shares(seen, parts), where parts maps names to token spans."
        )
    style.check_package("plot.segments()")
    layers, num_heads = shares.weights.shape[:2]
    total = shares.total()
    rows, columns = total.shape
    unit = f"share, mean of {layers} × {num_heads} heads"
    unit += "\nwithout sinks" if shares.sinks else ""
    width, height = (max(_LEAST, 2 * _NUMBER * length) for length in (columns, rows))
    across, down = style.room_for(shares.queries), style.room_for(shares.keys)
    ax = style.axes_of(ax, across + width + _BESIDE, down + 0.7 * height)
    style.draw_cells(ax, style.Picture(total, "linear", unit, (rows, columns)))
    style.write_shares(ax, total)
    style.label_names(ax.xaxis, shares.keys)
    style.label_names(ax.yaxis, shares.queries)
    ax.set_xlabel("to")
    ax.set_ylabel("from")
    return ax


def training(
    run: str | PathLike[str], statistic: str = "normalized_entropy", *, ax: "Axes | None" = None
) -> "Axes":
    """Draw one statistic of every head over the steps of a training, heads down and steps across.

    Args:
        run: the folder of a ``regard.Monitor``.
        statistic: the name of a statistic.
        ax: where to draw; new axes when left out.

    Returns:
        The axes.

    Raises:
        ValueError: the run does not have this statistic.
        RegardError: matplotlib is not installed, or the folder is not of a monitor.

    Example:
        >>> import torch, regard, regard.nn
        >>> model = regard.nn.SelfAttention(8, 2)
        >>> with regard.Monitor(model, "run", every=1) as monitor:
        ...     for step in range(3):
        ...         with monitor(step):
        ...             output = model(torch.zeros(1, 4, 8))
        >>> regard.plot.training("run").get_xlabel()
        'step'
    """
    style.check_package("plot.training()")
    history = read_history(check_path(run), statistic)
    rows = len(history.heads)
    ax = style.axes_of(ax, 6.0, min(8.0, max(_LEAST, 0.12 * rows + 0.8)))
    unit = f"{SHOWN[statistic]}: {statistic.replace('_', ' ')}"
    unit += "" if history.rows is None else f"\nlast {history.rows:,} rows"
    style.draw_numbers(ax, history.values, unit)
    layers = [layer for layer, _ in history.heads]
    starts = [row for row in range(rows) if row == 0 or layers[row] != layers[row - 1]]
    for start in starts[1:]:
        ax.axhline(start - 0.5, color=style.GREY, linewidth=0.3)
    names = [f"L{layer}H{head}" for layer, head in history.heads]
    style.label_places(ax.yaxis, names, "layer and head", starts)
    style.label_places(ax.xaxis, [f"{step:,}" for step in history.steps], "step")
    return ax


class _Grid:
    """The position of each layer and head in a grid.

    Attributes:
        layers: the place in the model of each row's layer.
        heads: of each column's head.
        rows: for each layer of the recording the columns of its heads.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        named = [[layer.head(head) for head in range(_num_heads(layer))] for layer in layers]
        self.layers = [layer.model_index(index) for index, layer in enumerate(layers)]
        self.heads = sorted({head for names in named for head in names})
        self.rows = [[self.heads.index(head) for head in names] for names in named]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.layers), len(self.heads)

    def place(self, head: Head) -> tuple[int, int]:
        """Return the row and the column of a head."""
        return self.layers.index(head.layer), self.heads.index(head.head)


def _cell(length: int) -> str:
    """Return how many tokens a cell covers along one axis."""
    least, rest = divmod(length, min(length, _MOST_CELLS))
    return f"{least} to {least + 1}" if rest else str(least)


def _small_maps(layers: Sequence[Layer], grid: _Grid) -> style.Picture:
    """One image of all of them; what the recording does not have is empty."""
    side = _SMALL_MAP
    whole = torch.zeros(len(grid.layers) * side, len(grid.heads) * side, device="cpu")
    for row, (layer, columns) in enumerate(zip(layers, grid.rows, strict=True)):
        means = _of_each_head(cast(Tensor, layer.reduce(Pool(side, side))), layer, 2).float()
        # A text shorter than the map has larger cells.
        larger = torch.nn.functional.interpolate(means[None], (side, side))[0]
        for column, cells in zip(columns, larger, strict=True):
            whole[side * row : side * (row + 1), side * column : side * (column + 1)] = cells
    keys = max(layer.shape[-1] for layer in layers)
    scale = _checked_scale(None, keys)
    return style.Picture(
        whole, scale, "share of a query's attention", grid.shape, style.log_floor(keys)
    )


def _scores(found: Sequence[Head], score: str, grid: _Grid) -> style.Picture:
    measured = {name for head in found for name in head.scores}
    if score != "kind" and score not in measured:
        names = ", ".join(
            repr(name)
            for name in ("kind", *(kind.name for kind in KINDS))
            if name in {"kind", *measured}
        )
        raise ValueError(
            f"score is {score!r}; of these heads {names} were measured.\n"
            "    Pass a trial, regard.trials.repeated_tokens(model), for kinds that need one."
        )
    cells = torch.zeros(grid.shape, device="cpu")
    for head in found:
        value = head.score if score == "kind" else head.scores.get(score, 0.0)
        cells[grid.place(head)] = value
    unit = "score of the head's kind" if score == "kind" else f"score as {score} head"
    return style.Picture(cells, "linear", unit, grid.shape)


def _of_each_head(answer: Tensor, layer: Layer, axes: int) -> Tensor:
    """Reshape an answer to (num_heads, ...), with the mean over several texts."""
    tail = answer.shape[answer.ndim - axes :]
    return answer.reshape(-1, _num_heads(layer), *tail).mean(0)


def _num_heads(layer: Layer) -> int:
    return layer.shape[-3] if len(layer.shape) > 2 else 1


def _length_of(tokens: int) -> float:
    """Inches for an axis: room for numbers, then for labels, while that is a picture, no poster."""
    if tokens > 64:
        return _MAP
    return max(_LEAST, (_NUMBER if tokens <= _FEW else _LABEL) * tokens)


def _checked_scale(scale: style.Scale | None, keys: int) -> style.Scale:
    if scale not in (None, "linear", "log"):
        raise ValueError(
            f"scale is {scale!r}; it must be 'linear' or 'log'.\n"
            "    Leave it out for linear up to 48 keys and log beyond."
        )
    return scale or ("log" if keys > _LONG else "linear")


def _check_recording(call: str, seen: object) -> None:
    if not check_recording("seen", seen).layers:
        raise ValueError(
            f"seen has no layers; {call} draws at least one.\n"
            "    Record attention with regard.observe(model), or take a part that has layers."
        )
