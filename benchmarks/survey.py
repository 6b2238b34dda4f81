"""The throughput of `regard.survey` beside the model's own forward, in CPU seconds.

    python -m benchmarks.survey            # the ratios, one thread: some minutes
    python -m benchmarks.survey --quick    # a few texts, to see whether it runs

The forward runs the same batches of equal length. The two alternate, and the ratio is that of the
medians. CPU seconds do not count the time that other programs take.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

__all__ = ["main"]

WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "they"),
    *("which", "one", "you", "were", "all", "her", "she", "there", "would", "their", "we", "him"),
    *("when", "who", "will", "more", "if", "out", "so", "said", "what", "about", "into", "them"),
    *("can", "only", "other", "time", "new", "some", "could", "these", "two", "may", "first"),
    *("then", "do", "any", "like", "now", "over", "such", "our", "even", "most", "made", "after"),
    *("many", "before", "must", "back", "through", "years", "where", "much", "way", "down"),
)
# The name of a case, the fewest and the most words of a text, and the number of texts.
CASES = (("24 words", 24, 24, 256), ("10 to 40 words", 10, 40, 256), ("128 words", 128, 128, 62))


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process for some work."""
    start = process_time()
    work()
    return process_time() - start


def texts(fewest: int, most: int, count: int) -> str:
    """Return random texts of frequent words, one on each line."""
    drawn = random.Random(0)
    lengths = [drawn.randint(fewest, most) for _ in range(count)]
    return "".join(" ".join(drawn.choices(WORDS, k=n)) + "\n" for n in lengths)


def throughput(folder: Path, fewest: int, most: int, count: int, rounds: int) -> tuple[float, ...]:
    """Return the forward's and the survey's CPU seconds, each the median of the rounds."""
    import torch

    import regard
    from regard.corpus.surveying import _Reader  # pyright: ignore[reportPrivateUsage]
    from regard.corpus.text_files import Corpus
    from regard.models.pretrained import Pretrained

    torch.set_num_threads(1)
    corpus = folder / "corpus.txt"
    corpus.write_text(texts(fewest, most, count))
    model = Pretrained.load()
    [read] = list(Corpus(corpus, "text").blocks(1024))
    batches = list(_Reader(model, {}, None).batches(read))
    inputs = [
        {name: torch.cat([each.inputs[name] for each in batch]) for name in batch[0].inputs}
        for batch in batches
    ]

    def forward() -> None:
        with torch.inference_mode():
            for each in inputs:
                model.model(**each)

    def survey(number: int) -> None:
        regard.survey(model, corpus, folder / str(number))

    forward(), survey(-1)
    taken = [(seconds(forward), seconds(lambda n=n: survey(n))) for n in range(rounds)]
    return tuple(median(column) for column in zip(*taken, strict=True))


def of_processes(folder: Path, ranks: int, count: int) -> float:
    """Return the CPU seconds of a survey by several processes, one thread each."""
    corpus, out = folder / "corpus.txt", folder / f"of-{ranks}"
    corpus.write_text(texts(24, 24, count))
    call = f"regard.survey('all-MiniLM-L6-v2', {str(corpus)!r}, {str(out)!r}, block=32)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    before = getrusage(RUSAGE_CHILDREN)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import regard; {call}"], env={**environment, "RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    if any(process.wait() for process in processes):
        raise RuntimeError(f"a survey by {ranks} processes failed")
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    quick = "--quick" in arguments
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for place, (name, fewest, most, count) in enumerate(CASES):
            here = folder / str(place)
            here.mkdir()
            count, rounds = (2, 1) if quick else (count, 9)
            forward, survey = throughput(here, fewest, most, count, rounds)
            print(
                f"{name}: forward {forward:.2f} s, survey {survey:.2f} s, "
                f"{forward / survey:.2f} of the forward's throughput",
                flush=True,
            )
        # Each process also starts Python and loads the model, which an empty share measures.
        count = 64 if quick else 1024
        start, alone, together = [], [], []
        for turn in range(1 if quick else 3):
            here = folder / f"processes-{turn}"
            here.mkdir()
            start.append(of_processes(here / _made(here, "start"), 1, 1))
            alone.append(of_processes(here / _made(here, "alone"), 1, count))
            together.append(of_processes(here / _made(here, "together"), 2, count))
        fixed, one, two = median(start), median(alone), median(together)
        print(
            f"{count} texts: one process {one:.1f} s, two {two:.1f} s, {fixed:.1f} s of each "
            f"process to start; without them {(two - 2 * fixed) / (one - fixed):.2f}"
        )


def _made(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    return name


if __name__ == "__main__":
    main(sys.argv[1:])
