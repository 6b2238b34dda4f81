"""regard.plot: pictures show the library's numbers on one scale, and tokens as what they are."""

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy
import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

import regard
from cases import in_turn
from pages import evaluated
from regard.analysis.head_classes import Trial
from regard.analysis.head_kinds import KINDS
from regard.errors import RegardError
from regard.view.figures.figure_style import axes_of, log_floor, ramp

WORDS = ["[CLS]", " eat", " dessert", " first", "[SEP]"]


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """Drawn without a window."""
    with matplotlib.rc_context():
        matplotlib.use("agg")
        yield


def head(q_len: int, kv_len: int | None = None, **options: Any) -> regard.AttentionMatrix:
    torch.manual_seed(1)
    return regard.attend(
        2 * torch.randn(1, 1, q_len, 8), 2 * torch.randn(1, 1, kv_len or q_len, 8), **options
    )


def recording(layers: int = 2, heads: int = 3, tokens: int = 5) -> regard.Recording:
    torch.manual_seed(2)
    matrices = {
        f"layer {place}": regard.attend(*(2 * torch.randn(2, 1, heads, tokens, 8)))
        for place in range(layers)
    }
    return regard.Recording(matrices, query_tokens=WORDS if tokens == len(WORDS) else None)


def cells(ax: Axes) -> torch.Tensor:
    return torch.tensor(numpy.asarray(ax.get_images()[0].get_array()))


def legend(ax: Axes) -> str:
    return ax.figure.axes[-1].get_ylabel()


def labels(ax: Axes, side: str) -> list[str]:
    return [label.get_text() for label in getattr(ax, f"get_{side}ticklabels")()]


def drawn(ax: Axes, kind: str = "svg") -> bytes:
    file = io.BytesIO()
    ax.figure.savefig(file, format=kind)
    return file.getvalue()


# The scale


def test_the_scale_is_the_pages_own() -> None:
    source = 'import { ramp } from "./maths/colours";'
    light, dark = evaluated(source, "[ramp('light', '#ffffff').css, ramp('dark', '#000000').css]")
    for css, ground in ((light, "white"), (dark, "black")):
        ax = axes_of(None, 2, 2)
        ax.set_facecolor(ground)
        for step in range(6):
            numbers = [int(part) for part in re.findall(r"\d+", css[51 * step])]
            assert to_hex(ramp(ax)(step / 5)) == "#{:02x}{:02x}{:02x}".format(*numbers)


def test_it_gets_darker_all_the_way_so_that_no_colour_sight_is_needed() -> None:
    steps = ramp(axes_of(None, 2, 2))(numpy.linspace(0, 1, 64))[:, :3]
    lightness = steps @ [0.2126, 0.7152, 0.0722]
    assert (numpy.diff(lightness) < 0).all()


@pytest.mark.parametrize(
    ("tokens", "scale", "limits"),
    [
        pytest.param(5, "linear", (0.0, 1.0), id="short"),
        pytest.param(48, "linear", (0.0, 1.0), id="at the limit"),
        pytest.param(49, "log", (0.01, 1.0), id="beyond it"),
        pytest.param(700, "log", (log_floor(700), 1.0), id="long"),
    ],
)
def test_every_head_of_a_length_has_one_scale_and_the_legend_says_which(
    tokens: int, scale: str, limits: tuple[float, float]
) -> None:
    ax = regard.plot.map(head(tokens))
    assert legend(ax).endswith(f"\n{scale}")
    assert ax.get_images()[0].get_clim() == limits


# One head


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 11), (101, 7)], ids=str)
def test_a_map_shows_the_weights(shape: tuple[int, int]) -> None:
    A = head(*shape)
    ax = regard.plot.map(A, scale="linear")
    torch.testing.assert_close(cells(ax), A.to_dense()[0, 0].double())


def test_a_long_map_shows_means_of_cells_and_never_forms_the_matrix() -> None:
    A = head(1100, mask=regard.Causal())
    ax = regard.plot.map(A, scale="linear")
    torch.testing.assert_close(cells(ax), A.pool(512, 512)[0, 0].double())
    assert legend(ax) == "mean share in cells of 2 to 3 tokens each way\nlinear"
    assert ax.get_images()[0].get_extent() == [-0.5, 1099.5, 1099.5, -0.5]


def test_what_lies_below_the_log_scale_is_ground() -> None:
    ax = regard.plot.map(head(60, mask=regard.Causal()))
    image = ax.get_images()[0]
    assert to_hex(image.get_cmap()(image.norm(cells(ax)[0, 1].item()))) == "#ffffff"


def test_tokens_label_both_axes_where_they_fit() -> None:
    ax = regard.plot.map(head(5), [regard.Token("[CLS]", special=True), *WORDS[1:]])
    assert labels(ax, "x") == labels(ax, "y") == ["[CLS]", "eat", "dessert", "first", "[SEP]"]
    colours = [label.get_color() for label in ax.get_xticklabels()]
    assert colours[0] != colours[1]


