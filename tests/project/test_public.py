"""The public surface is what it says, every example in it runs, and the house rules hold.

Each check is a function from source or objects to a list of problems, and has a test that sees it
find one.
"""

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

import regard

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "regard"
MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON = sorted(
    path for top in ("src", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")
)
# What a core module may import: its own layers, PyTorch, Python's own. The direction of imports
# between layers is import-linter's to check: pyproject.toml has the list, `make lint` runs it.
CORE = ["errors", "scores", "masks", "reductions", "backends", "matrix"]
ALLOWED = {"regard", "torch", "typing_extensions", *sys.stdlib_module_names}  # PyTorch brings both
DRAWERS = {"base", "common", "helper", "helpers", "misc", "util", "utils"}


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# The surface


def public_objects(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Every public object by its full name; a public module counts by what it holds."""
    for name in module.__all__:
        item = getattr(module, name)
        if inspect.ismodule(item):
            yield from public_objects(item)
        else:
            yield f"{module.__name__}.{name}", item


def surface_problems(module: ModuleType) -> list[str]:
    """Where ``__all__`` and the names that are really there differ, or ``__all__`` is unsorted."""
    declared = list(module.__all__)
    there = {
        name
        for name, item in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(item)
    }
    problems = [f"{name} is there but not in __all__" for name in sorted(there - set(declared))]
    problems += [
        f"{name} is in __all__ but not there" for name in declared if not hasattr(module, name)
    ]
    # As ruff sorts it: constants, classes, functions, and each of them by name.
    kinds = {name: (not name.isupper(), not name[:1].isupper(), name) for name in declared}
    if declared != sorted(set(declared), key=kinds.__getitem__):
        problems.append(f"__all__ is not sorted: {declared}")
    return problems


def code_in_door(source: str) -> list[str]:
    """The statements of an ``__init__.py`` that are neither docstring, import nor ``__all__``."""

    def allowed(node: ast.stmt) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                return True
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return True
        return False

    return [ast.unparse(node) for node in ast.parse(source).body if not allowed(node)]


def fake_module(declared: list[str], **names: object) -> ModuleType:
    module = ModuleType("fake")
    vars(module).update(names, __all__=declared)
    return module


def test_all_names_exactly_the_public_surface() -> None:
    assert surface_problems(regard) == []


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        pytest.param(
            fake_module(["a"], a=1, b=2), "b is there but not in __all__", id="undeclared"
        ),
        pytest.param(fake_module(["a", "b"], a=1), "b is in __all__ but not there", id="missing"),
        pytest.param(
            fake_module(["b", "a"], a=1, b=2), "__all__ is not sorted: ['b', 'a']", id="unsorted"
        ),
    ],
)
def test_a_wrong_surface_is_seen(module: ModuleType, problem: str) -> None:
    assert surface_problems(module) == [problem]


def test_the_door_holds_imports_and_nothing_else() -> None:
    assert code_in_door((PACKAGE / "__init__.py").read_text()) == []


def doors(module: ModuleType) -> Iterator[ModuleType]:
    """A public module and the modules that it offers."""
    yield module
    for name in module.__all__:
        if inspect.ismodule(item := getattr(module, name)):
            yield from doors(item)


def test_only_public_modules_list_their_names() -> None:
    public = {place(Path(str(module.__file__))) for module in doors(regard)}
    lists = {
        place(path)
        for path in MODULES
        if path.name != "__init__.py" and "\n__all__ = [" in path.read_text()
    }
    assert lists - public == set()


def test_code_in_the_door_is_seen() -> None:
    source = '"""A door."""\nfrom .masks import Causal\n__all__ = ["Causal"]\nCausal()'
    assert code_in_door(source) == ["Causal()"]


# Docstrings and their examples


def docstring_problems(name: str, item: object) -> list[str]:
    """A public object needs a docstring whose Example section has code in doctest form."""
    text = inspect.getdoc(item)
    if not text:
        return [f"{name} has no docstring"]
    if inspect.isclass(item) and (bare := methods_without_docstring(item)):
        return [f"{name} has no docstring for {', '.join(bare)}"]
    if inspect.isclass(item) and issubclass(item, Exception):
        return []  # its text is shown where it is raised: test_errors.py
    section = re.search(r"^Example:\n((?:[ ]{4}.*\n?|\n)+)", text, re.MULTILINE)
    if section is None or ">>> " not in section[1]:
        return [f"{name} has no Example section with >>> code"]
    return []


def methods_without_docstring(item: type) -> list[str]:
    """The public methods and properties that have none, not even an inherited one."""
    own = [name for name, member in vars(item).items() if is_method(member)]
    return [name for name in own if name[0] != "_" and not inspect.getdoc(getattr(item, name))]


def is_method(member: object) -> bool:
    return isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)


def example_failures(name: str, item: object) -> list[str]:
    """What goes wrong when the examples of an object and its methods run, with nothing given."""
    output: list[str] = []
    runner = doctest.DocTestRunner(
        verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    for test in doctest.DocTestFinder(exclude_empty=True).find(item, name, globs={}):
        runner.run(test, out=output.append)
    return output


PUBLIC = [pytest.param(name, item, id=name) for name, item in public_objects(regard)]


def test_every_public_object_has_an_example() -> None:
    found = [docstring_problems(name, item) for name, item in public_objects(regard)]
    assert list(chain.from_iterable(found)) == []


@pytest.mark.parametrize(("name", "item"), PUBLIC)
def test_every_example_gives_what_it_says(
    name: str, item: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failures = "".join(example_failures(name, item))
    assert not failures, failures


class WithoutExample:
    """Shows nothing.

    Example:
        Look elsewhere.
    """


class WithBareMethod:
    """Leaves a method unexplained."""

    def method(self) -> None: ...


class WithWrongExample:
    """Claims too much.

    Example:
        >>> 1 + 1
        2
    """

    def method(self) -> None:
        """Is wrong.

        Example:
            >>> 1 + 1
            3
        """


def test_a_missing_docstring_is_seen() -> None:
    assert docstring_problems("f", lambda: None) == ["f has no docstring"]


def test_a_method_without_a_docstring_is_seen() -> None:
    assert docstring_problems("W", WithBareMethod) == ["W has no docstring for method"]


def test_a_missing_example_is_seen() -> None:
    assert docstring_problems("W", WithoutExample) == ["W has no Example section with >>> code"]


def test_a_wrong_example_in_a_method_is_seen() -> None:
    assert docstring_problems("W", WithWrongExample) == []
    assert "Expected:\n    3\nGot:\n    2" in "".join(example_failures("W", WithWrongExample))


# Sizes and names


def size_problems(source: str) -> list[str]:
    """What is longer than the house allows; docstrings do not count as a function's lines."""
    problems: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [ast.unparse(each).partition("(")[0] for each in node.decorator_list]
            limit = 150 if any(name.endswith("jit") for name in names) else 50
            if (lines := code_lines(node)) > limit:
                problems.append(f"{node.name} has {lines} lines; at most {limit}")
        elif isinstance(node, ast.ClassDef):
            methods = {
                n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            public = [name for name in methods if not name.startswith("_")]
            if len(public) > 30:
                problems.append(f"{node.name} has {len(public)} public methods; at most 30")
    return problems


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return lines


def name_problems(path: Path, functions: set[str]) -> list[str]:
    """A module's name says what is in it, and never hides a public function."""
    problems = [
        f"{part} says nothing about what is in it"
        for part in path.with_suffix("").parts
        if part in DRAWERS
    ]
    if path.stem in functions:
        problems.append(f"{path.stem} is also the name of a public function")
    return problems


def repeated_names(paths: list[Path]) -> list[str]:
    """The file names that occur more than once; every package has its ``__init__.py``."""
    names = Counter(path.name for path in paths)
    return sorted(name for name, count in names.items() if count > 1 and name != "__init__.py")


def in_every_file(problems: Callable[[str], list[str]]) -> list[str]:
    """The problems that a lint finds in all Python files, each with its file."""
    return [f"{place(path)}: {one}" for path in PYTHON for one in problems(path.read_text())]


def test_functions_and_classes_are_small() -> None:
    assert in_every_file(size_problems) == []


def test_modules_are_named_for_what_they_do() -> None:
    # What a namespace holds hides no module: regard.plot.heads is not regard.heads.
    functions = {
        n.removeprefix("regard.")
        for n, item in public_objects(regard)
        if inspect.isfunction(item) and n.count(".") == 1
    }
    found = [name_problems(path.relative_to(PACKAGE), functions) for path in MODULES]
    found += [name_problems(path.relative_to(ROOT), set()) for path in PYTHON]
    assert list(chain.from_iterable(found)) == []


def test_no_two_files_of_the_package_share_a_name() -> None:
    assert repeated_names(MODULES) == []


def test_the_root_of_the_package_holds_no_module() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def body(lines: int, indent: str = "    ") -> str:
    return f"{indent}pass\n" * lines


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param("def f():\n" + body(50), "f has 51 lines; at most 50", id="function"),
        pytest.param(
            "@triton.jit\ndef f():\n" + body(150), "f has 151 lines; at most 150", id="kernel"
        ),
        pytest.param(
            "@triton.jit(do_not_specialize=[])\ndef f():\n" + body(150),
            "f has 151 lines; at most 150",
            id="kernel-with-options",
        ),
        pytest.param(
            "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(31)),
            "A has 31 public methods; at most 30",
            id="class",
        ),
    ],
)
def test_what_is_too_long_is_seen(source: str, problem: str) -> None:
    assert size_problems(source) == [problem]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param('def f():\n    """' + "\n" * 30 + '    """\n' + body(49), id="function"),
        pytest.param("@jit\ndef f():\n" + body(149), id="kernel"),
    ],
)
def test_what_just_fits_is_allowed(source: str) -> None:
    assert size_problems(source) == []


