"""The part of a distributed run that one process records."""

from pathlib import Path
from typing import NamedTuple

from regard.errors import RegardError

AXES = ("batch", "heads")


class Shard(NamedTuple):
    """The part of a distributed run that a recording holds.

    Each axis has the index of this part and the number of parts. ``heads=(1, 4)`` is the second of
    four parts of the heads; (0, 1) is an axis that is not split.

    Attributes:
        run: a unique name that all processes of one block of ``observe`` share.
        rank: the rank of the process.
        batch: the part of the batch in data parallelism, and the number of parts.
        heads: the part of the heads in tensor parallelism, and the number of parts.
        without: the layers in which this process has none of the selected heads.
    """

    run: str
    rank: int
    batch: tuple[int, int] = (0, 1)
    heads: tuple[int, int] = (0, 1)
    without: tuple[str, ...] = ()

    @property
    def part(self) -> tuple[int, int]:
        """The index of this part on each of ``AXES``."""
        return self.batch[0], self.heads[0]

    @property
    def counts(self) -> tuple[int, int]:
        """The number of parts on each of ``AXES``."""
        return self.batch[1], self.heads[1]

    @property
    def text(self) -> str:
        """A description of the part, without axes that are not split."""
        return part_text(self.part, self.counts)

    def file(self, path: Path) -> Path:
        """Return the path of this part's file in a folder, and create the folder if necessary.

        Raises:
            RegardError: path is the path of a file, or the folder cannot be created.
        """
        if path.suffix == ".safetensors" or path.is_file():
            raise RegardError(
                f"{path} is the path of a file; each process of a distributed run has its own.\n"
                '    Pass the path of a folder, "run"; regard.load("run") joins the files in it.'
            )
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise RegardError(
                f"{path} cannot be made: {error.strerror}.\n    Make the folder above it first."
            ) from error
        return path / f"rank{self.rank}.safetensors"


def part_text(part: tuple[int, ...], counts: tuple[int, ...]) -> str:
    """Return a description of a part, without axes that are not split."""
    axes = zip(AXES, part, counts, strict=True)
    return ", ".join(f"{axis} {at} of {count}" for axis, at, count in axes if count > 1)
