"""Format rules of a kernel repository, checked on the sources and on every variant in build/.

Prints one line a rule and exits with 1 if any is broken.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterator, List, Tuple

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "packfree_kernels"
ALLOWED_LIBRARIES = {"libtorch.so", "libtorch_cpu.so", "libc10.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6"}
ALLOWED_LIBRARIES |= {"libm.so.6", "libpthread.so.0"}
MANYLINUX = "manylinux_2_28"
OLDEST_PYTHON = "3.9"


def variants() -> List[Path]:
    return sorted(path.parent for path in (ROOT / "build").glob("torch*/metadata.json"))


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


def python_imports() -> Iterator[str]:
    """The package imports itself relatively, and beside it only torch and the standard library (others lazily)."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in tree.body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                if top != "torch" and top not in sys.stdlib_module_names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"


def python_syntax() -> Iterator[str]:
    """The package parses as Python 3.9."""
    for path in PACKAGE.rglob("*.py"):
        try:
            ast.parse(path.read_text(), feature_version=(3, 9))
        except SyntaxError as error:
            yield f"{path.relative_to(ROOT)}:{error.lineno} {error.msg}"


def op_prefixes() -> Iterator[str]:
    """Fakes and gradients are registered under the generated prefix."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in {"register_fake", "register_autograd", "custom_op", "triton_op"}:
                continue
            first = node.args[0] if node.args else None
            called = first.func.id if isinstance(first, ast.Call) and isinstance(first.func, ast.Name) else ""
            if called != "add_op_namespace_prefix":
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.func.attr} without add_op_namespace_prefix"


def public_names() -> Iterator[str]:
    """__all__ is a literal list, and every name in it exists."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    listed = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)
    ]
    if len(listed) != 1:
        yield "__init__.py needs one literal __all__"
        return
    names = ast.literal_eval(listed[0])
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    for name in sorted(set(names) - defined):
        yield f"{name} is in __all__ and is not defined"


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
    """Only torch and the manylinux base are needed, and nothing carries a path of the build machine."""
    for path in shared_objects():
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic):
            if library not in ALLOWED_LIBRARIES and not library.startswith("ld-linux"):
                yield f"{path.name} needs {library}"
        if "RPATH" in dynamic or "RUNPATH" in dynamic:
            yield f"{path.name} has an rpath"
        if str(ROOT).encode() in path.read_bytes():
            yield f"{path.name} holds a path of the build folder"


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


RULES: List[Tuple[str, Callable[[], Iterator[str]]]] = [
    ("build.toml", build_toml),
    ("imports", python_imports),
    ("Python 3.9 syntax", python_syntax),
    ("op prefixes", op_prefixes),
    ("public names", public_names),
    ("ABI", abi),
    ("abi3audit", abi3audit),
    ("libraries", needed_libraries),
    ("digests", digests),
]


def main() -> None:
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