def test_names_that_say_nothing_or_hide_something_are_seen() -> None:
    assert name_problems(Path("utils/show.py"), {"show"}) == [
        "utils says nothing about what is in it",
        "show is also the name of a public function",
    ]


def test_a_repeated_file_name_is_seen() -> None:
    paths = ["a/mask.py", "b/mask.py", "a/__init__.py", "b/__init__.py", "b/bands.py"]
    assert repeated_names([Path(path) for path in paths]) == ["mask.py"]


# What the core needs


def third_party(source: str, allowed: set[str]) -> list[str]:
    """The absolute imports of a module, wherever they stand, of packages that are not allowed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return [f"imports {name}" for name in sorted(names) if name.partition(".")[0] not in allowed]


# Backends that are chosen only where these packages are installed.
EXTRA_IMPORTS = {"backends/cpu": {"numba", "numpy"}, "backends/triton": {"triton"}}


def test_the_core_needs_pytorch_alone() -> None:
    problems: list[str] = []
    for path in chain.from_iterable((PACKAGE / layer).rglob("*.py") for layer in CORE):
        extra = EXTRA_IMPORTS.get(path.parent.relative_to(PACKAGE).as_posix(), set[str]())
        problems += [
            f"{place(path)} {one}" for one in third_party(path.read_text(), ALLOWED | extra)
        ]
    assert problems == []


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        pytest.param("import rich.table", ["imports rich.table"], id="third-party"),
        pytest.param("from numpy import array", ["imports numpy"], id="from"),
        pytest.param("def f():\n    import triton", ["imports triton"], id="inside a function"),
        pytest.param("import math, torch.utils\nfrom regard.masks import Causal", [], id="allowed"),
    ],
)
def test_an_import_that_the_core_may_not_have_is_seen(source: str, problems: list[str]) -> None:
    assert third_party(source, ALLOWED) == problems


def test_no_module_is_imported_by_its_name_as_a_string() -> None:
    pattern = re.compile(r"""import_module\(\s*f?["']regard""")
    assert [place(path) for path in MODULES if pattern.search(path.read_text())] == []


def loaded_by(statement: str) -> set[str]:
    """The top-level third-party packages that a statement loads in a fresh process after torch."""
    script = dedent(f"""
        import json, sys
        import torch
        before = set(sys.modules)
        {statement}
        print(json.dumps(sorted(set(sys.modules) - before)))
    """)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in json.loads(run.stdout)}
    return (
        {top for top in tops if not top.startswith("_")}
        - {"regard", "torch"}
        - set(sys.stdlib_module_names)
    )


