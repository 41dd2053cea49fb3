"""Tabulate what the Triton kernels take of each kind of GPU, by the installed Triton: registers, spills, shared memory.

    python -m tools.maintainers.triton_table               what the table of this Triton lacks, for every target
    python -m tools.maintainers.triton_table --check       compile nothing: is the table whole, and does all fit?
    python -m tools.maintainers.triton_table --only kda    the kernels whose name holds a word, and write nothing

The launches of triton_calls.py are compiled (all of them: half an hour), and the results written to
benchmarks/results/triton_targets/RELEASE.json and triton_targets.md. The check fails where the table of this Triton
lacks a launch of today's code, where a launch does not fit the target's shared memory, where its products are of a kind
that triton_products.py has found to go wrong, or where it spills more than this Triton may (MOST_SPILLED).

Each Triton that a torch we support brings compiles otherwise, so each has a table. No GPU is needed: Triton brings its
compilers along. A kernel is known by its code, so that a change of it shows. Spilled bytes are those of a thread's
frame in memory: Triton keeps no arrays there, so what is in it is registers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton-cache"))
os.environ.update(LOCAL_KERNELS=f"org/packfree-kernels={ROOT / 'build'}", HF_HUB_OFFLINE="1")
# Kernels are compiled here, not interpreted, whatever the caller's tests do.
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import MockTensor, create_function_from_signature  # noqa: E402

from tools.maintainers.triton_calls import all_calls, launches_of  # noqa: E402
from tools.maintainers.triton_code import code_of  # noqa: E402
from tools.maintainers.triton_products import hazards, shortest_axis, transposed_operands  # noqa: E402

TABLES = ROOT / "benchmarks" / "results" / "triton_targets"
RELEASE = triton.__version__.split("+")[0]
TABLE = TABLES / f"{RELEASE}.json"
# Most bytes of a thread that a Triton keeps in memory in a launch, as its table shows: slower, no fault. More is one.
# 3.6 does it on gfx942 in the walks of a state of 256 x 256, else below 200; 3.8 on sm_100 in the backward walk of one
# of 128 x 128; 3.9 in that of 256 x 256.
MOST_SPILLED = {"3.6.0": 1444, "3.7.1": 88, "3.8.0": 192, "3.9.0": 56}


@dataclass(frozen=True)
class Row:
    """One launch compiled for one target.

    Attributes:
        launch: stands for the kernel's code and everything it is compiled for.
        registers: of a thread.
        spilled: bytes of a thread.
        shared: bytes of a block.
        shortest: the shortest axis of its products, 0 if it has none.
        hazards: what triton_products.py says of them.
    """

    kernel: str
    target: str
    call: str
    warps: int
    stages: int
    launch: str
    registers: int
    spilled: int
    shared: int
    shortest: int
    hazards: list[str]


@dataclass(frozen=True)
class Wanted:
    """A launch to compile: the first call that makes it, and what compiling takes."""

    kernel: str
    target: Any
    call: str
    warps: int
    stages: int
    launch: str
    source: ASTSource
    options: dict[str, Any]


def load_kernel() -> ModuleType:
    from kernels import get_kernel

    return get_kernel("org/packfree-kernels", version=1)


def name_of(target: Any) -> str:
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch


def gpu_target(target: Any) -> GPUTarget:
    return GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)


def compiled_by(launch: Any, target: Any) -> tuple[ASTSource, dict[str, Any]]:
    """Source and options of ``launch`` as Triton's own launcher would make them of its arguments."""
    backend = make_backend(gpu_target(target))
    arguments = [
        MockTensor(argument.dtype, list(argument.shape)) if isinstance(argument, torch.Tensor) else argument
        for argument in launch.arguments
    ]
    keywords = dict(launch.constants, num_warps=launch.num_warps, num_stages=launch.num_stages, debug=False)
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = bind(*arguments, **keywords)
    options, signature, constants, attributes = launch.kernel._pack_args(
        backend, keywords, bound, specialization, options
    )
    return ASTSource(launch.kernel, signature, constants, attributes), options.__dict__


