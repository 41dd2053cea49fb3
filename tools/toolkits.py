"""Compilers for the variants: CUDA's, each whole in a folder under .toolkits/ and installed nowhere, and a machine's.

- 13.0 and 13.2: the compiler on PATH if it has that release, else NVIDIA's wheels from PyPI, which hold a whole one.
- 12.6: the wheels of that release hold headers, ptxas and libdevice but no nvcc. The front end comes from Debian's
  package nvidia-cuda-toolkit (12.4, component non-free), fetched with apt-get through lists of its own. A 12.4 front
  end knows nothing newer than sm_90; newer GPUs run its PTX.
- For another machine: the same compilers with that machine's C++ compiler and, from the wheels, its runtime library.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".toolkits"

# Variant name -> CUDA release: the releases that kernel-builder builds.
RELEASES = {"cu126": "12.6", "cu130": "13.0", "cu132": "13.2"}

# kernel-builder's lists of architectures for these releases.
_ARCHS = {
    "12": "7.0 7.2 7.5 8.0 8.6 8.7 8.9 9.0+PTX".split(),
    "13": "7.5 8.0 8.6 8.7 8.9 9.0 10.0 11.0 12.0 12.1+PTX".split(),
}

_WHEELS_13 = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_WHEELS_12_6 = (
    "nvidia-cuda-nvcc-cu12==12.6.85",
    "nvidia-cuda-runtime-cu12==12.6.77",
    "nvidia-cuda-cccl-cu12==12.6.77",
)
_DEBIAN_SOURCE = "deb [signed-by={keyring}] http://deb.debian.org/debian {suite}\n"
_DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Machines whose variants can be built on x86_64 Linux too -> the compiler, and Debian's package that brings it.
CROSS_COMPILERS = {"aarch64": ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")}
_RUNTIME_WHEELS = {
    "12.6": "nvidia-cuda-runtime-cu12==12.6.77",
    "13.0": "nvidia-cuda-runtime==13.0.*",
    "13.2": "nvidia-cuda-runtime==13.2.*",
}

# Where toolkits and wheels keep libraries and headers.
_LIBRARIES = ("lib64", "lib", "targets/x86_64-linux/lib", "nvidia/cu13/lib", "nvidia/cuda_runtime/lib")
_HEADERS = ("include", "targets/x86_64-linux/include")

# nvcc reads this beside itself to find its parts and the headers.
_NVCC_PROFILE = """\
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
"""


class ToolkitMissing(Exception):
    """A toolkit cannot be had on this machine; the text says what is missing."""


class Toolkit(NamedTuple):
    """A CUDA compiler, the runtime library that its variant links, and the architectures it compiles for.

    For another machine also that machine's C++ compiler, and the headers: they are the same for every machine, but nvcc
    then looks for them in a folder of that machine.
    """

    compute: str
    nvcc: Path
    cudart: Path
    archs: List[str]
    host_compiler: str = ""
    include: Optional[Path] = None

    def flags(self) -> List[str]:
        """nvcc's options for the machine and all architectures; +PTX adds code that newer GPUs compile at load."""
        flags = ["-ccbin", self.host_compiler] if self.host_compiler else []
        if self.include is not None:
            flags += [f"-I{self.include}", "-isystem", f"{self.include / 'cccl'}"]
        for arch in self.archs:
            number = arch.replace("+PTX", "").replace(".", "")
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if arch.endswith("+PTX"):
                flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        return flags


def architectures(compute: str) -> List[str]:
    """What the variant ``compute`` compiles for."""
    return _ARCHS[RELEASES[compute].split(".")[0]]


def machine_here() -> str:
    """This machine, as variants spell it."""
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def cross_compiler(machine: str) -> str:
    """The C++ compiler on this machine that compiles for ``machine``, another one.

    Raises:
        ToolkitMissing: there is none.
    """
    if machine not in CROSS_COMPILERS or (machine_here(), platform.system()) != ("x86_64", "Linux"):
        raise ToolkitMissing(f"only x86_64 Linux builds for another machine: {', '.join(CROSS_COMPILERS)}")
    compiler, package = CROSS_COMPILERS[machine]
    if shutil.which(compiler) is None:
        raise ToolkitMissing(f"needs {compiler}: apt-get install {package}")
    return compiler


def toolkit(compute: str, machine: str = "") -> Toolkit:
    """The toolkit of a variant such as ``cu130`` for ``machine`` (default: this one), fetched if need be.

    Raises:
        ToolkitMissing: it cannot be had here.
    """
    release = RELEASES[compute]
    if (machine_here(), platform.system()) != ("x86_64", "Linux"):
        raise ToolkitMissing("CUDA variants are built here on x86_64 Linux only")
    machine = machine or machine_here()
    compiler = "" if machine == machine_here() else cross_compiler(machine)
    top = _on_path(release) or _cached(release)
    library = f"libcudart.so.{release.split('.')[0]}"
    own = Toolkit(compute, top / "bin" / "nvcc", _holder(top, _LIBRARIES, library) / library, architectures(compute))
    if not compiler:
        return own
    cudart = _holder(_runtime(release, machine), _LIBRARIES, library) / library
    return own._replace(cudart=cudart, host_compiler=compiler, include=_holder(top, _HEADERS, "cuda_runtime.h"))


