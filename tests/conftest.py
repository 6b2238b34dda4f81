"""What every test runs under: fixed random numbers, no network, poisoned memory."""

import gc
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zlib import crc32

# Before torch and transformers are imported: cuBLAS is deterministic only with a fixed workspace,
# and no test may fetch anything.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    import regard
    from pages import Open, Serve

# One profile, on a laptop as in CI: the same examples every time, and no deadline because a loaded
# machine is not a bug. Both names exist so that CI can never become the laxer one unnoticed.
for profile in ("default", "ci"):
    settings.register_profile(
        profile,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=True,
        # Drawing tensors is slow on a loaded machine; all other health checks stay on.
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("ci" if "CI" in os.environ else "default")
# What `make test` draws of each law; everything else draws 100.
settings.register_profile("quick", settings(), max_examples=30)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores already


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in `make test`, as it leaves out the tests and cases marked full."""
    if config.getoption("markexpr") == "not full":
        settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves out, and skip what this machine cannot run."""
    mark_what_is_not_sampled(items)
    lacking = {
        "gpu": None if torch.cuda.is_available() else "needs an NVIDIA GPU; torch sees none",
        "browser": None if chromium_path() else "needs chromium on the PATH; apt install chromium",
    }
    for item in items:
        for marker, reason in lacking.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def mark_what_is_not_sampled(items: Iterable[pytest.Item]) -> None:
    """Mark all but n cases of each test that is marked sampled(n) as full.

    A checksum of its name draws a case: the same one each time, and from the whole of a table.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for some in cases.values():
        (number,) = cast(pytest.Mark, some[0].get_closest_marker("sampled")).args
        some.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in some[number:]:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Hide what lives as long as the tests from the garbage collector, which would visit it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """No advice of transformers on options that random models do not have."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(60)
    yield
    transformers.logging.set_verbosity(level)


def chromium_path() -> str | None:
    """Where Chromium is; None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN, so that memory nobody wrote cannot pass; no float atomics."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_open_figures() -> Iterator[None]:
    """Close the figures of pyplot: examples of plots leave theirs open, as a notebook would."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True, scope="session")
def refused_layers_are_nowhere() -> Iterator[None]:
    """Whatever a test observes: a layer that is refused is in no recording, and in no file."""
    from regard.capture.recorder import Recorder

    close = Recorder.close

    def checked(keeper: Recorder) -> None:
        close(keeper)
        check_refused(keeper._refused, keeper._seen)

    # Not observe itself: one more frame would move the line that its warnings name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "close", checked)
        yield


def check_refused(names: Iterable[str], seen: "regard.Recording") -> None:
    """No layer is there of a module whose attention cannot be kept."""
    for name in names:
        there = [layer for layer in seen if re.fullmatch(rf"{re.escape(name)}([#[].*)?", layer)]
        assert not there, f"refused, and in the recording: {there}"


@pytest.fixture
def chromium() -> str:
    """The executable for playwright's ``launch(executable_path=...)``; mark the test `browser`."""
    path = chromium_path()
    assert path is not None, "mark this test with @pytest.mark.browser: it is skipped without one"
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """The installed Chromium, one for each worker.

    Its event loop stays in the main thread: a test that needs a loop of its own starts a thread.
    """
    import pages

    with pages.chromium() as browser:
        yield browser


@pytest.fixture
def show(browser: "Browser", tmp_path: Path) -> Iterator["Open"]:
    """Opens a recording as a page; any error, dialog or request of the page fails the test."""
    import pages

    with pages.opener(browser, tmp_path) as show:
        yield show


@pytest.fixture
def serve(browser: "Browser") -> Iterator["Serve"]:
    """Serves a recording and opens its page."""
    import pages

    with pages.server_opener(browser) as serve:
        yield serve
