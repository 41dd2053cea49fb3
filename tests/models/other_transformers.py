"""Runs tests on another version of transformers: python -m tests.models.other_transformers 5.24.0 [pytest arguments]

Without pytest arguments it prints the table of models (``tests.models.models_table``) as that version gives it. The
version is installed beside the environment, in ``.transformers/<version>``, so the environment keeps its own.

transformers 5.23 and later take kernels from 0.18.2 on. Where only an older one can be had, they count it as absent and
refuse to load any kernel. Nothing that the hooks use has changed between the two, so ``admit_installed_kernels``, which
conftest.py calls, widens that window inside the test process.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".transformers"
# The first version that counts kernels before 0.18.2 as absent.
NARROWED = Version("5.23")


def admit_installed_kernels() -> None:
    """Lets transformers 5.23 and later take the installed version of kernels. Call it before anything loads a model."""
    if Version(importlib.metadata.version("transformers")) < NARROWED:
        return
    from transformers.utils import import_utils

    oldest, newest = "0.17.2", import_utils.KERNELS_MAX_VERSION
    import_utils.is_kernels_available.__wrapped__.__defaults__ = (oldest, newest)
    import_utils.is_kernels_available.cache_clear()


def install(version: str) -> Path:
    target = FOLDER / version
    if not (target / "transformers").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(target), f"transformers=={version}"], check=True)
    return target


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__.splitlines()[0])
    environment = dict(os.environ, PYTHONPATH=str(install(sys.argv[1])))
    command = ["-m", "pytest", *sys.argv[2:]] if sys.argv[2:] else ["-m", "tests.models.models_table"]
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