def test_another_text_of_keys_has_its_own_tokens() -> None:
    ax = regard.plot.map(head(2, 3), ["a", "b"], ["c", "d", "e"])
    assert (labels(ax, "y"), labels(ax, "x")) == (["a", "b"], ["c", "d", "e"])


def test_where_tokens_do_not_fit_their_places_stand() -> None:
    ax = regard.plot.map(head(300), ["word"] * 300)
    assert "word" not in labels(ax, "x")
    assert ax.get_xlabel() == "key position"


def test_a_small_map_has_its_numbers() -> None:
    A = regard.AttentionMatrix.from_weights(torch.tensor([[0.004, 0.996], [0.0, 1.0]]))
    assert [text.get_text() for text in regard.plot.map(A).texts] == ["<1", "100", "100"]


TOKENS = {
    "mathematics": ("$x^2$", "$x^2$"),
    "broken mathematics": ("$\\frac", "$\\frac"),
    "TeX": ("100 % & _", "100 % & _"),
    "no glyph": ("\U00013000", "‹U+13000›"),
    "direction": ("a\u202eb", "a‹U+202E›b"),
    "half a character": ("\ud800", "‹U+D800›"),
    "line break": ("a\nb", "a↵b"),
    "very long": ("x" * 10_000, "x" * 17 + "…"),
}


@pytest.mark.sampled(3)
@in_turn(token=TOKENS, kind=["svg", "pdf", "png"])
def test_a_token_is_drawn_as_text_whatever_it_says(token: tuple[str, str], kind: str) -> None:
    written, shown = token
    ax = regard.plot.map(head(2), [written, "b"])
    assert labels(ax, "x")[0] == shown
    assert drawn(ax, kind)


def test_tex_is_not_run_on_tokens() -> None:
    ax = regard.plot.map(head(2), ["\\input{x}", "b"])
    assert not any(label.get_usetex() for label in ax.get_xticklabels())


def test_words_are_vectors_and_the_map_is_one_image() -> None:
    svg = drawn(regard.plot.map(head(600))).decode()
    assert svg.count("<image") == 2  # the map and its legend
    assert "<use" in svg


# All heads


def test_the_grid_has_a_small_map_for_every_head() -> None:
    seen = recording(layers=2, heads=3, tokens=64)
    ax = regard.plot.heads(seen)
    floor = log_floor(64)
    small = seen[1].pool(32, 32)[0, 2].double().clamp(min=floor)
    torch.testing.assert_close(cells(ax)[32:, 64:], small)
    assert (labels(ax, "x"), labels(ax, "y")) == (["0", "1", "2"], ["0", "1"])


def test_a_score_is_the_colour_of_each_head_and_its_kind_a_letter() -> None:
    seen = recording()
    ax = regard.plot.heads(seen, score="previous token")
    table = regard.heads(seen)
    expected = torch.tensor(table["previous token"]).reshape(2, 3).double()
    torch.testing.assert_close(cells(ax), expected, rtol=1e-6, atol=1e-6)
    letters = {kind.name: kind.letter for kind in KINDS}
    shown = [text.get_text().lower() for text in ax.texts]
    assert shown == [letters[str(kind)] for kind in table["kind"]]
    assert ax.get_title(loc="left").split("   ")[0].split()[0] in shown


def test_what_was_left_out_of_a_model_is_empty_and_the_rest_keeps_its_numbers() -> None:
    model = regard.nn.SelfAttention(16, num_heads=4)
    with regard.observe(model, heads=[1, 3]) as seen:
        model(torch.randn(5, 16))
    ax = regard.plot.heads(seen, score="kind")
    assert labels(ax, "x") == ["1", "3"]


def test_a_trial_adds_its_score() -> None:
    seen = recording(layers=1, heads=2)
    trial = Trial({"layer 0": {"induction": (0.9, 0.25)}})
    ax = regard.plot.heads(seen, trial, score="induction")
    torch.testing.assert_close(cells(ax), torch.tensor([[0.9, 0.25]]).double())


# Entropy, parts


