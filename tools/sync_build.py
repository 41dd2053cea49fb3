"""Write the src lists of build.toml from what lies in the tree, or check them.

    python tools/sync_build.py            write them
    python tools/sync_build.py --check    fail if one is out of step

build.toml knows no globs, and a kernel-builder sandbox holds only listed files, so a header that is missing here breaks
the real build and no local one.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".cpp", ".h", ".cu", ".cuh")


def files_under(*folders: str) -> List[str]:
    found = []
    for folder in folders:
        found += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(found)


def lists() -> Dict[str, List[str]]:
    """The files of each section of build.toml."""
    bindings = [name for name in files_under("torch-ext") if not name.endswith("/registration.h")]
    cuda_bindings = [name for name in bindings if name.endswith("_cuda.cpp")]
    cpu = files_under("kernel_src/common", "kernel_src/cpu")
    return {
        "torch": [name for name in bindings if name not in cuda_bindings],
        "kernel.cpu": cpu,
        # A CUDA build of torch loads the CUDA variant for CPU models too.
        "kernel.cpu_in_cuda": cpu,
        "kernel.cuda": files_under("kernel_src/cuda") + cuda_bindings,
    }


def synced(text: str) -> str:
    """``text`` of build.toml with every known section's src list replaced."""
    for section, names in lists().items():
        written = "src = [\n" + "".join(f'  "{name}",\n' for name in names) + "]"
        pattern = re.compile(rf"(^\[{re.escape(section)}\]\n(?:(?!^\[).*\n)*?)src = \[[^\]]*\]", re.MULTILINE)
        text, count = pattern.subn(lambda match, written=written: match.group(1) + written, text)
        if count != 1:
            sys.exit(f"sync_build: build.toml needs one src list in [{section}], found {count}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a list is out of step")
    arguments = parser.parse_args()
    path = ROOT / "build.toml"
    before = path.read_text()
    after = synced(before)
    if before == after:
        return
    if arguments.check:
        sys.exit("sync_build: build.toml's src lists are out of step with the tree; run: python tools/sync_build.py")
    path.write_text(after)
    print("sync_build: build.toml updated")


if __name__ == "__main__":
    main()
