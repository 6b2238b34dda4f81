"""Pictures that a model saw: decoded within limits, and stored small and without metadata."""

import warnings
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.errors import RegardError, bytes_text, check_count, kind_text, optional_module
from regard.text.escaping import visible

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST_SIDE = 1024
_MOST_BYTES = 256 * 2**20
_MOST_STORED = 16 * 2**20
_MOST_PIXELS = 2**27
_MOST_SIDE = 2**24
_TYPES = {b"RIFF": "image/webp", b"\x89PNG": "image/png"}
_LONGEST_NAME = 200
_WHITE = 65535  # of 16 bits


@dataclass(frozen=True)
class Picture:
    """A picture that a model saw.

    Attributes:
        width: the width of the original in pixels, after its EXIF rotation if ``decode`` read it.
        height: the height of the original in pixels.
        data: a smaller copy as WebP or PNG, at most 1,024 pixels on the longest side and without
            metadata; None if only the size is known.
        name: a name for people.

    Example:
        >>> import regard
        >>> regard.images.Picture(640, 480, name="photo.jpg")
        Picture(width=640, height=480, name='photo.jpg')
    """

    width: int
    height: int
    data: bytes | None = field(default=None, repr=False)
    name: str = ""

    def __post_init__(self) -> None:
        """Check all arguments."""
        sides = check_count("width", self.width), check_count("height", self.height)
        if max(sides) > _MOST_SIDE:
            raise ValueError(f"a picture of {sides[0]} x {sides[1]} pixels is too large.")
        if not isinstance(self.name, str):
            raise TypeError(f"name is {kind_text(self.name)}; it must be a string.")
        if self.data is not None:
            if not isinstance(self.data, bytes):
                raise TypeError(f"data is {kind_text(self.data)}; it must be bytes.")
            if self.data[:4] not in _TYPES or len(self.data) > _MOST_STORED:
                raise ValueError(
                    "data is no WebP or PNG of at most 16 MiB.\n"
                    "    Make the picture with regard.images.keep(image)."
                )

    @property
    def type(self) -> str | None:
        """The media type of the data, ``image/webp`` or ``image/png``; None without data."""
        return None if self.data is None else _TYPES[self.data[:4]]

    def image(self) -> "Image":
        """Decode the smaller copy.

        Raises:
            RegardError: the picture was not kept, or its data are damaged.
        """
        if self.data is None:
            raise RegardError(
                f"picture {visible(self.name)!r} has no data; only its size was kept.\n"
                "    Record it again without --no-picture."
            )
        return decode(self.data, self.name)


def keep(image: "Image | Picture", name: str = "", *, data: bool = True) -> Picture:
    """Return a picture with a smaller copy of an image, re-encoded without metadata.

    Args:
        image: an image of Pillow, taken as it lies; processors apply no EXIF rotation, either. A
            Picture is returned unchanged.
        name: a name for people. The default is the name of the image's file.
        data: if False, keep the size only.

    Raises:
        TypeError: image is not an image of Pillow.

    Example:
        >>> import regard
        >>> from PIL import Image
        >>> picture = regard.images.keep(Image.new("RGB", (2048, 512)), "black")
        >>> picture, picture.image().size
        (Picture(width=2048, height=512, name='black'), (1024, 256))
    """
    if isinstance(image, Picture):
        return image
    pillow = pillow_library()
    if not isinstance(image, pillow.Image):
        raise TypeError(
            f"image is {kind_text(image)}; it must be an image of Pillow.\n"
            "    Use regard.images.decode(path) to read a file."
        )
    width, height = image.size
    path = str(getattr(image, "filename", "") or "")
    name = (name or Path(path).name)[:_LONGEST_NAME]
    if not data:
        return Picture(width, height, None, name)
    small = image.convert("RGB")
    small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), pillow.Resampling.LANCZOS)
    # A new image has no metadata. Few pixels keep their values in PNG.
    plain, file = pillow.new("RGB", small.size), BytesIO()
    plain.paste(small)
    if max(plain.size) < 64:
        plain.save(file, "PNG", optimize=True)
    else:
        plain.save(file, "WEBP", quality=90)
    return Picture(width, height, file.getvalue(), name)


