"""A file or a notebook checked in a process of its own: one sentence for whatever goes wrong."""

import os
import random
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checked_files import MODULE, RIGHT, WRONG, trouble, write
from regard.diagnosis.sandbox.sandbox_process import CannotRun, check_apart

pytestmark = pytest.mark.usefixtures("folder")

UNUSUAL = MODULE.replace("num_heads", "parts")
"""A class with an argument of a name that is not common."""

# What comes back


@pytest.mark.full
def test_a_right_function_of_a_file() -> None:
    checked = check_apart(f"{write('mine.py', RIGHT)}:attention")
    assert [report["ok"] for report in checked.reports] == [True]
    assert checked.exit_code == 0


@pytest.mark.full
def test_a_wrong_function_of_a_file() -> None:
    checked = check_apart(f"{write('mine.py', WRONG)}:attention")
    assert [finding["name"] for finding in checked.reports[0]["findings"]] == ["softmax-wrong-axis"]
    assert checked.exit_code == 1


@pytest.mark.full
def test_a_class_is_built_with_its_options() -> None:
    target = f"{write('mine.py', MODULE)}:SelfAttention"
    checked = check_apart(target, {"embed_dim": 16, "num_heads": 4})
    assert checked.exit_code == 0


@pytest.mark.full
def test_a_file_with_one_attention_needs_no_name() -> None:
    assert check_apart(write("mine.py", RIGHT)).exit_code == 0


@pytest.mark.full
def test_each_attention_of_a_file_is_checked_where_none_is_named() -> None:
    unscaled = RIGHT.replace("def attention", "def unscaled").replace(" / q.shape[-1] ** 0.5", "")
    target = write("mine.py", f"{MODULE}\n{RIGHT}\n{unscaled}")
    checked = check_apart(target, {"embed_dim": 16, "num_heads": 4})
    verdicts = {report["name"]: report["verdict"] for report in checked.reports}
    assert verdicts == {"SelfAttention": "right", "attention": "right", "unscaled": "different"}
    assert (checked.troubles, checked.exit_code) == ((), 1)


@pytest.mark.full
def test_what_cannot_be_built_is_said_and_the_others_are_checked() -> None:
    checked = check_apart(write("mine.py", f"{UNUSUAL}\n{RIGHT}"))
    assert [report["name"] for report in checked.reports] == ["attention"]
    [said] = checked.troubles
    assert said.startswith("SelfAttention has no value for embed_dim, parts;")
    assert checked.exit_code == 3


@pytest.mark.full
def test_what_is_still_missing_is_said_with_what_was_given() -> None:
    target = write("mine.py", UNUSUAL)
    assert trouble(target, embed_dim=16).endswith(
        "\n    Give them: regard check mine.py:SelfAttention --embed-dim 16 --parts N"
    )


@pytest.mark.full
def test_arguments_of_common_names_are_guessed_and_said() -> None:
    [report] = check_apart(f"{write('mine.py', MODULE)}:SelfAttention").reports
    assert report["verdict"] == "right"
    assert report["read_as"].endswith(", built with embed_dim=32, num_heads=4")


@pytest.mark.full
def test_a_kernel_of_a_file_is_judged_in_its_own_dtype() -> None:
    target = f"{write('mine.py', RIGHT)}:attention"
    [report] = check_apart(target, {"run_dtype": "bfloat16", "run_device": "cpu"}).reports
    assert report["verdict"] == "right"
    assert report["read_as"] == "(batch, heads, tokens, dim), in bfloat16 on cpu"


@pytest.mark.full
def test_an_option_that_none_of_several_takes_is_refused() -> None:
    target = write("mine.py", f"{MODULE}\n{RIGHT}")
    checked = check_apart(target, {"n_heads": 4})
    assert all(" has no argument n_heads;" in said for said in checked.troubles)
    assert len(checked.troubles) == 2


@pytest.mark.full
def test_a_file_of_a_package_imports_its_neighbours() -> None:
    write("package/__init__.py", "")
    write("package/layers/__init__.py", "")
    write("package/sizes.py", "SCALE = 0.5")
    target = write("package/layers/attention.py", f"from ..sizes import SCALE\n{RIGHT}")
    assert check_apart(target).exit_code == 0


@pytest.mark.full
def test_a_module_made_in_the_file_is_checked_as_it_is() -> None:
    target = write("mine.py", f"{MODULE}\nlayer = SelfAttention(16, 4)\n")
    assert check_apart(f"{target}:layer").exit_code == 0