def _holder(top: Path, folders: Sequence[str], name: str) -> Path:
    """The first of these folders of a toolkit that has a file of this name."""
    for folder in folders:
        if (top / folder / name).exists():
            return top / folder
    raise ToolkitMissing(f"{top} has no {name}")


def _on_path(release: str) -> Optional[Path]:
    """Root of the toolkit whose nvcc is on PATH, if it has this release."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    if f"release {release}," not in version:
        return None
    # nvcc may be a link or a script elsewhere; what it would run names the root.
    steps = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-E", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", steps, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else None


def _cached(release: str) -> Path:
    """Root of the toolkit in the cache, made whole or not at all."""
    place = CACHE / release
    if not place.exists():
        print(f"toolkits: fetching CUDA {release} into {place}", flush=True)
        staging = place.with_name(f"{release}.new")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if release.startswith("13."):
            _install_wheels(staging, [f"{name}=={release}.*" for name in _WHEELS_13])
        else:
            _install_wheels(staging / "wheels", list(_WHEELS_12_6))
            try:
                _merge_12_6(staging)
            except OSError as error:
                raise ToolkitMissing(f"CUDA {release}'s packages are not laid out as they were: {error}") from error
        staging.rename(place)
    return place / "nvidia" / "cu13" if release.startswith("13.") else place


def _runtime(release: str, machine: str) -> Path:
    """Folder of the runtime library for another machine, from its wheel."""
    place = CACHE / f"{release}-{machine}"
    if not place.exists():
        staging = place.with_name(f"{place.name}.new")
        shutil.rmtree(staging, ignore_errors=True)
        _install_wheels(staging, [_RUNTIME_WHEELS[release]], machine)
        staging.rename(place)
    return place


def _run(command: List[str], missing: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ToolkitMissing(f"{missing}: {error.filename} is not installed") from error
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ToolkitMissing(f"{missing}: {' '.join(command[:2])} failed: {''.join(reason)}")


def wheel_options(machine: str) -> List[str]:
    """pip's options for wheels of another Linux machine: every base up to manylinux_2_28."""
    bases = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(28, 16, -1))]
    return ["--only-binary=:all:", *(word for base in bases for word in ("--platform", f"{base}_{machine}"))]


def _install_wheels(folder: Path, wheels: List[str], machine: str = "") -> None:
    # No dependencies: those of nvcc are not pinned, and every part is named here.
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    command += [*(wheel_options(machine) if machine else []), *wheels]
    _run(command, f"PyPI has no {', '.join(wheels)} for {machine or 'this machine'}")


def unpack_debian(folder: Path, suite: str, architecture: str, get: List[str]) -> None:
    """Unpack under ``folder``/debian what apt-get downloads by the words ``get``; the system's own apt is not touched.

    Raises:
        ToolkitMissing: it cannot be had.
    """
    missing = f"Debian's {get[-1]} ({suite}, {architecture})"
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "sources.list").write_text(_DEBIAN_SOURCE.format(keyring=_DEBIAN_KEYRING, suite=suite))
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": os.devnull,
        "Dir::Cache": apt / "cache",
        "Dir::Log": apt,
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "update"], missing)
    # apt-get download writes into the working folder, apt-get install --download-only into its cache.
    _run(["sh", "-c", 'cd "$1" && shift && exec apt-get "$@"', "sh", str(apt), *options, *get], missing)
    for package in apt.rglob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(folder / "debian")], missing)
    shutil.rmtree(apt)


def _merge_12_6(root: Path) -> None:
    """One tree from the two halves: Debian's front end, NVIDIA's headers, assembler, device library and runtime."""
    unpack_debian(root, "stable non-free", "amd64", ["download", "nvidia-cuda-toolkit"])
    usr = root / "debian" / "usr"
    private = usr / "lib" / "nvidia-cuda-toolkit" / "bin"
    for folder in ("bin", "nvvm/bin", "lib"):
        (root / folder).mkdir(parents=True)
    for name in ("cudafe++", "fatbinary", "nvlink", "bin2c"):
        shutil.copy(usr / "bin" / name, root / "bin")
    shutil.copy(private / "nvcc", root / "bin")
    shutil.copytree(private / "crt", root / "bin" / "crt")
    shutil.copy(private / "cicc", root / "nvvm" / "bin")
    for part in sorted((root / "wheels" / "nvidia").iterdir()):
        if (part / "include").is_dir():
            shutil.copytree(part / "include", root / "include", dirs_exist_ok=True)
    wheel = root / "wheels" / "nvidia"
    shutil.copy(wheel / "cuda_nvcc" / "bin" / "ptxas", root / "bin")
    shutil.copytree(wheel / "cuda_nvcc" / "nvvm" / "libdevice", root / "nvvm" / "libdevice")
    shutil.copy(wheel / "cuda_runtime" / "lib" / "libcudart.so.12", root / "lib")
    (root / "bin" / "nvcc.profile").write_text(_NVCC_PROFILE)
    for scaffold in ("wheels", "debian"):
        shutil.rmtree(root / scaffold)
