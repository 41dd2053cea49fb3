"""The rules of tools/check.py each notice the fault they are there for."""

import shutil
import subprocess

import pytest

from tests.conftest import BUILD, load_tool

# (rule, file of the package, code put at its end, what the rule says)
PLANTED = [
    ("python_imports", "packing.py", "import numpy", "packing.py:{line} imports numpy"),
    ("python_imports", "packing.py", "from packfree_kernels import layers", "imports packfree_kernels"),
    ("python_imports", "packing.py", "class A:\n    import transformers", "imports transformers"),
    ("python_imports", "packing.py", "def f():\n    import pandas", "imports pandas"),
    ("python_imports", "packing.py", "import triton", "packing.py:{line} imports triton"),
    ("python_syntax", "packing.py", "def f(x):\n    match x:\n        case 1:\n            pass", "3.10"),
    ("python_syntax", "packing.py", "def f(x: int | None): pass", "3.10"),
    ("python_syntax", "packing.py", "import itertools\nitertools.pairwise([])", "3.10"),
    ("op_prefixes", "packing.py", 'torch.library.register_fake("a::b")', "register_fake without"),
    ("op_prefixes", "packing.py", 'torch.library.impl("a::b", "cpu", print)', "impl without"),
    ("op_prefixes", "packing.py", "def add_op_namespace_prefix(name): pass", "which is generated"),
    ("public_names", "__init__.py", "def extra(): pass", "extra is public and is not in __all__"),
    ("public_names", "__init__.py", '__all__ = ["cpu_tier"]', "needs one literal __all__"),
    ("public_names", "__init__.py", "from .x import y", "y is public"),
    ("layers", "layers.py", "class extra(nn.Module):\n    def forward(self): pass", "extra must be a layer"),
    ("layers", "layers.py", "class a(kda):\n    def forward(self): pass", "a must derive from nn.Module alone"),
    ("layers", "layers.py", "class a(nn.Module):\n    def __init__(self): pass", "must define forward alone"),
    (
        "layers",
        "layers.py",
        "class a(nn.Module):\n    kept = 1\n    def forward(self): pass",
        "keeps kept on the class",
    ),
]


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The tool, at work on a copy of the package and an empty build folder."""
    tool = load_tool("check")
    shutil.copytree(tool.PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__", "_ops.py"))
    monkeypatch.setattr(tool, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(tool, "BUILD", tmp_path / "build")
    return tool


@pytest.mark.parametrize("rule, file, code, expected", PLANTED, ids=lambda value: str(value)[:40])
def test_faults_in_python(check, rule, file, code, expected):
    assert list(getattr(check, rule)()) == []
    path = check.PACKAGE / file
    text = path.read_text()
    path.write_text(f"{text}\n{code}\n")
    found = "\n".join(getattr(check, rule)())
    assert expected.format(line=text.count("\n") + 2) in found


def test_a_source_that_is_not_listed(check, tmp_path, monkeypatch):
    for name in ("kernel_src", "torch-ext", "build.toml"):
        original = check.ROOT / name
        shutil.copytree(original, tmp_path / name) if original.is_dir() else shutil.copy(original, tmp_path / name)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "torch-ext" / "registration.h").unlink(missing_ok=True)
    assert list(check.build_toml()) == []
    (tmp_path / "kernel_src" / "common" / "new.cuh").write_text("")
    (tmp_path / "kernel_src" / "common" / "packing.h").unlink()
    assert list(check.build_toml()) == [
        "kernel_src/common/packing.h is listed and does not exist",
        "kernel_src/common/new.cuh exists and is not listed",
    ]


@pytest.fixture
def variant(check):
    """A copy of the built CPU variant under the eyes of the tool."""
    built = next(BUILD.glob(f"torch-*-cpu-{load_tool('toolkits').machine_here()}-linux"))
    copy = check.BUILD / built.name
    shutil.copytree(built, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_a_file_that_is_not_the_digests(check, variant):
    assert list(check.digests()) == []
    (variant / "packing.py").write_text("")
    (variant / "extra.txt").write_text("")
    assert [line.split()[0].split("/")[1] for line in check.digests()] == ["extra.txt", "packing.py"]


def test_a_shared_object_for_another_machine(check, variant):
    assert list(check.machines()) == []
    for name, machine in (("torch-stable-abi211-cpu-riscv64-linux", "riscv64"), ("torch-cuda", None)):
        shutil.copytree(variant, check.BUILD / name)
        found = list(check.machines())
        assert len(found) == (machine is not None) and all(line.endswith(f"is not for {machine}") for line in found)
        shutil.rmtree(check.BUILD / name)


@pytest.mark.parametrize(
    "code, expected",
    [
        ("open(os.path.join(os.path.dirname(__file__), 'cache'), 'w')", "open"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import socket; socket.socket()", "socket.__new__"),
        ("raise ValueError('no')", "cannot be imported: ValueError: no"),
    ],
    ids=["write", "process", "network", "error"],
)
def test_an_import_that_does_more_than_import(check, variant, code, expected):
    path = variant / "__init__.py"
    path.write_text(f"{path.read_text()}\nimport os\n{code}\n")
    assert expected in "\n".join(check.quiet_import())


FAULTY = """
#include <cmath>
extern "C" {
struct PyObject;
const char* PyUnicode_AsUTF8AndSize(PyObject*, long*);
void deflate();
}
namespace c10 { void outside_the_stable_abi(); }
extern "C" double faulty(double x) {
  c10::outside_the_stable_abi();
  deflate();
  PyUnicode_AsUTF8AndSize(nullptr, nullptr);
  return std::exp(x);
}
const char* folder = FOLDER;
"""


@pytest.mark.parametrize("compiler", ["g++", "aarch64-linux-gnu-g++"])
def test_faults_in_a_shared_object(check, tmp_path, compiler):
    machine = load_tool("toolkits").machine_here() if compiler == "g++" else "aarch64"
    if shutil.which(compiler) is None and compiler != "g++":
        pytest.skip("needs Debian's package g++-aarch64-linux-gnu")
    variant = check.BUILD / f"torch-stable-abi211-cpu-{machine}-linux"
    variant.mkdir(parents=True)
    (variant / "metadata.json").write_text("{}")
    (tmp_path / "faulty.cpp").write_text(FAULTY)
    command = [compiler, "-shared", "-fPIC", f'-DFOLDER="{check.ROOT}/src"', str(tmp_path / "faulty.cpp")]
    command += ["-Wl,--no-as-needed", "-lm", "-lresolv", "-Wl,-rpath,/somewhere", "-o", str(variant / "faulty.abi3.so")]
    subprocess.run(command, check=True)
    assert list(check.machines()) == []
    abi = "\n".join(check.abi())
    assert "c10::outside_the_stable_abi" in abi and "PyUnicode_AsUTF8AndSize" in abi and "exp" in abi
    assert "1 ABI version mismatches" in "\n".join(check.abi3audit())
    libraries = "\n".join(check.needed_libraries())
    assert "needs libresolv.so.2" in libraries and "has an rpath" in libraries and "holds paths under" in libraries