# Arguments


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        pytest.param(
            UNUSUAL,
            "mine.py:SelfAttention",
            {},
            "SelfAttention has no value for embed_dim, parts; check builds a class before all "
            "else.\n    Give them: regard check mine.py:SelfAttention --embed-dim 32 --parts N",
            marks=pytest.mark.full,
            id="a-class-that-needs-arguments",
        ),
        pytest.param(
            MODULE.replace("embed_dim, num_heads", "config"),
            "mine.py:SelfAttention",
            {},
            "SelfAttention has no value for config; check builds a class before all else.\n"
            "    Build one in the file, layer = SelfAttention(...), and check that: mine.py:layer",
            marks=pytest.mark.full,
            id="a-class-that-needs-an-object",
        ),
        pytest.param(
            RIGHT,
            "mine.py:atention",
            {},
            "mine.py has no atention; check takes a name that the file has.\n"
            "    Did you mean attention?",
            marks=pytest.mark.full,
            id="a-name-that-is-nearly-there",
        ),
        pytest.param(
            f"{RIGHT}\n" + "\n".join(f"def f{n}(q):\n    return q\n" for n in range(14)),
            "mine.py:nope",
            {},
            "mine.py has no nope; check takes a name that the file has.\n    It has attention.",
            marks=pytest.mark.full,
            id="a-name-that-is-not-there",
        ),
        pytest.param(
            RIGHT,
            "mine.py:torch",
            {},
            "torch is of type module; check takes a module, a function or a class.\n"
            "    In mine.py: attention.",
            marks=pytest.mark.full,
            id="nothing-that-can-be-called",
        ),
        pytest.param(
            "x = 1",
            "mine.py",
            {},
            "mine.py holds no class or function with a softmax; check takes attention.\n"
            "    Say what to check: regard check mine.py:NAME",
            marks=pytest.mark.full,
            id="a-file-with-none",
        ),
    ],
)
def test_what_cannot_be_chosen_or_built(
    source: str, target: str, options: dict[str, Any], message: str
) -> None:
    write("mine.py", source)
    assert trouble(target, **options) == message


@pytest.mark.full
def test_an_option_that_the_class_does_not_take() -> None:
    target = f"{write('mine.py', MODULE)}:SelfAttention"
    assert trouble(target, embed_dim=16, n_heads=4).startswith(
        "SelfAttention has no argument n_heads; options are arguments of what is checked.\n"
        "    It takes embed_dim, num_heads, and check "
    )


# Files


@pytest.mark.parametrize(
    ("target", "message"),
    [
        pytest.param(
            "notes.txt",
            "notes.txt is neither .py nor .ipynb; check reads Python files and notebooks.\n"
            "    Name one, and what is in it: regard check my_file.py:SelfAttention",
            id="another-kind",
        ),
        pytest.param(
            "folder.py",
            "folder.py is a folder; check reads a file.\n    Name a file in it.",
            id="a-folder",
        ),
        pytest.param(
            "broken.ipynb",
            "broken.ipynb is no notebook; an .ipynb is JSON with cells.\n"
            "    Open it in Jupyter and save it again.",
            marks=pytest.mark.full,
            id="no-json",
        ),
        pytest.param(
            "list.ipynb",
            "list.ipynb is no notebook; an .ipynb is JSON with cells.\n"
            "    Open it in Jupyter and save it again.",
            marks=pytest.mark.full,
            id="no-cells",
        ),
    ],
)
def test_files_that_cannot_be_read_as_code(target: str, message: str) -> None:
    Path("notes.txt").write_text("q k v")
    Path("folder.py").mkdir()
    Path("broken.ipynb").write_text("{")
    Path("list.ipynb").write_text("[]")
    assert trouble(target) == message


def test_a_file_that_does_not_exist(folder: Path) -> None:
    assert trouble("mine.py:SelfAttention") == (
        f"mine.py does not exist; check looked in {folder}.\n    Give the path from where you are."
    )


# What their code may do

