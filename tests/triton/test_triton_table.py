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


class _Source:
    """What the tool reads of a kernel."""

    def __init__(self, src):
        self.src, self.fn = src, type("Function", (), {"__globals__": {}})


def test_a_new_name_is_no_new_kernel():
    """A row stays that of its kernel where variables and arguments are renamed, and nothing else."""
    code_of = load_tool("maintainers.triton_code").code_of
    code = "def kernel(x, count, N: C):\n    for i in range(count):\n        rows = x + i\n        store(rows, N)\n"
    renamed = code.replace("rows", "values").replace("count", "most").replace("def kernel(x", "def kernel(q")
    assert code_of(_Source(code)) == code_of(_Source(renamed.replace("= x", "= q")))
    for other in (code.replace("x + i", "i + x"), code.replace("store", "load"), code.replace("rows, N", "N, rows")):
        assert code_of(_Source(code)) != code_of(_Source(other))


ROUND = "%sum = scf.for %i = %c0 to %n step %c1 iter_args(%before = %zero) -> (tensor<64x32xf32>)  : i32 {"


def product(result, left, accumulator, rows=64, summed=16, columns=32):
    tiles = f"tensor<{rows}x{summed}xbf16> * tensor<{summed}x{columns}xbf16> -> tensor<{rows}x{columns}xf32>"
    return f"{result} = tt.dot {left}, %y, {accumulator}, inputPrecision = tf32 : {tiles} loc(#loc)"


def in_a_loop(*lines):
    return "\n".join((ROUND, *lines, "scf.yield %after : tensor<64x32xf32> loc(#loc)", "} {tt.disable_licm} loc(#loc)"))


TURNED = "%turned = tt.trans %cast {order = array<i32: 1, 0>} : tensor<64x32xbf16> -> tensor<32x64xbf16> loc(#loc)"
CAST = "%cast = arith.truncf %{} : tensor<64x32xf32> to tensor<64x32xbf16> loc(#loc)"
ONCE = in_a_loop(product("%after", "%x", "%before"))
PRODUCTS = {
    "short sum": (product("%a", "%x", "%zero", summed=8), "has a product that sums over 8"),
    "few columns": (product("%a", "%x", "%zero", columns=8), "has a product of 64 rows and 8 columns"),
    "few rows and columns": (product("%a", "%x", "%zero", rows=32, columns=8), None),
    "transposed operand": (
        "\n".join((product("%a", "%x", "%zero"), CAST.format("a"), TURNED, product("%b", "%turned", "%zero"))),
        "multiplies a product that it has transposed",
    ),
    "transposed sum of a loop": (
        "\n".join((ONCE, CAST.format("sum"), TURNED, product("%b", "%turned", "%zero"))),
        "multiplies a product that it has transposed",
    ),
    "operand as it is": (
        "\n".join((product("%a", "%x", "%zero"), CAST.format("a"), product("%b", "%cast", "%zero"))), None
    ),
    "transposed right operand": (
        "\n".join((product("%a", "%x", "%zero"), CAST.format("a"), TURNED, product("%y2", "%x", "%zero"))), None
    ),
    "two products of a loop": (
        in_a_loop(product("%a", "%x", "%before"), product("%after", "%x", "%a")),
        "adds two products to one accumulator in a round of a loop",
    ),
    "few rows of two products": (
        in_a_loop(product("%a", "%x", "%before", rows=32), product("%after", "%x", "%a", rows=32)), None
    ),
    "product of an earlier round": (
        in_a_loop(CAST.format("before"), product("%after", "%cast", "%zero")),
        "multiplies what a product of an earlier round gave",
    ),
    "sum of a loop": ("\n".join((ONCE, CAST.format("sum"), product("%b", "%cast", "%zero"))), None),
    "few rows of an earlier round": (
        in_a_loop(CAST.format("before"), product("%after", "%cast", "%zero", rows=32)), None
    ),
    "one product of a loop": (ONCE, None),
    "two products of no loop": ("\n".join((product("%a", "%x", "%zero"), product("%b", "%x", "%a"))), None),
}  # fmt: skip


ON_BLACKWELL = ("two products of a loop", "product of an earlier round")


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_products_that_some_triton_gets_wrong_are_found(name, target):
    text, expected = PRODUCTS[name]
    expected = None if name in ON_BLACKWELL and target != "sm_100" else expected
    assert list(load_tool("maintainers.triton_products").hazards(text, target)) == ([expected] if expected else [])


def test_transposed_operands_are_found_as_they_are_compiled():
    """In TTGIR a product goes through a layout, memory and a wait before it is an operand."""
    tile = "tensor<64x64xbf16, #linear>"
    lines = [
        "%a = ttng.warp_group_dot %x, %y, %zero {inputPrecision = 0 : i32, isAsync = true} : tensor<64x64xf32, #mma>",
        "%b:2 = ttng.warp_group_dot_wait %a, %x {pendings = 0 : i32} : tensor<64x64xf32, #mma>, !ttg.memdesc<64x64>",
        "%c = arith.truncf %b#0 : tensor<64x64xf32, #mma> to tensor<64x64xbf16, #mma>",
        f"%d = tt.trans %c {{order = array<i32: 1, 0>}} : tensor<64x64xbf16, #mma> -> {tile}",
        f"%e = ttg.local_alloc %d : ({tile}) -> !ttg.memdesc<64x64xbf16, #shared, #smem>",
        "%f = ttng.warp_group_dot %e, %y, %zero {inputPrecision = 0 : i32, isAsync = true} : tensor<64x64xf32, #mma>",
    ]
    count = load_tool("maintainers.triton_products").transposed_operands
    assert count("\n".join(lines)) == 1
    assert count("\n".join(lines).replace("tt.trans %c", "arith.copy %c")) == 0
    assert count("\n".join(lines).replace("%b#0", "%b#1")) == 0
