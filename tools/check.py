"""Check the format rules of a kernel repository on the sources and on every variant in build/.

    python tools/check.py

Prints one line a rule and exits with 1 if any is broken.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterator, List, Tuple

import tomllib
from toolkits import machine_here

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "packfree_kernels"
BUILD = ROOT / "build"
ALLOWED_LIBRARIES = {"libtorch.so", "libtorch_cpu.so", "libc10.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6"}
ALLOWED_LIBRARIES |= {"libm.so.6", "libpthread.so.0"}
# What a function may import when it runs; everything else must be there with torch.
LAZY_IMPORTS = {"transformers", "matplotlib", "triton"}
REGISTRATIONS = {"register_fake", "register_autograd", "custom_op", "triton_op"}
LAYER_SETTINGS = {"has_backward", "can_torch_compile"}
MANYLINUX = "manylinux_2_28"
OLDEST_PYTHON = "3.9"
# What readelf calls the machines of variants.
ELF_MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}


def variants() -> List[Path]:
    return sorted(path.parent for path in BUILD.glob("torch*/metadata.json"))


def shared_objects() -> List[Path]:
    return [path for variant in variants() for path in variant.glob("*.so")]


def build_toml() -> Iterator[str]:
    """build.toml parses, and lists exactly the sources that exist."""
    from kernels._rust import Build

    Build.open(ROOT)
    config = tomllib.loads((ROOT / "build.toml").read_text())
    listed = set(config["torch"]["src"])
    for section in config["kernel"].values():
        listed |= set(section["src"])
    present = {
        path.relative_to(ROOT).as_posix()
        for folder in ("kernel_src", "torch-ext")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".cpp", ".h", ".cu", ".cuh"} and path.name != "registration.h"
    }
    for name in sorted(listed - present):
        yield f"{name} is listed and does not exist"
    for name in sorted(present - listed):
        yield f"{name} exists and is not listed"


def sources() -> Iterator[Tuple[str, ast.Module]]:
    """Every Python file of the package, by its name there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def python_imports() -> Iterator[str]:
    """The package imports itself relatively, and beside it only torch and the standard library; a few more lazily.

    Triton is imported by the files of its kernels, which are not imported with the package.
    """
    for name, tree in sources():
        at_import = set(ast.walk(tree))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                at_import -= set(ast.walk(node))
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            allowed = {"torch", *sys.stdlib_module_names} | (set() if node in at_import else LAZY_IMPORTS)
            if name.startswith("_triton/") or Path(name).name.startswith("triton_"):
                allowed.add("triton")
            for module in modules:
                if module.split(".")[0] not in allowed:
                    yield f"{name}:{node.lineno} imports {module}"


def python_syntax() -> Iterator[str]:
    """The package's grammar and standard library names are those of Python 3.9."""
    tool = Path(sys.executable).parent / "vermin"
    # "long" is also a method of tensors. Annotations are evaluated when a function is defined.
    options = [f"--target={OLDEST_PYTHON}-", "--no-tips", "--eval-annotations", "--feature", "union-types"]
    command = [str(tool), *options, "--exclude", "long", "--violations", str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or "could not be combined" in done.stdout:
        yield done.stdout.strip() or done.stderr.strip()


def op_prefixes() -> Iterator[str]:
    """Kernels, fakes and gradients are registered under the generated prefix, which comes from _ops as it is."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "add_op_namespace_prefix":
                yield f"{name}:{node.lineno} defines add_op_namespace_prefix, which is generated"
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = ast.unparse(node.func)
            if node.func.attr not in REGISTRATIONS and called != "torch.library.impl":
                continue
            first = node.args[0] if node.args else None
            prefix = first.func.id if isinstance(first, ast.Call) and isinstance(first.func, ast.Name) else ""
            if prefix != "add_op_namespace_prefix":
                yield f"{name}:{node.lineno} {node.func.attr} without add_op_namespace_prefix"


def literal_all(tree: ast.Module) -> List[str]:
    """The names in a module's __all__. Raises ValueError unless it is one literal list."""
    listed = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)
    ]
    if len(listed) != 1:
        raise ValueError("needs one literal __all__")
    return ast.literal_eval(listed[0])


def public_names() -> Iterator[str]:
    """__all__ is a literal list that names exactly what the package defines and imports for its users."""
    tree = dict(sources())["__init__.py"]
    try:
        names = set(literal_all(tree))
    except ValueError as error:
        yield f"__init__.py: {error}"
        return
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        # ops is how this module reaches its own ops.
        if isinstance(node, ast.ImportFrom) and node.module != "_ops":
            defined |= {alias.asname or alias.name for alias in node.names}
    public = {name for name in defined if not name.startswith("_")}
    for name in sorted(names - public):
        yield f"{name} is in __all__ and is not defined"
    for name in sorted(public - names):
        yield f"{name} is public and is not in __all__"


def layers() -> Iterator[str]:
    """Layers are pure: subclasses of nn.Module that have a forward and nothing else but two settings."""
    tree = dict(sources())["layers.py"]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for name in sorted(set(literal_all(tree)) ^ {node.name for node in classes}):
        yield f"layers.py: {name} must be a layer and be in __all__"
    for layer in classes:
        if [ast.unparse(base) for base in layer.bases] != ["nn.Module"]:
            yield f"layers.py:{layer.lineno} {layer.name} must derive from nn.Module alone"
        methods = [node.name for node in layer.body if isinstance(node, ast.FunctionDef)]
        if methods != ["forward"]:
            yield f"layers.py:{layer.lineno} {layer.name} must define forward alone, got {methods}"
        for node in layer.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) and node.value else targets
            for target in targets:
                if ast.unparse(target) not in LAYER_SETTINGS:
                    yield f"layers.py:{node.lineno} {layer.name} keeps {ast.unparse(target)} on the class"