def decode(source: "str | Path | bytes", name: str = "") -> "Image":
    """Decode an untrusted image as RGB, as a viewer shows it.

    The rotation of EXIF is applied, transparent pixels are laid on white, and 16 bits become 8. The
    first frame of an animation is decoded, with a warning.

    Args:
        source: the path of a file, or its bytes.
        name: a name for errors. The default is the path.

    Raises:
        RegardError: it is no image, is truncated, or has more than 128 million pixels.

    Warns:
        UserWarning: the image is an animation.

    Example:
        >>> import regard
        >>> from PIL import Image
        >>> Image.new("CMYK", (3, 2)).save("print.jpg")
        >>> image = regard.images.decode("print.jpg")
        >>> image.mode, image.size
        ('RGB', (3, 2))
    """
    pillow, ops = pillow_library(), import_module("PIL.ImageOps")
    name = visible(name or (str(source) if not isinstance(source, bytes) else "the picture"))
    try:
        content = _content(source, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of half of the limit, and of broken EXIF
            opened: Any = pillow.open(BytesIO(content))
            width, height = opened.size
            if width * height > _MOST_PIXELS:
                raise RegardError(
                    f"{name} has {width:,} x {height:,} pixels; the limit is 128 million.\n"
                    "    Make it smaller first."
                )
            frames = int(getattr(opened, "n_frames", 1))
            image = _as_rgb(pillow, ops.exif_transpose(opened))
    except RegardError:
        raise
    except FileNotFoundError as error:
        raise RegardError(f"there is no file {name}.\n    Give the path of an image.") from error
    except pillow.UnidentifiedImageError as error:
        raise RegardError(
            f"{name} is no picture that Pillow reads.\n    Give a JPEG, PNG, WebP or another one."
        ) from error
    except pillow.DecompressionBombError as error:
        raise RegardError(
            f"{name} has more than 128 million pixels.\n    Make it smaller first."
        ) from error
    except Exception as error:
        reason = visible(str(error).partition("\n")[0]).rstrip(".")
        raise RegardError(
            f"{name} cannot be read as a picture: {reason}.\n"
            "    It may be damaged or cut off: save it again."
        ) from error
    if frames > 1:
        warnings.warn(f"{name} has {frames} frames; the first one is used.", stacklevel=2)
    return image


def _content(source: "str | Path | bytes", name: str) -> bytes:
    if isinstance(source, bytes):
        return source
    path = Path(source)
    if path.exists() and not path.is_file():
        raise RegardError(f"{name} is no file.\n    Give the path of an image.")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise RegardError(
            f"{name} has more than {bytes_text(_MOST_BYTES)}; that is too large for a picture.\n"
            "    Make it smaller first."
        )
    return content


def _as_rgb(pillow: Any, image: Any) -> "Image":
    """Return an image of 8 bits in RGB without metadata."""
    if image.mode == "F":
        raise ValueError("its numbers are floats, which have no white")
    if image.mode.startswith("I"):
        # Pillow's own conversion would clip all values above 255.
        image = image.convert("F")
        low, high = image.getextrema()
        if not (0 <= low <= high <= _WHITE):
            raise ValueError(f"its numbers go from {low:g} to {high:g}, not from 0 to {_WHITE}")
        image = image.point(_to_8_bits).convert("L")
    if image.has_transparency_data:
        ground = pillow.new("RGBA", image.size, "white")
        image = pillow.alpha_composite(ground, image.convert("RGBA"))
    plain = pillow.new("RGB", image.size)
    plain.paste(image.convert("RGB"))
    return cast("Image", plain)


def _to_8_bits(value: Any) -> Any:
    return value * (255 / _WHITE)


def pillow_library() -> Any:
    """Return the module of Pillow's images; raise a RegardError if it is not installed."""
    return optional_module("PIL.Image", "pictures need Pillow", "'regard[images]'")
