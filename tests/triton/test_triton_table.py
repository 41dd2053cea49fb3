"""The committed tables of what the Triton kernels take of each kind of GPU, one for each release of Triton."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import triton

from tests.conftest import BUILD, ROOT, load_tool

TABLES = ROOT / "benchmarks" / "results" / "triton_targets"
TABLE = TABLES / f"{triton.__version__.split('+')[0]}.json"
needs_table = pytest.mark.skipif(not TABLE.exists(), reason=f"there is no table of Triton {triton.__version__}")


def check(root=ROOT):
    """Run the tool's check in a process of its own, where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.maintainers.triton_table", "--check"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


@needs_table
def test_table_is_of_todays_kernels_which_fit_and_do_not_spill():
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    targets = {row["target"] for row in json.loads(TABLE.read_text())["rows"]}
    assert targets == {"sm_80", "sm_90", "sm_100", "gfx942"}


@pytest.fixture
def copy(tmp_path):
    """The tool and the package it looks at, and no table."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "build").symlink_to(BUILD)
    (tmp_path / "benchmarks" / "results" / TABLES.name).mkdir(parents=True)
    return tmp_path


@needs_table
def test_check_notices_what_is_wrong(copy):
    """A launch that is not in the table, one that nothing makes, and what a kernel must not do."""
    table = json.loads(TABLE.read_text())
    table["rows"][0]["launch"] = "another"
    table["rows"][1]["spilled"] = 8888
    table["rows"][2]["shared"] = 2**20
    table["rows"][3]["hazards"] = ["has a product that sums over 8"]
    (copy / TABLE.relative_to(ROOT)).write_text(json.dumps(table))
    done = check(copy)
    assert done.returncode != 0
    for text in (
        "has no row of", "that nothing launches", "spills 8888 bytes a thread", "wants 1048576 bytes",
        "has a product that sums over 8",
    ):  # fmt: skip
        assert text in done.stderr


def test_a_release_without_a_table_says_so(copy):
    (copy / "benchmarks" / "results" / TABLES.name / "3.1.4.json").write_text('{"rows": []}')
    done = check(copy)
    assert done.returncode != 0
    release = TABLE.stem
    assert done.stderr.splitlines() == [f"triton_table: there is no table of Triton {release}, only of 3.1.4"]


def test_products_that_sum_over_little_are_found():
    products = load_tool("maintainers.triton_products")
    product = "%a = tt.dot %x, %y, %z, inputPrecision = tf32x3 : "
    text = product + "tensor<64x16xf32> * tensor<16x32xf32> -> tensor<64x32xf32>\n"
    text += product + "tensor<32x{axis}xf32> * tensor<{axis}x32xf32> -> tensor<32x32xf32>\n"
    assert list(products.hazards(text.replace("{axis}", "8"))) == ["has a product that sums over 8"]
    assert list(products.hazards(text.replace("{axis}", "16"))) == []


class _Source:
    """What the tool reads of a kernel."""

    def __init__(self, src):
        self.src, self.fn = src, type("Function", (), {"__globals__": {}})


def test_a_new_name_is_no_new_kernel():
    """A row stays that of its kernel where variables and arguments are renamed, and nothing else."""
    code_of = load_tool("maintainers.triton_table").code_of
    code = "def kernel(x, count, N: C):\n    for i in range(count):\n        rows = x + i\n        store(rows, N)\n"
    renamed = code.replace("rows", "values").replace("count", "most").replace("def kernel(x", "def kernel(q")
    assert code_of(_Source(code)) == code_of(_Source(renamed.replace("= x", "= q")))
    for other in (code.replace("x + i", "i + x"), code.replace("store", "load"), code.replace("rows, N", "N, rows")):
        assert code_of(_Source(code)) != code_of(_Source(other))
