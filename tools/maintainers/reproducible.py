"""Build HEAD a second time, in a folder elsewhere, and compare every byte with the build here.

    python -m tools.maintainers.reproducible          the CPU variant
    python -m tools.maintainers.reproducible --all    every variant

Prints what differs and exits with 1 if anything does.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict

ROOT = Path(__file__).resolve().parents[2]


def contents(build: Path, cuda: bool) -> Dict[str, bytes]:
    """Bytes of every file of the variants in ``build``, by path."""
    found = {}
    for variant in sorted(build.glob("torch-*")):
        if cuda or "-cpu-" in variant.name:
            for path in sorted(variant.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    found[path.relative_to(build).as_posix()] = path.read_bytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compare the CUDA variants too")
    arguments = parser.parse_args()
    options = ["--all"] if arguments.all else []
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if changed.stdout:
        sys.exit(f"reproducible: HEAD is compared, and these files differ from it:\n{changed.stdout}")
    subprocess.run([sys.executable, str(ROOT / "tools" / "build.py"), *options], check=True)
    with tempfile.TemporaryDirectory(prefix="packfree-") as folder:
        clone = Path(folder) / "a" / "folder" / "elsewhere"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        if (ROOT / ".toolkits").exists():
            (clone / ".toolkits").symlink_to(ROOT / ".toolkits")
        subprocess.run([sys.executable, str(clone / "tools" / "build.py"), *options], check=True)
        here, there = contents(ROOT / "build", arguments.all), contents(clone / "build", arguments.all)
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    for name in differing:
        print(f"reproducible: {name} differs")
    size = sum(map(len, here.values())) / 1e6
    print(f"reproducible: {len(here) - len(differing)} of {len(here)} files ({size:.1f} MB) are identical")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