def wanted_launches(kernel: ModuleType, only: str = "") -> list[Wanted]:
    """Every distinct launch of every call on every target."""
    launcher = importlib.import_module(f"{kernel.__name__}._triton.launch")
    devices = importlib.import_module(f"{kernel.__name__}._devices")
    calls = [call for call in all_calls() if call.op in devices.TRITON]
    missing = {op for op in devices.TRITON if not op.endswith("_bwd")} - {call.op for call in calls}
    if missing:
        sys.exit(f"triton_table: triton_calls.py has no call of {', '.join(sorted(missing))}")
    found: dict[tuple[str, str], Wanted] = {}
    for target in launcher.TARGETS:
        for call in calls:
            for launch in launches_of(kernel, target, call):
                module = launch.kernel.fn.__module__.removeprefix(f"{kernel.__name__}.")
                name = f"{module}.{launch.kernel.fn.__name__}"
                if only not in name:
                    continue
                source, options = compiled_by(launch, target)
                # Where a library lies is this machine's matter.
                chosen = sorted((key, str(value)) for key, value in options.items() if key != "extern_libs")
                types = list(source.signature.values())
                details = (types, sorted(source.constants.items()), sorted(source.attrs.items()), chosen)
                text = f"{code_of(launch.kernel)} {details}"
                digest = hashlib.sha256(text.encode()).hexdigest()[:12]
                wanted = Wanted(name, target, str(call), launch.num_warps, launch.num_stages, digest, source, options)
                found.setdefault((name_of(target), digest), wanted)
    return list(found.values())


def measured(wanted: Wanted) -> Row:
    compiled = triton.compile(wanted.source, target=gpu_target(wanted.target), options=wanted.options)
    if wanted.target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{field}:\s*(\d+)", text)[1]) for field in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
        registers, spilled = int(usage[1]), int(usage[2]) + int(usage[3])
    return Row(
        wanted.kernel, name_of(wanted.target), wanted.call, wanted.warps, wanted.stages, wanted.launch, registers,
        spilled, compiled.metadata.shared, shortest_axis(compiled.asm["ttir"]),
        sorted(_hazards(compiled.asm, name_of(wanted.target))),
    )  # fmt: skip


def _hazards(compiled: dict[str, str], target: str) -> set[str]:
    found = set(hazards(compiled["ttir"], target))
    if transposed_operands(compiled["ttgir"]):
        found.add("multiplies a product that it has transposed")
    return found


_wanted: list[Wanted] = []


def _measured_at(place: int) -> Row | str:
    """The row of a launch, or what went wrong; processes are forked with the list in memory."""
    try:
        return measured(_wanted[place])
    except Exception as error:  # a compiler's error of any kind is a line of the report
        wanted = _wanted[place]
        reason = str(error).strip().splitlines() or [""]
        return f"{wanted.kernel} for {name_of(wanted.target)} ({wanted.call}): {type(error).__name__}: {reason[0]}"


def known_rows(table: Path) -> dict[tuple[str, str], Row]:
    """The rows of a table by target and launch."""
    rows = [Row(**row) for row in json.loads(table.read_text())["rows"]] if table.exists() else []
    return {(row.target, row.launch): row for row in rows}


def compile_all(wanted: list[Wanted], processes: int) -> Iterator[Row | str]:
    """A row, or what went wrong, for each of ``wanted``, as they are done."""
    _wanted[:] = wanted
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        jobs = [pool.submit(_measured_at, place) for place in range(len(wanted))]
        for job in tqdm(as_completed(jobs), total=len(jobs), unit="launch"):
            yield job.result()


def complete(wanted: list[Wanted], processes: int) -> tuple[list[Row], list[str]]:
    """The table of ``wanted`` from what the file knows and what is compiled now, and failures.

    What is compiled is written as it comes, so that a run that is ended goes on where it was.
    """
    known = known_rows(TABLE)
    today = {(name_of(launch.target), launch.launch): launch for launch in wanted}
    rows = [known[key] for key in today if key in known]
    lacking = [launch for key, launch in today.items() if key not in known]
    failures = []
    for done, result in enumerate(compile_all(lacking, processes), 1):
        (failures if isinstance(result, str) else rows).append(result)
        if done % 20 == 0 or done == len(lacking):
            TABLE.parent.mkdir(parents=True, exist_ok=True)
            TABLE.write_text(json_of(rows))
    return rows, failures


def faults(rows: list[Row], limits: dict[str, int]) -> list[str]:
    """What no default configuration may do: spill, or want more shared memory than there is."""
    found, allowed = [], MOST_SPILLED.get(RELEASE, 0)
    for row in rows:
        where = f"{row.kernel} on {row.target} ({row.call})"
        if row.spilled > allowed:
            found.append(f"{where} spills {row.spilled} bytes a thread")
        if row.shared > limits[row.target]:
            found.append(f"{where} wants {row.shared} bytes of shared memory, of which there are {limits[row.target]}")
        found += [f"{where} {hazard}" for hazard in row.hazards]
    return found


