"""Tabulate what the compiled CUDA kernels take of a GPU: registers, spills, shared and constant memory.

    python -m tools.maintainers.cuda_table            compile kernel_src/cuda/ and write kernel_src/cuda/REGISTERS.json
    python -m tools.maintainers.cuda_table --check    compile, and fail on a spill or where the file says something else

No GPU is needed, only the compiler of the CUDA release in RELEASE. A spill is a register kept in memory.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from tools.build import load_build_toml
from tools.toolkits import toolkit

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "kernel_src" / "cuda" / "REGISTERS.json"
RELEASE = "cu130"
ARCHS = ("80", "90", "100")

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def sources() -> List[Path]:
    return sorted((ROOT / "kernel_src" / "cuda").rglob("*.cu"))


def short_name(symbol: str) -> str:
    """A kernel's name with its template arguments, without namespaces and parameters."""
    name = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"packfree::|\(anonymous namespace\)::", "", name)
    return re.sub(r"^void ", "", name[: name.index("(")] if "(" in name else name)


def rows_of(source: Path, log: str) -> List[Dict[str, Any]]:
    """One row a kernel and architecture from what ``ptxas -v`` prints."""
    rows = []
    for entry in _ENTRY.finditer(log):
        def bytes_of(memory: str, text: str = entry["rest"]) -> int:
            return sum(int(size) for size in re.findall(rf"(\d+) bytes {memory}", text))

        row = {"file": source.relative_to(ROOT / "kernel_src").as_posix(), "kernel": short_name(entry["symbol"])}
        row.update(arch=f"sm_{entry['arch']}", registers=int(entry["registers"]))
        row.update(spilled=int(entry["stores"]) + int(entry["loads"]), stack=int(entry["stack"]))
        row.update(shared=bytes_of("smem"), constant=bytes_of(r"cmem\[0\]"))
        rows.append(row)
    return rows


def compiled() -> List[Dict[str, Any]]:
    """Every kernel in every architecture, compiled as the variants are."""
    section = load_build_toml()["kernel"]["cuda"]
    command = [str(toolkit(RELEASE).nvcc), "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-cubin"]
    command += [*section["cuda-flags"], *(f"-I{ROOT / folder}" for folder in section["include"])]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for source in sources():
            for arch in ARCHS:
                flags = [f"-arch=sm_{arch}", str(source), "-o", f"{scratch}/kernels.cubin"]
                done = subprocess.run([*command, *flags], capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"cuda_table: {source} does not compile\n{done.stderr}")
                rows += rows_of(source, done.stderr)
    return sorted(rows, key=lambda row: (row["file"], row["kernel"], int(row["arch"][3:])))


def text_of(rows: List[Dict[str, Any]]) -> str:
    """One line a row, so that a change shows as a line."""
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on spills or a stale table")
    arguments = parser.parse_args()
    rows = compiled()
    spilled = [f"{row['kernel']} on {row['arch']}" for row in rows if row["spilled"]]
    if arguments.check and text_of(rows) != TABLE.read_text():
        sys.exit(f"cuda_table: {TABLE.relative_to(ROOT)} is out of step; run: python -m tools.maintainers.cuda_table")
    if not arguments.check:
        TABLE.write_text(text_of(rows))
    if spilled:
        sys.exit(f"cuda_table: registers spill in {', '.join(spilled)}")
    print(f"cuda_table: {len(rows)} kernels and architectures, none spills")


if __name__ == "__main__":
    main()
