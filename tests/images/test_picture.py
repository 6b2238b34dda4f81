"""Untrusted pictures: decoded as a viewer shows them, or refused in one sentence."""

import io
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import regard
from regard.images import Picture, decode, keep


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_the_rotation_of_exif_is_applied() -> None:
    image = Image.new("RGB", (4, 2), "white")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    shown = decode(encoded(image, "JPEG", exif=exif))
    assert shown.size == (2, 4)
    assert not shown.getexif()


def test_transparent_pixels_are_laid_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    assert decode(encoded(image, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 1))
    assert decode(encoded(palette, "PNG", transparency=0)).getpixel((1, 0)) == (255, 255, 255)


def test_16_bits_become_8() -> None:
    image = Image.new("I;16", (2, 2), 0x8080)
    assert decode(encoded(image, "PNG")).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new(mode, (3, 2), "white" if mode != "P" else None)
    shown = decode(encoded(image, "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"))
    assert (shown.mode, shown.size) == ("RGB", (3, 2))


def test_the_first_frame_of_an_animation_is_used_and_said() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.warns(UserWarning, match=r"^cat\.gif has 2 frames; the first one is used\.$"):
        assert decode(content, "cat.gif").getpixel((0, 0)) == (255, 0, 0)


def test_one_pixel_is_a_picture() -> None:
    picture = keep(decode(encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG")))
    assert (picture.width, picture.height, picture.type) == (1, 1, "image/png")
    assert picture.image().getpixel((0, 0)) == (1, 2, 3)


def test_a_kept_picture_is_small_and_has_no_metadata(tmp_path: Path) -> None:
    image = Image.effect_noise((3000, 1500), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x010E] = "my home"
    image.save(tmp_path / "photo.jpg", exif=exif, comment=b"my street")
    picture = keep(Image.open(tmp_path / "photo.jpg"))
    assert (picture.width, picture.height, picture.name) == (3000, 1500, "photo.jpg")
    assert picture.image().size == (1024, 512)
    assert picture.data is not None
    assert b"my home" not in picture.data
    assert b"my street" not in picture.data


def test_only_the_size_of_a_picture_may_be_kept() -> None:
    picture = keep(Image.new("RGB", (30, 20)), "secret.png", data=False)
    assert picture == Picture(30, 20, None, "secret.png")
    with pytest.raises(regard.RegardError, match=r"^picture 'secret\.png' has no data"):
        picture.image()


def bomb() -> bytes:
    """A PNG that claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99))


NOISE = encoded(Image.effect_noise((64, 64), 60), "PNG")
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "text": (lambda: b"hello", "x is no picture that Pillow reads."),
    "nothing": (lambda: b"", "x is no picture that Pillow reads."),
    "truncated": (lambda: NOISE[:2000], "x cannot be read as a picture: "),
    "a drawing": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "x is no picture"),
    "a bomb": (bomb, "x has more than 128 million pixels."),
    "large": (
        lambda: encoded(Image.new("1", (12_000, 12_000)), "PNG"),
        "x has 12,000 x 12,000 pixels; the limit is 128 million.",
    ),
    "floats": (
        lambda: encoded(Image.new("F", (2, 2)), "TIFF"),
        "x cannot be read as a picture: its numbers are floats, which have no white.",
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_picture_is_refused(content: Callable[[], bytes], message: str) -> None:
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}") as caught:
        decode(content(), "x")
    assert len(str(caught.value).splitlines()) == 2


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(regard.RegardError, match=r"^there is no file"):
        decode(tmp_path / "none.png")
    with pytest.raises(regard.RegardError, match=r"is no file"):
        decode(tmp_path)
    (tmp_path / "a\x1b[31m.png").write_bytes(b"x")
    with pytest.raises(regard.RegardError) as caught:
        decode(tmp_path / "a\x1b[31m.png")
    assert "\x1b" not in str(caught.value)
