"""Which variant a system gets by the loader's own resolver, or why none, from names and metadata as tools write it."""

import platform
import sys

import pytest
import torch

from tests.conftest import ROOT, load_tool

OLD, NEW = "2.11.0", "2.14.1"

# (backend of the torch build, torch version, machine, system) -> what comes after the ABI in the variant's name.
SERVED = [
    ("cpu", OLD, "x86_64", "Linux", "cpu-x86_64-linux"),
    ("cpu", "2.13.0+cpu", "x86_64", "Linux", "cpu-x86_64-linux"),
    ("cpu", NEW, "x86_64", "Linux", "cpu-x86_64-linux"),
    ("cu126", OLD, "x86_64", "Linux", "cu126-x86_64-linux"),
    ("cu126", NEW, "x86_64", "Linux", "cu126-x86_64-linux"),
    ("cu128", "2.12.0", "x86_64", "Linux", "cu126-x86_64-linux"),
    ("cu129", "2.12.1", "x86_64", "Linux", "cu126-x86_64-linux"),
    ("cu130", OLD, "x86_64", "Linux", "cu130-x86_64-linux"),
    ("cu130", "2.13.0+cu130", "x86_64", "Linux", "cu130-x86_64-linux"),
    ("cu131", "2.14.0", "x86_64", "Linux", "cu130-x86_64-linux"),
    ("cu132", "2.13.0", "x86_64", "Linux", "cu132-x86_64-linux"),
    ("cu132", NEW, "x86_64", "Linux", "cu132-x86_64-linux"),
    ("cpu", OLD, "aarch64", "Linux", "cpu-aarch64-linux"),
    ("cpu", NEW, "aarch64", "Linux", "cpu-aarch64-linux"),
    ("cu130", "2.13.0+cu130", "aarch64", "Linux", "cu130-aarch64-linux"),
    ("cu132", NEW, "aarch64", "Linux", "cu132-aarch64-linux"),
]

