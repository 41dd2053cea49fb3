"""Loads the kernel once, as users do, from build/; fills unwritten outputs with NaN in every test."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/packfree-kernels"

# PACKFREE_BUILD names another build folder to test, for example one with a sanitizer.
BUILD = Path(os.environ.get("PACKFREE_BUILD", ROOT / "build"))

os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={BUILD}"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PACKFREE_DEBUG"] = "1"
# Triton kernels run in Triton's interpreter, on CPU tensors; it is chosen when a kernel is defined.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.harness import tolerance  # noqa: E402
from tests.harness.kernel import available_tiers, load_kernel  # noqa: E402
from tests.models.other_transformers import admit_installed_kernels  # noqa: E402

admit_installed_kernels()

# Workers of pytest-xdist share the cores: tests that need more threads ask for them.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def load_tool(name: str) -> ModuleType:
    """The module ``name`` of tools/, for example ``build`` or ``maintainers.cuda_table``."""
    # Those that are scripts import one another by bare names: a script's own folder is on its path.
    if str(ROOT / "tools") not in sys.path:
        sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module(f"tools.{name}")


@pytest.fixture(scope="session")
def kernel():
    """The package, loaded through ``kernels.get_kernel``."""
    return load_kernel()


@pytest.fixture(params=available_tiers())
def tier(request, kernel, monkeypatch):
    """Each instruction-set tier that this CPU has, selected for the test."""
    monkeypatch.setenv("PACKFREE_CPU_TIER", request.param)
    assert kernel.cpu_tier() == request.param
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The short set (``-m kernels_ci``, under a minute) runs the one tier that this CPU picks by itself."""
    if config.getoption("markexpr") != "kernels_ci":
        return
    best = available_tiers()[-1]
    kept, dropped = [], []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        (kept if parameters.get("tier", best) == best else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_report_header():
    """Shown with -v: what is under test."""
    kernel = load_kernel()
    return f"packfree: {Path(kernel.__file__).parent.name}, tier {kernel.cpu_tier()}"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_sessionfinish(session):
    """A worker of pytest-xdist tells the shares of the error budget to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["shares"] = [[*key, share] for key, share in tolerance.SHARES.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for *key, share in getattr(node, "workeroutput", {}).get("shares", ()):
        tolerance.note_share(tuple(key), share)


def pytest_terminal_summary(terminalreporter):
    if tolerance.SHARES:
        terminalreporter.section("largest share of the error budget, by tensor")
        terminalreporter.write_line(tolerance.usage_table())