def test_import_regard_loads_nothing_but_pytorch() -> None:
    assert loaded_by("import regard") == set()


def test_a_package_loaded_beside_pytorch_is_seen() -> None:
    assert loaded_by("import rich") == {"rich"}


# An environment of PyTorch alone


# What PyTorch itself requires; NumPy is none of it.
REQUIRED = {
    "regard",
    "torch",
    "typing_extensions",
    "filelock",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
}
REQUIRED |= {"markupsafe", "fsspec", "setuptools", "functorch", "torchgen"}


def run_with_pytorch_alone(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process in which every other package is not installed."""
    hide = dedent(f"""
        import sys, warnings
        from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

        class Hiding(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                spec = super().find_spec(name, path, target)
                installed = "site-packages" in repr(spec)
                return None if installed and name.partition(".")[0] not in {REQUIRED} else spec

        sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Hiding]
        warnings.filterwarnings("ignore", message=".*NumPy.*")
    """)
    code = hide + dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )


def test_pytorch_alone_answers_observes_checks_and_draws(tmp_path: Path) -> None:
    done = run_with_pytorch_alone(
        """
        import torch, regard

        query = torch.randn(2, 50, 8)
        A = regard.attend(query, query, mask=regard.Causal())
        A @ query, A.entropy(), A.topk(3), A.to_dense()
        layer = regard.nn.SelfAttention(8, 2)
        with regard.observe(layer) as seen:
            layer(query)
        regard.page(seen, "attention.html")
        print(regard.check(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).verdict)
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("right\n", "")
    assert (tmp_path / "attention.html").exists()


def test_a_missing_package_is_an_error_that_says_how_to_install_it(tmp_path: Path) -> None:
    done = run_with_pytorch_alone(
        "import regard, torch\nregard.plot.map(regard.attend(torch.eye(3), torch.eye(3)))", tmp_path
    )
    assert "    Run: pip install matplotlib\n" in done.stderr