# The same -> part of the reason given for every variant that comes nearest.
REFUSED = [
    ("cpu", "2.10.1", "x86_64", "Linux", "(2.11) is too new for environment Torch version (2.10)"),
    ("cu130", "2.9.0", "x86_64", "Linux", "(2.11) is too new for environment Torch version (2.9)"),
    ("cu124", NEW, "x86_64", "Linux", "CUDA version (12.6) is not compatible with system CUDA version (12.4)"),
    ("rocm71", "2.13.0", "x86_64", "Linux", "backend (cpu) does not match selected backend (rocm71)"),
    ("cpu", "2.13.0", "riscv64", "Linux", "CPU (x86_64) does not match system CPU (riscv64)"),
    ("cu130", "2.13.0", "ppc64le", "Linux", "CPU (aarch64) does not match system CPU (ppc64le)"),
    ("cpu", "2.13.0", "x86_64", "Darwin", "OS (linux) does not match system OS (darwin)"),
    ("metal", "2.13.0", "arm64", "Darwin", "OS (linux) does not match system OS (darwin)"),
    ("cpu", "2.13.0", "AMD64", "Windows", "OS (linux) does not match system OS (windows)"),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """All variants that are published, without the compiled part; in local/ those of `make build` on x86_64."""
    build, toolkits = load_tool("build"), load_tool("toolkits")
    folder = tmp_path_factory.mktemp("repository")
    config = build.load_build_toml()
    for compute in ("cpu", build.CPU_IN_CUDA, *toolkits.RELEASES):
        for machine in ("x86_64", *toolkits.CROSS_COMPILERS):
            variant = build.variant_of(config, compute, machine=machine)
            stand_in = folder / f"{variant.ops_id}.abi3.so"
            stand_in.write_bytes(b"")
            archs = toolkits.architectures(compute) if compute in toolkits.RELEASES else ()
            if compute != build.CPU_IN_CUDA:
                build.assemble(config, variant, stand_in, folder / "build" / variant.folder, archs)
            if compute not in toolkits.RELEASES and machine == "x86_64":
                build.assemble(config, variant, stand_in, folder / "local" / "build" / variant.folder)
    return folder


@pytest.fixture
def resolve(repository, monkeypatch):
    """The variant folder that the loader picks on a system."""
    from kernels import backends, resolver, variants

    def on(backend, torch_version, machine, system):
        monkeypatch.setattr(variants, "_select_backend", lambda wanted: backends.parse_backend(wanted or backend))
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(torch, "__version__", torch_version)
        return lambda wanted=None, where=".": resolver.resolve_local_kernel(repository / where, backend=wanted)

    return on


@pytest.mark.parametrize("backend, torch_version, machine, system, expected", SERVED, ids=str)
def test_a_system_gets_its_variant(resolve, backend, torch_version, machine, system, expected):
    found = resolve(backend, torch_version, machine, system)()
    assert found.variant_str == f"torch-stable-abi211-{expected}"
    assert found.metadata.id.startswith("_packfree_kernels_cpu_" if backend == "cpu" else "_packfree_kernels_cuda_")


@pytest.mark.parametrize("backend, torch_version, machine, system, reason", REFUSED, ids=str)
def test_a_system_without_a_variant_is_told_why(resolve, backend, torch_version, machine, system, reason):
    with pytest.raises(FileNotFoundError) as error:
        resolve(backend, torch_version, machine, system)()
    assert reason in str(error.value)


def test_c50_a_cuda_build_of_torch_can_ask_for_the_cpu_variant(resolve):
    assert resolve("cu130", "2.13.0", "x86_64", "Linux")("cpu").variant_str == "torch-stable-abi211-cpu-x86_64-linux"


def test_a_rocm_build_of_torch_gets_cpu_kernels_where_they_are_asked_for(repository, resolve):
    """By the backend, or by the folder, which is what LOCAL_KERNELS may name: there is no ROCm variant."""
    load, cpu = resolve("rocm71", "2.13.0", "x86_64", "Linux"), "torch-stable-abi211-cpu-x86_64-linux"
    assert load("cpu").variant_str == load(where=f"build/{cpu}").variant_str == cpu
    with pytest.raises(FileNotFoundError, match=r"backend \(cpu\) does not match selected backend \(rocm71\)"):
        load()


@pytest.mark.parametrize(
    "backend, torch_version, expected",
    [
        ("cpu", "2.13.0", "torch-stable-abi211-cpu-x86_64-linux"),
        ("cu124", "2.11.0", "torch-cuda"),
        ("cu130", "2.13.0", "torch-cuda"),
        ("cu132", "2.15.0", "torch-cuda"),
    ],
)
def test_a_local_build_serves_cpu_models_in_any_build_of_torch(resolve, backend, torch_version, expected):
    """Under a CUDA build of torch the loader takes no variant of the CPU backend, so there is one for it."""
    assert resolve(backend, torch_version, "x86_64", "Linux")(where="local").variant_str == expected


def test_a_cuda_variant_comes_before_the_cpu_kernels_alone(repository, resolve, tmp_path):
    for folder in (*(repository / "build").iterdir(), repository / "local" / "build" / "torch-cuda"):
        (tmp_path / folder.name).symlink_to(folder)
    found = resolve("cu130", "2.13.0", "x86_64", "Linux")(where=tmp_path)
    assert found.variant_str == "torch-stable-abi211-cu130-x86_64-linux"


@pytest.mark.parametrize(
    "compute, capability, served",
    [
        ("cu126", (7, 0), True),
        ("cu126", (8, 0), True),
        ("cu126", (9, 0), True),
        ("cu126", (10, 0), True),
        ("cu130", (7, 0), False),
        ("cu130", (7, 5), True),
        ("cu130", (9, 0), True),
        ("cu130", (10, 3), True),
        ("cu132", (12, 1), True),
        ("cu132", (13, 0), True),
    ],
)
def test_gpus_that_a_variant_declares(repository, compute, capability, served):
    from kernels._rust import Metadata
    from kernels.archs import _supports_cuda_capability

    variant = next((repository / "build").glob(f"*-{compute}-x86_64-*"))
    archs = Metadata.read_from_file(variant / "metadata.json").backend.archs
    assert _supports_cuda_capability(archs, capability) is served


def test_cuda_variants_compile_the_cpu_kernels_with_the_same_flags():
    """They are compiled once for all variants, and a CUDA build of torch runs CPU models on them."""
    build = load_tool("build")
    config = build.load_build_toml()
    cpu, cuda = build.units(config, "cpu"), build.units(config, "cuda")
    assert {name: cuda.get(name) for name in cpu} == cpu
    assert {name for name in cuda if name not in cpu} == {
        path.relative_to(ROOT).as_posix()
        for pattern in ("kernel_src/cuda/**/*.cu", "torch-ext/bindings/*_cuda.cpp")
        for path in ROOT.glob(pattern)
    }


def test_what_another_machine_needs_is_said(monkeypatch, tmp_path, capsys):
    """The variants of another machine are left out with a line; the emulator ends with one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    build, emulate = load_tool("build"), load_tool("emulate")
    assert build.other_machines() == []
    needs = "needs aarch64-linux-gnu-g++: apt-get install g++-aarch64-linux-gnu"
    assert capsys.readouterr().out == f"build: no variants for aarch64: {needs}\n"
    monkeypatch.setattr("sys.argv", ["emulate.py"])
    with pytest.raises(SystemExit, match=needs.replace("+", r"\+")):
        emulate.main()
    (tmp_path / "aarch64-linux-gnu-g++").symlink_to("/bin/true")
    assert build.other_machines() == ["aarch64"]
    with pytest.raises(SystemExit, match="needs qemu-aarch64: apt-get install qemu-user"):
        emulate.main()


def test_the_emulated_environment_is_kept_until_it_would_be_another(monkeypatch, tmp_path):
    emulate, made = load_tool("emulate"), []
    monkeypatch.setattr(emulate, "PLACE", tmp_path / "aarch64")
    monkeypatch.setattr(emulate, "unpack_debian", lambda folder, *words: made.append(folder))
    monkeypatch.setattr(emulate, "pip", lambda command, *arguments: True)
    for changed in ({}, {}, dict(PACKAGES=("torch",)), dict(DEBIAN_PACKAGES=("python3",)), {}):
        for name, value in changed.items():
            monkeypatch.setattr(emulate, name, value)
        emulate.complete_environment()
        made.append(sorted(path.name for path in emulate.PLACE.iterdir()))
    assert [isinstance(step, list) for step in made] == [False, True, True, False, True, False, True, True]
    assert all(step == ["debian", "made_of"] for step in made if isinstance(step, list))


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], {"": ["cpu-x86_64", "cuda-x86_64"]}),
        (["--machine", "aarch64"], {"machine-aarch64": ["cpu-aarch64", "cuda-aarch64"]}),
        (["--all"], {"": ["cpu-x86_64", "cuda-x86_64", "cu130-x86_64", "cpu-aarch64", "cu130-aarch64"]}),
        (["--all", "--machine", "aarch64"], {"": ["cpu-aarch64", "cu130-aarch64"]}),
        (["--sanitize", "thread"], {"sanitize-thread": ["cpu-x86_64"]}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_command_builds(monkeypatch, tmp_path, words, expected):
    """Into which folder under --out; each machine has a work folder of its own."""
    build, built, works = load_tool("build"), {}, {}

    def record(config, variants, out, work, toolkits=None, sanitize=""):
        names = built.setdefault(out.relative_to(tmp_path).as_posix().strip("."), [])
        names += [f"{variant.compute}-{variant.machine}" for variant in variants]
        works.setdefault(work, set()).update(variant.machine for variant in variants)

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "build_variants", record)
    monkeypatch.setattr(build, "find_toolkits", lambda machine: {"cu130": None})
    monkeypatch.setattr(build, "other_machines", lambda: ["aarch64"])
    monkeypatch.setattr("sys.argv", ["build.py", "--out", str(tmp_path), *words])
    build.main()
    assert built == expected
    assert all(len(machines) == 1 for machines in works.values())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_toolkit_that_cannot_be_had_leaves_its_variant_out(monkeypatch, tmp_path, capsys, machine):
    """No nvcc, no package index, no apt-get: one line a variant, for this machine and another."""
    toolkits, build = load_tool("toolkits"), load_tool("build")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys.modules["toolkits"], "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / toolkits.CROSS_COMPILERS["aarch64"][0]).symlink_to("/bin/true")
    for name, value in dict(CONFIG_FILE="/dev/null", NO_INDEX="1", FIND_LINKS="", EXTRA_INDEX_URL="").items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert build.find_toolkits(machine) == {}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("build: ")]
    assert len(lines) == len(toolkits.RELEASES)
    for line, compute in zip(lines, toolkits.RELEASES):
        assert line.startswith(f"build: no {compute} variant for {machine}: PyPI has no nvidia-cuda-nvcc"), line


def test_packages_laid_out_otherwise_leave_the_variant_out(monkeypatch, tmp_path):
    """What is found beside what was expected is no toolkit: of the two halves of 12.6, and of a wheel."""
    toolkits = load_tool("toolkits")
    monkeypatch.setattr(toolkits, "CACHE", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(toolkits, "_on_path", lambda release: None)
    monkeypatch.setattr(toolkits, "_install_wheels", lambda folder, wheels, machine="": folder.mkdir(exist_ok=True))
    monkeypatch.setattr(toolkits, "unpack_debian", lambda folder, suite, architecture, get: None)
    with pytest.raises(toolkits.ToolkitMissing, match=r"CUDA 12.6's packages are not laid out as they were: .*cudafe"):
        toolkits.toolkit("cu126")
    with pytest.raises(toolkits.ToolkitMissing, match=r"13.2/nvidia/cu13 has no libcudart.so.13"):
        toolkits.toolkit("cu132")


def test_nvcc_compiles_for_another_machine_with_its_compiler(tmp_path):
    toolkits = load_tool("toolkits")
    own = toolkits.Toolkit("cu130", tmp_path / "nvcc", tmp_path / "libcudart.so.13", ["7.5", "9.0+PTX"])
    codes = [f"-gencode=arch=compute_{code}" for code in ("75,code=sm_75", "90,code=sm_90", "90,code=compute_90")]
    assert own.flags() == codes
    other = own._replace(host_compiler="aarch64-linux-gnu-g++", include=tmp_path)
    assert other.flags()[:2] == ["-ccbin", "aarch64-linux-gnu-g++"] and other.flags()[-3:] == codes
    assert f"-I{tmp_path}" in other.flags()
