"""Our CUDA kernels on CPU tensors: the same sources, compiled for the host, with a fiber for each CUDA thread.

As with Triton's interpreter, the public functions, their checks and gradients are the ones that users call; the
bindings are those of the CUDA variants, so that what they check and allocate is tested too. In HIP's words, those of
tools/maintainers/hip/, the kernels run in waves of 64 lanes, as on AMD's gfx9 GPUs, or of 32 (gfx10 and later).
"""

import ctypes
import fcntl
import functools
import hashlib
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import List, NamedTuple, Sequence

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = "tests/cuda_host"

# Words that the kernels are compiled in -> where those are.
WORDS = {"cuda": [f"{HOST}/cuda"], "hip": ["tools/maintainers/hip", f"{HOST}/hip"]}

# No contraction, as on a GPU (build.toml), but its fused multiply-add where the text says so. And no call is doubled,
# because lanes meet in calls.
FLAGS = ["-std=gnu++20", "-O1", "-g1", "-march=native", "-ffp-contract=off", "-fno-thread-jumps", "-Wall",
         "-Wno-unknown-pragmas"]  # fmt: skip


def _digest(flags: List[str], root: Path) -> str:
    digest = hashlib.sha256(" ".join([torch.__version__, sys.version, *flags]).encode())
    for folder in (HOST, "tools/maintainers/hip", "kernel_src/cuda", "kernel_src/common", "torch-ext/bindings"):
        for path in sorted(path for path in (root / folder).rglob("*") if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compile_host(
    target: str,
    main: str,
    flags: Sequence[str] = (),
    link: Sequence[str] = (),
    watch: str = "",
    words: str = "cuda",
    root: Path = ROOT,
) -> Path:
    """Compile the kernels and ``main`` of tests/cuda_host for the host, unless nothing changed.

    The result lies in build/_work/cuda_host/. ``watch`` is a sanitizer's option: for all but the engine, which the
    thread sanitizer would find itself in. ``root`` has the sources, which may be a changed copy of some of them.
    """
    flags = [*FLAGS, *flags, *(f"-I{root / folder}" for folder in (*WORDS[words], HOST, "kernel_src", "torch-ext"))]
    known = [flag.replace(str(root), "") for flag in [*flags, *link, watch]]
    folder = ROOT / "build" / "_work" / "cuda_host" / f"{target}-{_digest(known, root)}"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / target
    with open(folder / "lock", "w") as lock:  # pytest's workers come here at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built, root, main, flags, link, watch)
    return built


def _compile(built: Path, root: Path, main: str, flags: List[str], link: Sequence[str], watch: str) -> None:
    engine = root / HOST / "engine.cpp"
    watched = [watch] if watch else []
    objects = []
    for source in [engine, root / HOST / main, *sorted((root / "kernel_src" / "cuda").rglob("*.cu"))]:
        objects.append(built.parent / f"{source.stem}.{source.suffix[1:]}.o")
        options = [*flags, *(watched if source != engine else [])]
        subprocess.run(["g++", *options, "-x", "c++", "-c", str(source), "-o", str(objects[-1])], check=True)
    partial = built.with_suffix(".new")
    subprocess.run(["g++", *flags, *watched, *map(str, objects), "-o", str(partial), *link, "-pthread"], check=True)
    partial.rename(built)


class Host(NamedTuple):
    """The ops that have a CUDA kernel, in a namespace of their own."""

    namespace: str
    names: List[str]
    library: ctypes.CDLL
    definitions: torch.library.Library  # deleted, they would take the ops along


@functools.lru_cache(maxsize=None)
def _load(kernel: ModuleType, words: str) -> Host:
    """The ops are defined here with the schemas of the CPU ops."""
    torch_folder = Path(torch.__file__).parent
    namespace = f"packfree_{words}_host"
    flags = ["-fPIC", "-fvisibility=hidden", "-DUSE_CUDA=1", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags += [f"-DHOST_NAMESPACE={namespace}", f"-isystem{torch_folder / 'include'}"]
    # The bindings' own stubs stand in for libtorch's functions.
    link = ["-shared", "-Wl,-Bsymbolic-functions", f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    library = compile_host("ops.so", "ops.cpp", flags, link, words=words)
    prefix = kernel._ops.add_op_namespace_prefix("")
    definitions = torch.library.Library(namespace, "DEF")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if name.startswith(prefix):
            schema = getattr(kernel._ops.ops, name[len(prefix) :]).default._schema
            definitions.define(str(schema)[len(prefix) :])
    torch.ops.load_library(str(library))
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = sorted(name[len(namespace) + 2 :] for name in registered if name.startswith(f"{namespace}::"))
    return Host(namespace, names, ctypes.CDLL(str(library)), definitions)


@contextmanager
def served_by_cuda(kernel: ModuleType, words: str = "cuda", wave: int = 32):
    """Ops that have a kernel in CUDA C++ run it, also for CPU tensors. Yields their names."""
    host = _load(kernel, words)
    host.library.cuda_host_set_wave(wave)
    namespace, prefix = kernel._ops.add_op_namespace_prefix("").split("::")
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name in host.names:
                ours = getattr(getattr(torch.ops, host.namespace), name).default
                library.impl(f"{prefix}{name}", ours, "CPU", allow_override=True)
        yield host.names
    finally:
        library._destroy()