def machines() -> Iterator[str]:
    """A shared object is for the machine in its variant's name; for this one where the name has none."""
    for path in shared_objects():
        named = re.search(r"-(\w+)-linux$", path.parent.name)
        machine = named.group(1) if named else machine_here()
        header = subprocess.run(["readelf", "-h", str(path)], capture_output=True, text=True, check=True).stdout
        if not re.search(rf"Machine: +{ELF_MACHINES.get(machine, machine)}\n", header):
            yield f"{path.parent.name}/{path.name} is not for {machine}"


def abi() -> Iterator[str]:
    """manylinux_2_28, the Python 3.9 limited API, and no torch symbol outside the stable ABI."""
    from kernel_abi_check import ObjectFile

    for path in shared_objects():
        binary = ObjectFile(str(path))
        for violation in binary.check_manylinux(MANYLINUX):
            yield f"{path.name}: {violation!r}"
        for violation in binary.check_python_abi(OLDEST_PYTHON):
            yield f"{path.name}: {violation!r}"
        for symbol in undefined_symbols(path):
            if re.match(r"(c10|at|torch|caffe2)::", symbol) and not symbol.startswith("torch::stable::"):
                yield f"{path.name}: needs {symbol}, which is outside torch's stable ABI"


def abi3audit() -> Iterator[str]:
    """abi3audit finds no symbol outside the limited API."""
    for path in shared_objects():
        tool = Path(sys.executable).parent / "abi3audit"
        command = [str(tool), "--assume-minimum-abi3", OLDEST_PYTHON, "-S", "-s", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            yield f"{path.name}: {done.stdout.strip()} {done.stderr.strip()}"


def undefined_symbols(path: Path) -> List[str]:
    command = ["nm", "-D", "-C", "--undefined-only", str(path)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split(maxsplit=1)[1] for line in listed.stdout.splitlines() if " " in line.strip()]


def needed_libraries() -> Iterator[str]:
    """Only torch, what torch brings, and the manylinux base are needed; nothing names a path of the build machine."""
    for path in shared_objects():
        cuda = re.search(r"-cu(\d\d)\d-", path.parent.name)
        allowed = ALLOWED_LIBRARIES | ({f"libcudart.so.{cuda.group(1)}"} if cuda else set())
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic):
            if library not in allowed and not library.startswith("ld-linux"):
                yield f"{path.name} needs {library}"
        if "RPATH" in dynamic or "RUNPATH" in dynamic:
            yield f"{path.name} has an rpath"
        content = path.read_bytes()
        for folder in (ROOT, Path(sys.prefix), Path(sys.prefix).resolve()):
            if f"{folder}/".encode() in content:
                yield f"{path.parent.name}/{path.name} holds paths under {folder}"


def digests() -> Iterator[str]:
    """metadata.json's digest is that of the variant's files."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    for variant in variants():
        Metadata.read_from_file(variant / "metadata.json")
        recorded = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
        actual = dict(Digest.hash_variant(DigestAlgorithm.SHA256, variant).files)
        for name in sorted(recorded.keys() | actual.keys()):
            if recorded.get(name) != actual.get(name):
                yield f"{variant.name}/{name} does not match its digest"


# Run in a process of its own: what happens while the package is imported, except reading.
IMPORT_PROBE = """
import os, sys
import torch
from pathlib import Path
from kernels import get_local_kernel
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if path == os.devnull or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    elif event.split(".")[0] not in ("socket", "subprocess", "shutil", "urllib") and event not in (
        "os.system", "os.exec", "os.fork", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink"
    ):
        return
    print(event, *map(str, arguments[:2]))
sys.addaudithook(watch)
get_local_kernel(Path(sys.argv[1]), backend="cpu")
"""


def quiet_import() -> Iterator[str]:
    """Importing the CPU variant of this machine writes and fetches nothing and starts no process."""
    for variant in variants():
        if not variant.name.endswith(f"-cpu-{machine_here()}-linux"):
            continue
        command = [sys.executable, "-B", "-c", IMPORT_PROBE, str(variant)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            yield f"{variant.name} cannot be imported: {' '.join(done.stderr.strip().splitlines()[-2:])}"
        for line in done.stdout.splitlines():
            yield f"importing {variant.name}: {line}"


RULES: List[Tuple[str, Callable[[], Iterator[str]]]] = [
    ("build.toml", build_toml),
    ("imports", python_imports),
    ("Python 3.9 syntax", python_syntax),
    ("op prefixes", op_prefixes),
    ("public names", public_names),
    ("layers", layers),
    ("machines", machines),
    ("ABI", abi),
    ("abi3audit", abi3audit),
    ("libraries", needed_libraries),
    ("digests", digests),
    ("quiet import", quiet_import),
]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    broken = 0
    if not variants():
        sys.exit("check: build/ holds no variant; run make build")
    for name, rule in RULES:
        found = list(rule())
        print(f"check: {name:18} {'ok' if not found else f'{len(found)} broken'}")
        for line in found:
            print(f"    {line}")
        broken += len(found)
    for path in shared_objects():
        print(f"check: {path.parent.name}: {path.stat().st_size / 1e6:.1f} MB")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