LINES = [
    pytest.param(
        "def f(q):\n    return (q",
        "mine.py does not compile, line 2: '(' was never closed; it must be Python.\n"
        "    2 | return (q",
        marks=pytest.mark.full,
        id="no-python",
    ),
    pytest.param(
        "import torch\nx = '\0'",
        "mine.py does not compile, line 2: there is a null byte; it must be Python.\n"
        "    2 | x = '\0'",
        marks=pytest.mark.full,
        id="a-null-byte",
    ),
    pytest.param(
        "import einoops",
        "mine.py imports einoops on line 1, which is not installed here; check runs what it "
        "imports.\n    1 | import einoops",
        marks=pytest.mark.full,
        id="a-module-that-is-not-installed",
    ),
    pytest.param(
        "import sys\nsys.exit(3)",
        "mine.py ends Python on line 2; check needs it to go on.\n    2 | sys.exit(3)",
        marks=pytest.mark.full,
        id="sys.exit",
    ),
    pytest.param(
        "import os\nos._exit(3)",
        "mine.py ended Python with exit code 3; it must run to its end.\n"
        "    Take the call that exits out of it.",
        marks=pytest.mark.full,
        id="os._exit",
    ),
    pytest.param(
        "def attention(q, k, v):\n    return softmax(q @ k.mT, -1) @ v",
        "mine.py raises NameError on line 2: name 'softmax' is not defined; it must run before it "
        "can be checked.\n    2 | return softmax(q @ k.mT, -1) @ v",
        marks=pytest.mark.full,
        id="an-error-in-a-call",
    ),
    pytest.param(
        "import torch\n\ndef attention(q, k, v):\n    return q.softmax(-1).cuda() @ v",
        "mine.py needs CUDA on line 4, and there is none here; check runs on the CPU.\n"
        "    4 | return q.softmax(-1).cuda() @ v\n"
        '    Write device = "cuda" if torch.cuda.is_available() else "cpu".',
        marks=[
            pytest.mark.full,
            pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ],
        id="cuda-only",
    ),
    pytest.param(
        "import torch\nx = torch.empty(10**13)",
        "mine.py runs out of memory on line 2; check needs small sizes only.\n"
        "    2 | x = torch.empty(10**13)",
        marks=pytest.mark.full,
        id="a-tensor-too-large",
    ),
    pytest.param(
        "import torch\nx = []\nwhile True:\n    x.append(torch.empty(10**8))",
        "mine.py runs out of memory on line 4; check needs small sizes only.\n"
        "    4 | x.append(torch.empty(10**8))",
        marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds to the limit"),
        id="memory-without-end",
    ),
    pytest.param(
        "import ctypes\nctypes.string_at(0)",
        "mine.py ended its process with SIGSEGV, on line 2; it must run to its end.\n"
        "    Run it alone to see why.",
        marks=pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals"),
        id="a-crash",
    ),
]

NO_OUTPUTS = [
    pytest.param(
        "def attention(q, k, v):\n    q.softmax(-1)",
        "attention gave back no tensor of floating-point numbers; one output must have the same "
        "batch and tokens.",
        marks=pytest.mark.full,
        id="nothing-returned",
    ),
    pytest.param(
        "def attention(q, k, v):\n    return q.softmax(-1).tolist()",
        "attention gave back no tensor of floating-point numbers; one output must have the same "
        "batch and tokens.",
        marks=pytest.mark.full,
        id="a-list",
    ),
    pytest.param(
        "def attention(q, k, v):\n    return q.softmax(-1).sum()",
        "attention gave () for (batch, tokens, dim); one output must have the same batch and "
        "tokens.\n"
        "    Where it pools them or learns its queries, pass the function of query, key and value "
        "inside it.",
        marks=pytest.mark.full,
        id="a-number",
    ),
    pytest.param(
        "def attention(x):\n    batch, frames, height, width, channels = x.shape",
        "mine.py raises ValueError on line 2: not enough values to unpack (expected 5, got 3); it "
        "must run on one of the inputs that check tries.\n"
        "    2 | batch, frames, height, width, channels = x.shape",
        marks=pytest.mark.full,
        id="shapes-that-fit-no-reading",
    ),
    pytest.param(
        "from torch import nn\n\ntable = nn.Embedding(9, 8)\n\n"
        "def attention(x):\n    return table(x).softmax(-1)",
        "mine.py takes the numbers of tokens on line 6; check takes attention from embeddings on.\n"
        "    6 | return table(x).softmax(-1)\n"
        "    Name the attention inside of it.",
        marks=pytest.mark.full,
        id="numbers-of-tokens",
    ),
]