def json_of(rows: list[Row]) -> str:
    """One line a row, in an order of its own, so that a change shows as a line."""
    ordered = sorted((asdict(row) for row in rows), key=lambda row: [str(value) for value in row.values()])
    lines = ",\n".join(f"  {json.dumps(row)}" for row in ordered)
    return f'{{"triton": "{RELEASE}", "rows": [\n{lines}\n]}}\n'


def release_order(table: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", table.stem)))


def spills_of(rows: list[Row]) -> str:
    spilling = [row.spilled for row in rows if row.spilled]
    if not spilling:
        return "none spills"
    return f"{len(spilling)} of {len(rows)} spill, {max(spilling)} bytes a thread at most"


def markdown_of(targets: list[str]) -> str:
    """Every release's table, newest first."""
    tables = sorted(TABLES.glob("*.json"), key=release_order, reverse=True)
    lines = [
        "# What the Triton kernels take",
        "",
        "Compiled on a machine without a GPU, by each Triton that a torch from 2.11 on brings:",
        "`python -m tools.maintainers.triton_table`. Each cell: registers a thread / KiB of shared memory a block, the",
        "most of all calls; bytes spilled, if any.",
    ]
    for table in tables:
        rows = list(known_rows(table).values())
        lines += ["", f"## Triton {table.stem}", "", f"{len(rows)} launches; {spills_of(rows)}.", ""]
        lines += section_of(rows, targets)
    return "\n".join(lines) + "\n"


def section_of(rows: list[Row], targets: list[str]) -> list[str]:
    """The most that any call takes, a line for each kernel and dtype."""
    most: dict[tuple[str, str], dict[str, tuple[int, int, int]]] = {}
    for row in rows:
        cell = most.setdefault((row.kernel, row.call.split()[-1]), {})
        numbers = (row.registers, row.spilled, row.shared)
        cell[row.target] = tuple(map(max, zip(cell.get(row.target, (0, 0, 0)), numbers)))
    lines = ["| kernel | dtype | " + " | ".join(targets) + " |", "|---|---|" + "---|" * len(targets)]
    for (name, dtype), cell in sorted(most.items()):
        texts = []
        for target in targets:
            registers, spilled, shared = cell.get(target, (0, 0, 0))
            text = f"{registers} / {shared / 1024:.0f}" + (f", spills {spilled}" if spilled else "")
            texts.append(text if registers else "")
        module, _, function = name.rpartition(".")
        family = module.removeprefix("_triton.").split(".")[0]
        lines.append(f"| {family} {function.strip('_').removesuffix('_kernel')} | {dtype} | {' | '.join(texts)} |")
    return lines


def no_table() -> str:
    there = ", ".join(table.stem for table in sorted(TABLES.glob("*.json"), key=release_order))
    return f"there is no table of Triton {RELEASE}, only of {there or 'no release'}"


def check(wanted: list[Wanted], limits: dict[str, int]) -> list[str]:
    """What is wrong with the committed table, told without compiling."""
    known = known_rows(TABLE)
    today = {(name_of(launch.target), launch.launch): launch for launch in wanted}
    lacking = sorted({f"{launch.kernel} ({launch.call})" for key, launch in today.items() if key not in known})
    found = [f"the table has no row of {name} as it is now" for name in lacking]
    found += sorted({f"the table has a row of {row.kernel} that nothing launches" for key, row in known.items()
                     if key not in today})  # fmt: skip
    return found + faults(list(known.values()), limits)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compile nothing; is the committed table right?")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that compile at the same time")
    parser.add_argument("--only", default="", metavar="WORD", help="compile kernels whose name holds it, write nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    kernel = load_kernel()
    targets = importlib.import_module(f"{kernel.__name__}._triton.launch").TARGETS
    limits = {name_of(target): target.shared_memory for target in targets}
    wanted = wanted_launches(kernel, arguments.only)
    if arguments.check and not TABLE.exists():
        found = [no_table()]
    elif arguments.check:
        found = check(wanted, limits)
    elif arguments.only:
        results = list(compile_all(wanted, arguments.processes))
        rows, found = [r for r in results if isinstance(r, Row)], [r for r in results if isinstance(r, str)]
        print("\n".join(section_of(rows, list(limits))))
        found += faults(rows, limits)
    else:
        rows, found = complete(wanted, arguments.processes)
        TABLE.write_text(json_of(rows))
        TABLES.with_suffix(".md").write_text(markdown_of(list(limits)))
        found += faults(rows, limits)
    if found:
        sys.exit("\n".join(f"triton_table: {text}" for text in found))
    launches = f"{len(wanted)} launches by Triton {RELEASE} on {len(limits)} targets"
    print(f"triton_table: {launches}, all fit; {spills_of(list(known_rows(TABLE).values()))}")


if __name__ == "__main__":
    main()
