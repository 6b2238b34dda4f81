"""``python docs/vision_model.py``: train the small vision transformer of ``vision.md``.

It learns in a minute to name the one red digit among digits of other colours. The digits are
those of the fonts that matplotlib contains, so nothing is downloaded.
"""

import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import matplotlib
import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

__all__ = ["PLACE", "Scene", "draw", "train"]

PLACE = Path(__file__).with_name("digit-finder")
SIDE, PATCH = 64, 8
_FOLDER = Path(matplotlib.get_data_path(), "fonts", "ttf")
_FONTS = [_FOLDER / f"DejaVuSans{kind}.ttf" for kind in ("", "-Bold")]
_COLOURS = [(40, 90, 200), (30, 140, 70), (120, 120, 120), (170, 130, 20)]
_RED = (200, 40, 40)


class Scene(NamedTuple):
    """A picture of several digits, one of them red.

    Attributes:
        image: the picture.
        digit: the red digit.
        box: its place in the picture, x0, y0, x1, y1.
    """

    image: Image.Image
    digit: int
    box: tuple[float, float, float, float]


def draw(seed: int, digits: int = 5) -> Scene:
    """Return a scene; the same seed gives the same scene."""
    random = Random(seed)
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    red = random.randrange(10)
    cells = random.sample([(column, row) for row in range(4) for column in range(4)], digits)
    box = (0.0, 0.0, 0.0, 0.0)
    for place, (column, row) in enumerate(cells):
        text = str(red if place == 0 else random.randrange(10))
        font = _font(random.choice(_FONTS), 16)
        x, y = (2 + 16 * at for at in (column, row))
        left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
        colour = _RED if place == 0 else random.choice(_COLOURS)
        canvas.text((x - left, y - top), text, font=font, fill=colour)
        if place == 0:
            box = (float(x), float(y), float(x + right - left), float(y + bottom - top))
    return Scene(image, red, box)


@cache
def _font(path: Path, size: int) -> Any:
    return ImageFont.truetype(str(path), size)


def pixels(scenes: list[Scene]) -> torch.Tensor:
    """Return the pixels of scenes as the processor makes them, from -1 to 1."""
    images = numpy.stack([numpy.asarray(scene.image) for scene in scenes])
    return torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1


def train(steps: int = 700, batch: int = 64) -> Any:
    """Return a trained model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of so small a model, several threads wait for each other
    config = ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=48,
        initializer_range=0.1,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    pool = [draw(seed) for seed in range(6_000)]
    images, labels = pixels(pool), torch.tensor([scene.digit for scene in pool])
    for step in range(steps):
        chosen = torch.randint(len(pool), (batch,))
        loss = model(pixel_values=images[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            sys.stdout.write(f"step {step + 1}: loss {loss.item():.3f}\n")
            sys.stdout.flush()
    return model.eval()


def main() -> None:
    """Train the model, test it on new scenes, and save it with its processor."""
    model = train()
    new = [draw(seed) for seed in range(10**6, 10**6 + 1000)]
    with torch.no_grad():
        found = model(pixel_values=pixels(new)).logits.argmax(-1).tolist()
    right = sum(one == scene.digit for one, scene in zip(found, new, strict=True))
    sys.stdout.write(f"{right / 10:.1f} % of 1,000 new scenes are right\n")
    model.to(torch.bfloat16).save_pretrained(PLACE)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(PLACE)


if __name__ == "__main__":
    main()