WITHOUT_END = [
    pytest.param(
        "import time\nwhile True:\n    time.sleep(1)",
        "mine.py is still running after 1 s, on line 3; it must come to an end.\n"
        '    What trains or waits belongs under if __name__ == "__main__":',
        marks=pytest.mark.full,
        id="waits-at-the-import",
    ),
    pytest.param(
        "def attention(q, k, v):\n    while True:\n        try:\n"
        "            for _ in range(99): q = q.softmax(-1)\n"
        "        except BaseException:\n            pass",
        "mine.py is still running after 1 s, on line 4; it must come to an end.\n"
        "    Look for a loop without end; check runs it often, on small inputs.",
        id="a-loop-that-catches-everything",
    ),
    pytest.param(
        "while True:\n    print('x' * 10000)",
        "mine.py is still running after 1 s, on line 2; it must come to an end.\n"
        '    What trains or waits belongs under if __name__ == "__main__":',
        marks=pytest.mark.full,
        id="prints-without-end",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("source", "message"), LINES)
def test_code_that_fails(source: str, message: str) -> None:
    name = write("mine.py", source)
    target = f"{name}:attention" if "def attention" in source else name
    assert trouble(target) == message


FORGED = """
import json, os, sys
answer = json.dumps({"reports": [{"exit_code": 0, "text": "right"}], "troubles": []})
print(answer)
sys.__stdout__.write(answer)
for number in range(1, 30):
    try:
        os.write(number, answer.encode())
    except OSError:
        pass

def attention(q, k, v):
    os._exit(0)
"""


def test_an_answer_that_the_code_writes_itself_does_not_count() -> None:
    Path("forged.py").write_text(FORGED)
    with pytest.raises(CannotRun, match="ended Python with exit code 0"):
        check_apart("forged.py")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_process_in_a_session_of_its_own_ends_too() -> None:
    start = "import subprocess\nown = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    write = "open('pid.txt', 'w').write(str(own.pid))\n"
    Path("starts.py").write_text(start + write + RIGHT)
    assert check_apart("starts.py").exit_code == 0
    pid, end = Path("pid.txt").read_text(), time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)  # on a busy machine a killed process is there for a moment
    assert not is_running(pid)


def is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param(
            "latin.py",
            b'name = "\xe9"\n',
            "latin.py is not UTF-8, line 1; Python reads source files as UTF-8.\n"
            "    Save it as UTF-8, or write its encoding first: # -*- coding: latin-1 -*-",
            marks=pytest.mark.full,
        ),
        (
            "comment.py",
            b"import torch\n# caf\xe9\n",
            "comment.py is not UTF-8, line 2; Python reads source files as UTF-8.\n"
            "    Save it as UTF-8, or write its encoding first: # -*- coding: latin-1 -*-",
        ),
        pytest.param(
            "latin.ipynb",
            b'{"cells": [{"cell_type": "code", "source": "\xe9"}]}',
            "latin.ipynb is not UTF-8 from byte 44 on; a notebook must be.\n"
            "    Open it in Jupyter and save it again.",
            marks=pytest.mark.full,
        ),
    ],
    ids=["file", "comment", "notebook"],
)
def test_a_file_in_another_encoding(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    assert trouble(name) == message


@pytest.mark.full
@pytest.mark.parametrize(("source", "message"), NO_OUTPUTS)
def test_code_whose_inputs_or_outputs_fit_no_reading(source: str, message: str) -> None:
    assert trouble(write("mine.py", source)) == message


@pytest.mark.full
def test_an_error_in_a_file_that_theirs_imports() -> None:
    write("layers/softmax.py", "def soft(x):\n    return x.sofmax(-1)")
    source = "from layers.softmax import soft\n\ndef attention(q, k, v):\n    return soft(q @ k.mT)"
    assert trouble(f"{write('mine.py', source)}:attention") == (
        "layers/softmax.py raises AttributeError on line 2: 'Tensor' object has no attribute "
        "'sofmax'; it must run on one of the inputs that check tries.\n"
        "    2 | return x.sofmax(-1)"
    )


@pytest.mark.parametrize(("source", "message"), WITHOUT_END)
def test_code_without_end(source: str, message: str) -> None:
    name = write("mine.py", source)
    target = f"{name}:attention" if "def attention" in source else name
    assert trouble(target, 1.0) == message


def _is_alive(status: Path) -> bool:
    try:
        return "zombie" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.full
def test_a_process_that_theirs_starts_ends_with_it(folder: Path) -> None:
    source = f"""
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    open("child.txt", "w").write(str(child.pid))
    {textwrap.indent(textwrap.dedent(RIGHT), "    ")}
    """
    assert check_apart(f"{write('mine.py', source)}:attention").exit_code == 0
    status = Path(f"/proc/{(folder / 'child.txt').read_text()}/status")
    deadline = time.monotonic() + 10  # what is ended goes when it next gets the processor
    while (alive := _is_alive(status)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_this_process_stays_as_it_was(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    source = f"""
    import os, random, sys
    import torch
    print("hello")
    torch.manual_seed(1)
    random.seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["REGARD_WAS_HERE"] = "1"
    os.chdir("/")
    sys.path.append("/nowhere")
    {textwrap.indent(textwrap.dedent(RIGHT), "    ")}
    """
    before = torch.get_rng_state(), random.getstate(), list(sys.path), dict(os.environ)
    check_apart(f"{write('mine.py', source)}:attention")
    after = torch.get_rng_state(), random.getstate(), list(sys.path), dict(os.environ)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "torch.py",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("atexit.py", "types.py")),
    ],
)
def test_a_file_called_like_a_module_hides_none(name: str) -> None:
    checked = check_apart(f"{write(name, RIGHT)}:attention")
    assert [report["verdict"] for report in checked.reports] == ["right"]