def test_entropy_has_a_dot_for_each_head() -> None:
    seen = recording()
    ax = regard.plot.entropy(seen)
    points = torch.tensor(numpy.asarray(ax.collections[0].get_offsets()))
    expected = torch.stack([seen[layer].entropy()[0].mean(-1) for layer in range(2)])
    torch.testing.assert_close(points[:, 1].reshape(2, 3), expected.double(), rtol=1e-5, atol=1e-5)
    assert points[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    named = f"L{expected.argmax() // 3}H{expected.argmax() % 3}"
    assert named in [text.get_text() for text in ax.texts]


def test_kept_answers_are_enough_for_entropy() -> None:
    model = regard.nn.SelfAttention(16, num_heads=2)
    with regard.observe(model, keep=[regard.Entropy()]) as seen:
        model(torch.randn(5, 16))
    assert len(regard.plot.entropy(seen).collections[0].get_offsets()) == 2


def test_segments_show_the_mean_over_all_heads() -> None:
    shares = regard.segment_shares(recording(), {"$question$": (0, 2), "text": (2, 5)})
    ax = regard.plot.segments(shares)
    torch.testing.assert_close(cells(ax), shares.total().double())
    assert labels(ax, "x") == labels(ax, "y") == ["$question$", "text"]
    assert legend(ax) == "share, mean of 2 × 3 heads\nlinear"


def test_segments_say_that_sinks_are_left_out() -> None:
    shares = regard.segment_shares(recording(), {"all": (0, 5)}, sinks=False)
    assert legend(regard.plot.segments(shares)).startswith(
        "share, mean of 2 × 3 heads\nwithout sinks"
    )


# On axes of one's own


DRAWN = {
    "map": lambda ax: regard.plot.map(head(4), ax=ax),
    "heads": lambda ax: regard.plot.heads(recording(), ax=ax),
    "entropy": lambda ax: regard.plot.entropy(recording(), ax=ax),
    "segments": lambda ax: regard.plot.segments(
        regard.segment_shares(recording(), {"all": (0, 5)}), ax=ax
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_it_draws_on_the_axes_that_it_is_given(name: str) -> None:
    _, (left, right) = pyplot.subplots(1, 2)
    assert DRAWN[name](right) is right
    assert not left.has_data()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DRAWN)
def test_a_dark_style_has_dark_ground(name: str) -> None:
    with pyplot.style.context("dark_background"):
        ax = DRAWN[name](None)
        assert drawn(ax, "png")
    assert all(to_hex(image.get_cmap()(0.0)) == "#000000" for image in ax.get_images())


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(
            lambda: regard.plot.map(torch.eye(3)),
            TypeError,
            "matrix is a Tensor; it must be an AttentionMatrix.\n"
            "    If you have the weights, use AttentionMatrix.from_weights(weights).",
            id="tensor",
        ),
        pytest.param(
            lambda: regard.plot.map(recording()[0]),
            ValueError,
            "matrix has shape (1, 3, 5, 5); plot.map() shows one head.\n"
            "    Take one of them by its leading axes, for example A[0, 3].",
            id="several heads",
        ),
        pytest.param(
            lambda: regard.plot.map(head(3), ["a"]),
            ValueError,
            "tokens has 1 tokens; the matrix has q_len = 3.\n"
            "    Give a list with one token for each.",
            id="tokens",
        ),
        pytest.param(
            lambda: regard.plot.map(head(3), scale="row"),
            ValueError,
            "scale is 'row'; it must be 'linear' or 'log'.\n"
            "    Leave it out for linear up to 48 keys and log beyond.",
            id="scale",
        ),
        pytest.param(
            lambda: regard.plot.heads(head(3)),
            TypeError,
            "seen is an AttentionMatrix; it must be a Recording.\n"
            "    Make one with regard.observe(model), regard.load(path) or "
            "regard.Recording({name: A}); regard.show(A) draws a matrix itself.",
            id="no recording",
        ),
        *(
            pytest.param(
                lambda draw=draw: draw(regard.Recording({})),
                ValueError,
                f"seen has no layers; plot.{draw.__name__}() draws at least one.\n"
                "    Record attention with regard.observe(model), or take a part that has layers.",
                id=f"{draw.__name__} of nothing",
            )
            for draw in (regard.plot.heads, regard.plot.entropy)
        ),
        pytest.param(
            lambda: regard.plot.heads(recording(), score="induction"),
            ValueError,
            "score is 'induction'; of these heads 'kind', 'previous token', 'next token', 'self', "
            "'first-token sink', 'separator sink', 'uniform' were measured.\n"
            "    Pass a trial, regard.trials.repeated_tokens(model), for kinds that need one.",
            id="score",
        ),
        pytest.param(
            lambda: regard.plot.segments({"a": (0, 1)}),
            TypeError,
            "shares is a dict; plot.segments() draws Shares.\n"
            "    Pass regard.segment_shares(seen, parts), where parts maps names to token spans.",
            id="shares",
        ),
    ],
)
def test_a_wrong_call_says_what_to_do(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@pytest.mark.parametrize("name", DRAWN)
def test_without_matplotlib_one_sentence_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RegardError) as raised:
        DRAWN[name](None)
    assert str(raised.value) == (
        f"plot.{name}() needs matplotlib, which is not installed.\n    Run: pip install matplotlib"
    )
