"""Mutate the core in one place at a time, and record which mutants the tests kill.

    python tests/mutation/mutate.py [--workers 2] [--only masks-3,masks-7] [--list] [--all]

It needs cosmic-ray, and changes files only in copies of this repository. README.md explains the
results.
"""

# cosmic-ray is installed in an environment of its own.
# pyright: basic, reportMissingImports=false

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from signal import SIGKILL, SIGTERM

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CONFIG = tomllib.loads((HERE / "config.toml").read_text())
# The tests of `make test`, and the further tests of `make test-all`, which also has more examples.
SUITES = {"make test": "not full", "make test-all": "full or hypothesis"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int

    def changed(self, source: str) -> str:
        """Return the changed source of the file."""
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        assert changed is not None, self
        return changed


def mutants(module: str) -> Iterator[Mutant]:
    """Yield every change of a module that cosmic-ray knows, except in type annotations."""
    place = REPOSITORY / module
    for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
        annotations = annotations_of(file)
        nodes = list(ast_nodes(get_ast_from_path(file)))
        for name in sorted(operator_names()):
            if get_operator(name).arguments():
                continue
            operator = get_operator(name)()
            starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
            for occurrence, start in enumerate(starts):
                if not any(first <= start < last for first, last in annotations):
                    path = str(file.relative_to(REPOSITORY))
                    yield Mutant(path, start[0], start[1], name, occurrence)


def annotations_of(file: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the positions of type annotations, which do not change what the code does."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
    return [
        ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0))
        for each in found
        if each is not None
    ]


def sample() -> dict[str, Mutant]:
    """Return mutants by name, at most one for each place in the code."""
    chosen: dict[str, Mutant] = {}
    for module, size in CONFIG["modules"].items():
        places: dict[tuple[str, int, int], list[Mutant]] = {}
        for mutant in mutants(module):
            places.setdefault((mutant.path, mutant.line, mutant.column), []).append(mutant)
        draw = random.Random(CONFIG["seed"])
        for number, place in enumerate(draw.sample(sorted(places), size)):
            chosen[f"{Path(module).stem}-{number}"] = draw.choice(places[place])
    return chosen


def tests_of(path: str, copy: Path) -> Iterator[list[str]]:
    """Yield the test files that a change of this file most likely fails, then the others."""
    first = next(tests for start, tests in CONFIG["first"].items() if path.startswith(start))
    seen: set[str] = set()
    for names in (first, CONFIG["tests"]["folders"]):
        places = [copy / name for name in names]
        files = [
            f for each in places for f in (each.rglob("test_*.py") if each.is_dir() else [each])
        ]
        found = [str(file.relative_to(copy)) for file in sorted(files)]
        ignored = tuple(CONFIG["tests"]["ignored"])
        yield [name for name in found if name not in seen and not name.startswith(ignored)]
        seen.update(found)


def first_failure(selected: str, files: list[str], copy: Path) -> str | None:
    """Return the first selected test of these files that fails, or None."""
    python = str(copy / ".venv/bin/python")
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", selected]
    settings = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [python, "-m", "pytest", *options, *files],
            cwd=copy,
            env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=CONFIG["timeout"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the time limit"
    if run.returncode in (-SIGTERM, -SIGKILL):
        return first_failure(selected, files, copy)  # stopped from outside
    if run.returncode in (0, 5):  # 5: none of these tests is selected
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[-1].split(" ", 1)[1].split(" - ")[0] if lines else f"exit {run.returncode}"


def tested(mutant: Mutant, suite: str, copy: Path) -> dict[str, object]:
    """Run a suite on a mutant, and return the mutant with the first test that kills it."""
    file = copy / mutant.path
    source = file.read_text()
    changed = mutant.changed(source)
    diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    try:
        file.write_text(changed)
        failures = (
            first_failure(SUITES[suite], files, copy) for files in tests_of(mutant.path, copy)
        )
        killed_by = next(filter(None, failures), None)
    finally:
        file.write_text(source)
    return {**asdict(mutant), "diff": list(diff)[3:], "suite": suite, "killed by": killed_by}


def copied(folder: Path) -> Path:
    """Return a copy of the repository with its environment."""
    left_out = shutil.ignore_patterns(".venv", ".git", "node_modules", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, folder, ignore=left_out, symlinks=True)
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    return folder


def main() -> None:
    """Test each mutant of the sample, and append one line of JSON for each to a file."""
    parser = argparse.ArgumentParser(description="Mutate the core and run the tests.")
    parser.add_argument("--workers", type=int, default=2, help="how many at once")
    parser.add_argument("--only", help="the names of some mutants, separated by commas")
    parser.add_argument("--all", action="store_true", help="run the tests that only test-all has")
    parser.add_argument("--list", action="store_true", help="show the mutants and test nothing")
    parser.add_argument("--out", type=Path, default=HERE / "mutants.jsonl")
    options = parser.parse_args()
    chosen = sample()
    if options.only:
        chosen = {name: chosen[name] for name in options.only.split(",")}
    if options.list:
        for name, mutant in chosen.items():
            print(name, mutant.path, mutant.line, mutant.operator)
        return

    suite = "make test-all" if options.all else "make test"
    copies: Queue[Path] = Queue()

    def with_a_copy(name: str) -> dict[str, object]:
        copy = copies.get()
        try:
            return {"name": name, **tested(chosen[name], suite, copy)}
        finally:
            copies.put(copy)

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(options.workers) as pool,
        options.out.open("a") as out,
    ):
        for worker in range(options.workers):
            copies.put(copied(Path(folder) / str(worker)))
        for finished in as_completed(pool.submit(with_a_copy, name) for name in chosen):
            result = finished.result()
            print(json.dumps(result), file=out, flush=True)
            killed_by = result["killed by"] or "SURVIVED"
            print(result["name"], result["path"], result["line"], killed_by, flush=True)


if __name__ == "__main__":
    main()
