"""Our CUDA kernels on CPU tensors: the same sources, compiled for the host, with a fiber for each CUDA thread.

As with Triton's interpreter, the public functions, their checks and gradients are the ones that users call; the
bindings are those of the CUDA variants, so that what they check and allocate is tested too.
"""

import fcntl
import functools
import hashlib
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import List

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = ROOT / "tests" / "cuda_host"
NAMESPACE = "packfree_cuda_host"

# No contraction, as on a GPU (build.toml), but its fused multiply-add where the text says so.
FLAGS = ["-std=gnu++20", "-O1", "-g1", "-march=native", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"]


def kernel_sources() -> List[Path]:
    return sorted((ROOT / "kernel_src" / "cuda").rglob("*.cu"))


def _digest(flags: List[str]) -> str:
    digest = hashlib.sha256(" ".join([torch.__version__, sys.version, *flags]).encode())
    folders = (HOST, ROOT / "kernel_src" / "cuda", ROOT / "kernel_src" / "common", ROOT / "torch-ext" / "bindings")
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compile_host(target: str, mains: List[Path], flags: List[str], link: List[str], watch: str = "") -> Path:
    """Compile the kernels and ``mains`` for the host into build/_work/cuda_host/, unless nothing changed.

    ``watch`` is a sanitizer's option: for all but the engine, which the thread sanitizer would find itself in.
    """
    flags = [*FLAGS, *flags, f"-I{HOST}", f"-I{ROOT / 'kernel_src'}", f"-I{ROOT / 'torch-ext'}"]
    folder = ROOT / "build" / "_work" / "cuda_host" / f"{target}-{_digest([*flags, *link, watch])}"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / target
    with open(folder / "lock", "w") as lock:  # pytest's workers come here at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(folder, built, mains, flags, link, watch)
    return built


def _compile(folder: Path, built: Path, mains: List[Path], flags: List[str], link: List[str], watch: str) -> None:
    engine = HOST / "engine.cpp"
    watched = [watch] if watch else []
    objects = []
    for source in [engine, *mains, *kernel_sources()]:
        objects.append(folder / f"{source.stem}.{source.suffix[1:]}.o")
        options = [*flags, *(watched if source != engine else [])]
        subprocess.run(["g++", *options, "-x", "c++", "-c", str(source), "-o", str(objects[-1])], check=True)
    partial = built.with_suffix(".new")
    subprocess.run(["g++", *flags, *watched, *map(str, objects), "-o", str(partial), *link, "-pthread"], check=True)
    partial.rename(built)


@functools.lru_cache(maxsize=None)
def _load(kernel: ModuleType) -> List[str]:
    """Names of the ops that have a CUDA kernel; they are defined here with the schemas of the CPU ops."""
    torch_folder = Path(torch.__file__).parent
    flags = ["-fPIC", "-fvisibility=hidden", "-DUSE_CUDA=1", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    # The bindings' own stubs stand in for libtorch's functions.
    link = ["-shared", "-Wl,-Bsymbolic-functions", f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    library = compile_host("ops.so", [HOST / "ops.cpp"], [*flags, f"-isystem{torch_folder / 'include'}"], link)
    prefix = kernel._ops.add_op_namespace_prefix("")
    definitions = torch.library.Library(NAMESPACE, "DEF")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if name.startswith(prefix):
            schema = getattr(kernel._ops.ops, name[len(prefix) :]).default._schema
            definitions.define(str(schema)[len(prefix) :])
    torch.ops.load_library(str(library))
    _load.definitions = definitions  # deleted, they would take the ops along
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return sorted(name[len(NAMESPACE) + 2 :] for name in registered if name.startswith(f"{NAMESPACE}::"))


@contextmanager
def served_by_cuda(kernel: ModuleType):
    """Ops that have a kernel in CUDA C++ run it, also for CPU tensors. Yields their names."""
    names = _load(kernel)
    namespace, prefix = kernel._ops.add_op_namespace_prefix("").split("::")
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name in names:
                ours = getattr(getattr(torch.ops, NAMESPACE), name).default
                library.impl(f"{prefix}{name}", ours, "CPU", allow_override=True)
        yield names
    finally:
        library._destroy()
