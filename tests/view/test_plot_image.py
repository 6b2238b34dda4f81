"""`regard.plot.image`: the numbers, places and legend that are drawn over a picture."""

import pytest
import torch
from matplotlib import pyplot
from PIL import Image

import regard

PHOTO = Image.new("RGB", (60, 40), "grey")


@pytest.fixture(autouse=True)
def closed() -> object:
    yield
    pyplot.close("all")


def recording(*grids: regard.images.Grid) -> regard.Recording:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 9, 4)
    seen = regard.Recording({"layer": regard.attend(x, x)})
    return seen.with_pictures([PHOTO, PHOTO], grids)


def test_each_part_has_the_colour_of_its_share_in_its_box() -> None:
    seen = recording(regard.grid(range(1, 7), 2, 3))
    axes = regard.plot.image(seen, "layer", 1, query=4)
    [parts] = axes.collections
    expected = seen.image("layer", 1, query=4).flatten().double()
    assert parts.get_array().tolist() == expected.tolist()
    assert parts.get_clim() == (0, float(expected.max()))
    corners = [path.vertices for path in parts.get_paths()]
    assert corners[4].min(0).tolist() == [20, 20]
    assert corners[4].max(0).tolist() == [40, 40]
    assert axes.get_title(loc="left") == (
        f"{100 * float(expected.sum()):.3g} % of the attention lies on the picture"
    )
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 60), (40, 0))


def test_a_smooth_picture_says_so() -> None:
    axes = regard.plot.image(recording(regard.grid(range(6), 2, 3)), 0, smooth=True)
    figure = axes.figure
    assert axes.get_images()[-1].get_interpolation() == "bilinear"
    assert "interpolated between their middles" in figure.axes[-1].get_ylabel()


def test_one_of_several_grids_or_pictures_is_drawn() -> None:
    grids = regard.grid(range(4), 2, 2), regard.grid([5, 6], 1, 2, picture=1)
    seen = recording(*grids, regard.grid([7, 8], 2, 1))
    whole = seen.image(0)
    drawn = regard.plot.image(seen, 0, picture=1).collections[0].get_array()
    assert drawn.tolist() == whole[4:6].double().tolist()
    drawn = regard.plot.image(seen, 0, grid=2).collections[0].get_array()
    assert drawn.tolist() == whole[6:].double().tolist()
    with pytest.raises(ValueError, match=r"^grids overlap in the picture"):
        regard.plot.image(seen, 0)
    with pytest.raises(IndexError, match="index 2 is out of range"):
        regard.plot.image(seen, 0, picture=2)


def test_a_picture_that_was_not_kept_is_an_empty_frame() -> None:
    x = torch.randn(1, 1, 4, 2)
    size = regard.images.keep(PHOTO, data=False)
    seen = regard.Recording({"layer": regard.attend(x, x)})
    axes = regard.plot.image(seen.with_pictures([size], regard.grid(range(4), 2, 2)), 0)
    assert not axes.get_images()
    assert len(axes.collections) == 1


def test_several_grids_cannot_be_smooth() -> None:
    left, right = (regard.grid([at], 1, 1, box=(30 * at, 0, 30 * at + 30, 40)) for at in (0, 1))
    seen = recording(left, right)
    assert len(regard.plot.image(seen, 0).collections[0].get_paths()) == 2
    with pytest.raises(ValueError, match=r"^smooth is True and the picture has 2 grids"):
        regard.plot.image(seen, 0, smooth=True)
