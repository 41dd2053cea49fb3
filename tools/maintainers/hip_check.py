"""Compile the CUDA C++ kernels for AMD GPUs, as far as Debian's packages go, and tabulate registers and spills.

    python -m tools.maintainers.hip_check           both halves of each source for gfx942 (MI300) and gfx1030 (RDNA 2)
    python -m tools.maintainers.hip_check gfx90a    for another; assembly lies in .toolkits/hip/out

No GPU is needed, and none has run what comes out. hip/ beside this file has CUDA's names in HIP's words; the sources
are those of the CUDA variants. Debian's clang, HIP headers and device libraries are fetched once into .toolkits/hip/
(60 MB) and installed nowhere. Its HIP is 5.2, which is older than gfx942: of the device libraries the constant that
names the architecture is gfx940's. So this shows that the sources are HIP, and is no way to build a variant for ROCm 7.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

from tools.maintainers.cuda_table import short_name, sources
from tools.toolkits import CACHE, ROOT, ToolkitMissing, unpack_debian

PLACE = CACHE / "hip"
USR = PLACE / "debian" / "usr"
BITCODE = USR / "lib" / "x86_64-linux-gnu" / "amdgcn" / "bitcode"
COMPILER = USR / "lib" / "llvm-19" / "bin" / "clang++"
ARCHS = ("gfx942", "gfx1030")
PACKAGES = (
    "clang-19", "libclang-cpp19", "libllvm19", "libclang-common-19-dev", "lld-19", "rocm-device-libs",
    "libamdhip64-dev", "libhsa-runtime-dev",
)  # fmt: skip
# Flags as in build.toml: no contraction, so that all paths of a kernel round alike.
FLAGS = ("-x", "hip", "-mcode-object-version=4", "-std=c++20", "-O3", "-ffp-contract=off",
         "-D__HIP_PLATFORM_AMD__", "-Wno-everything", "-include", "cuda_runtime.h")  # fmt: skip
# Registers, bytes of them that spilled, shared memory, a thread's own memory, lanes of a wave.
_NUMBERS = ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size", "private_segment_fixed_size",
            "wavefront_size")  # fmt: skip


def has_toolkit() -> bool:
    return BITCODE.exists() and COMPILER.exists()


def complete_toolkit() -> None:
    """Raises ToolkitMissing where it cannot be fetched."""
    if has_toolkit():
        return
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    unpack_debian(PLACE, "bookworm main", "amd64", ["download", *PACKAGES])
    shutil.copy(BITCODE / "oclc_isa_version_940.bc", BITCODE / "oclc_isa_version_942.bc")


def compiled(source: Path, half: str, arch: str) -> str:
    """The assembly of one half of ``source``: ``device`` or ``host``. Exits where it does not compile."""
    target = PLACE / "out" / f"{source.stem}_{arch}_{half}.s"
    target.parent.mkdir(exist_ok=True)
    folders = [ROOT / "tools" / "maintainers" / "hip", USR / "include", ROOT / "kernel_src"]
    command = [str(COMPILER), *FLAGS, f"--offload-arch={arch}", f"--cuda-{half}-only", f"--rocm-path={USR}",
               f"--rocm-device-lib-path={BITCODE}", *(f"-I{folder}" for folder in folders), "-S", str(source),
               "-o", str(target)]  # fmt: skip
    libraries = os.pathsep.join(str(USR / "lib" / name) for name in ("x86_64-linux-gnu", "llvm-19/lib"))
    done = subprocess.run(command, env=dict(os.environ, LD_LIBRARY_PATH=libraries), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"hip_check: {source.name} does not compile for {arch}, {half}\n{done.stderr[:2000]}")
    return target.read_text()


def kernels_of(assembly: str) -> List[Tuple[str, Dict[str, int]]]:
    """Name and numbers of each kernel, from the metadata at the end of the device's assembly."""
    found = []
    for entry in re.split(r"\n  - (?=\.a\w+:)", assembly)[1:]:
        symbol = re.search(r"\.name:\s+(\S+)", entry)[1]
        numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", entry)[1]) for name in _NUMBERS}
        found.append((short_name(symbol), numbers))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", default=ARCHS, help="targets as LLVM calls them")
    arguments = parser.parse_args()
    try:
        complete_toolkit()
    except ToolkitMissing as missing:
        sys.exit(f"hip_check: {missing}")
    for arch in arguments.archs:
        count = 0
        for source in sources():
            compiled(source, "host", arch)
            for name, numbers in kernels_of(compiled(source, "device", arch)):
                print(f"{source.name:28} {name:64} {' '.join(f'{key} {value}' for key, value in numbers.items())}")
                count += 1
        print(f"hip_check: {count} kernels of {len(sources())} sources compile for {arch}; none has run")


if __name__ == "__main__":
    main()
