"""Make or complete .venv, with what building, testing and the demo need. The Makefile runs it; so can you:

    python3 tools/environment.py            where .venv lacks something of requirements.txt
    python3 tools/environment.py --check    only say whether this machine has what that needs

Torch is taken from where it costs least: the Python that runs this, if it has one that serves; PyTorch's index of CPU
builds, if it can be reached; else pip as it is set up here, which on Linux means a CUDA build. Needs the standard
library alone, and says what is missing with any Python 3. What was interrupted goes on where it stopped.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
REQUIREMENTS = os.path.join(ROOT, "requirements.txt")
CPU_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
# Resumes a broken download, which the pip that comes with Python 3.11 does not.
PIP = "pip==26.3"
OLDEST_PYTHON = (3, 11)
# The binary's stable ABI, and the newest release it was tried with.
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
# What to say before a download, as counted from pip's own lines: torch with what it depends on, then all the rest.
CPU_TORCH, CUDA_TORCH, THE_REST = "0.2 GB", "2.7 GB", "0.4 GB"
TRIES = 3


class Missing(Exception):
    """What this machine lacks, in one line with the way out."""


def say(text):
    print("setup: " + text, flush=True)


def compiler():
    """The C++ compiler that CMake will pick."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if shutil.which(name.split()[0]):
            return name
    raise Missing(
        "needs the C++20 compiler g++ 11 or newer, or clang++ 14 or newer%s: apt-get install g++ (or CXX=...)"
        % (", but CXX=%s is not there" % named if named else "")
    )


def check_machine():
    """Raise Missing for the first thing that is not there."""
    if sys.version_info < OLDEST_PYTHON:
        raise Missing(
            "needs Python %d.%d or newer, and %s is %d.%d: give another one, as PYTHON=python3.12"
            % (OLDEST_PYTHON + (sys.executable,) + sys.version_info[:2])
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise Missing("needs Python's venv module: apt-get install python3-venv") from None
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        raise Missing("needs Python's headers (%s): apt-get install python3-dev" % header)
    command = compiler().split() + ["-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    tried = subprocess.run(command, input=b"#include <concepts>\n#include <bit>\n", capture_output=True)
    if tried.returncode != 0:
        last = (tried.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise Missing("needs a C++20 compiler (g++ 11 or clang++ 14), and %s says: %s" % (compiler(), last))


def pip(*arguments):
    """Whether pip succeeded; what it does, with sizes and progress, is its own output."""
    python = os.path.join(VENV, "bin", "python")
    return subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]).returncode == 0


def installed(python, package):
    """Version of ``package`` for ``python``, or None; and the folder it lies in."""
    code = (
        "import importlib.metadata as m, os, sys\n"
        "try: d = m.distribution(sys.argv[1])\n"
        "except m.PackageNotFoundError: sys.exit()\n"
        "print(d.version); print(os.path.abspath(d.locate_file('')))"
    )
    lines = subprocess.run([python, "-c", code, package], capture_output=True, text=True).stdout.splitlines()
    return (lines[0], lines[1]) if len(lines) == 2 else (None, None)


def serves(version):
    """Whether a torch of this version can be used as it is."""
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return OLDEST_TORCH <= parts <= NEWEST_TORCH


def torch_is_there():
    """Version of a torch that .venv has, or that this Python has and .venv is then told of."""
    python = os.path.join(VENV, "bin", "python")
    version, _ = installed(python, "torch")
    if version is not None:
        if not serves(version):
            raise Missing("%s has torch %s, which is not between %d.%d and %d.%d: remove it or take another folder"
                          % ((VENV, version) + OLDEST_TORCH + NEWEST_TORCH))  # fmt: skip
        return version
    version, folder = installed(sys.executable, "torch")
    if version is None or not serves(version):
        return None
    library = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # Behind .venv's own packages, so that what is pinned there counts.
    with open(os.path.join(library, "torch_of_this_python.pth"), "w") as file:
        file.write(folder + "\n")
    return version


def get_torch(pinned):
    """Install torch, from the cheapest place that answers."""
    if CPU_INDEX:
        say("%s from PyTorch's index of CPU builds, about %s (TORCH_INDEX= leaves it out)" % (pinned, CPU_TORCH))
        if pip("--retries", "1", "--timeout", "15", "--index-url", CPU_INDEX, pinned):
            return
        say("that index does not answer here, or has no such torch")
    say("%s as pip finds it here; PyPI's for Linux is a CUDA build, about %s with its libraries" % (pinned, CUDA_TORCH))
    with_retries("torch", lambda: pip(pinned))


def with_retries(what, install):
    """pip keeps every file it has got whole, so another try goes on where the last one broke off."""
    for left in reversed(range(TRIES)):
        if install():
            return
        if left:
            say("%s: pip failed; once more in 5 s (Ctrl-C stops; the same command goes on later)" % what)
            time.sleep(5)
    raise Missing("pip could not install %s, see above; the same command goes on where it stopped" % what)


def requirements(torch_version):
    """Text of requirements.txt for a torch that is there: no other one, and no Triton beside the one it brings."""
    python = os.path.join(VENV, "bin", "python")
    brings_triton = installed(python, "triton")[0] is not None
    dropped = ("torch==", "triton==") if brings_triton else ("torch==",)
    with open(REQUIREMENTS) as file:
        kept = [line for line in file if not line.startswith(dropped)]
    return "".join(kept) + "torch==%s\n" % torch_version


def complete_environment():
    """Everything into .venv; raises Missing with the way out."""
    check_machine()
    say("Python %d.%d, %s, .venv; this is done once" % (sys.version_info[:2] + (compiler(),)))
    if not os.path.exists(os.path.join(VENV, "bin", "python")):
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    if not pip("-q", PIP):
        say("going on with the pip that came with Python")
    with open(REQUIREMENTS) as file:
        pinned = next(line.strip() for line in file if line.startswith("torch=="))
    version = torch_is_there()
    if version is None:
        get_torch(pinned)
        version = torch_is_there()
    else:
        say("torch %s is there already" % version)
    say("requirements.txt, about %s (less what pip has kept from before)" % THE_REST)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements(version))
        file.flush()
        with_retries("requirements.txt", lambda: pip("-r", file.name))
    say(".venv is ready: torch %s" % version)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="install nothing")
    arguments = parser.parse_args()
    try:
        check_machine() if arguments.check else complete_environment()
    except Missing as missing:
        sys.exit("setup: " + str(missing))
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; the same command goes on where this stopped")


if __name__ == "__main__":
    main()
