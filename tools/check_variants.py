"""Load each built CUDA variant in a CUDA build of torch, on a machine that needs no GPU, and train a CPU model there.

    python tools/check_variants.py            every CUDA variant in build/
    python tools/check_variants.py cu130      one of them

Makes an environment per CUDA release in .toolkits/, with a torch built for that release: several GB each. Two of them
are found on PyPI, in different releases of torch; the others come from PyTorch's own index. Where no such torch can be
fetched, that is said and counts as a failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from toolkits import CACHE, RELEASES, ROOT, machine_here

REPO_ID = "org/packfree-kernels"
MODELS = ("llama", "qwen3_5_text", "bamba")
STEPS = 3
# The torch on PyPI that is built for a CUDA release.
PYPI_TORCH = {"13.0": "2.13.0", "13.2": "2.15.0"}
PYPI = "https://pypi.org/simple"
PYTORCH_INDEX = "https://download.pytorch.org/whl/{compute}"
BESIDE_TORCH = ("transformers", "kernels", "huggingface_hub", "accelerate", "tokenizers", "numpy")


def pinned(names) -> list:
    """Lines of requirements.txt for these packages."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in names]


def torch_for(compute: str) -> str:
    """The release to install, as pip takes it."""
    release = PYPI_TORCH.get(RELEASES[compute])
    return f"torch=={release}" if release else pinned(["torch"])[0]


def environment(compute: str) -> Path:
    """Python of an environment with torch for ``compute``, made whole or not at all."""
    place = CACHE / f"torch-{compute}"
    if not (place / "ready").exists():
        print(f"check_variants: making {place} (several GB)", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(place / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
        # One index and no other source: a +cpu build from elsewhere would rank above it.
        index = PYPI if RELEASES[compute] in PYPI_TORCH else PYTORCH_INDEX.format(compute=compute)
        sources = dict(os.environ, PIP_CONFIG_FILE=os.devnull, PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="")
        subprocess.run([*pip, "--index-url", index, torch_for(compute)], check=True, env=sources)
        subprocess.run([*pip, *pinned(BESIDE_TORCH)], check=True)
        (place / "ready").touch()
    return place / "bin" / "python"


def train_packed(where: str) -> None:
    """Attention alone, and two hybrids: packed equals alone, and training packed takes the steps of training alone."""
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.models.tiny_models import alone, build, check_packed_equals_alone, load, pack, run

    for name in MODELS:
        check_packed_equals_alone(name, run(build(name, "eager").train(), alone()))
        packed, stock = load(name).train(), build(name, "eager").train()
        for model, batches in ((packed, [pack(name, "seq_idx")]), (stock, alone())):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            for _ in range(STEPS):
                logits, _ = run(model, batches)
                optimizer.step()
            model.last = float(logits.square().sum())
        assert abs(packed.last - stock.last) <= 1e-4 * abs(stock.last), (packed.last, stock.last)
        print(f"{where}: {name} packed equals alone; loss {packed.last:.4f} after {STEPS} steps of both", flush=True)


def check_here(compute: str) -> None:
    """What runs inside the environment: the loader's own choice of variant, then packed against alone, and training."""
    import torch

    os.environ.update(LOCAL_KERNELS=f"{REPO_ID}={ROOT / 'build'}", HF_HUB_OFFLINE="1", PACKFREE_DEBUG="1")
    assert torch.version.cuda == RELEASES[compute], f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    assert not torch.cuda.is_available(), "this check is about a CUDA build of torch without a GPU"
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=1)
    folder = Path(kernel.__file__).parent.name
    assert f"-{compute}-" in folder, f"the loader chose {folder}"
    on_cuda = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    prefix = kernel._ops.add_op_namespace_prefix("")
    own = sorted(name[len(prefix) :] for name in on_cuda if name.startswith(f"{prefix}packing_"))
    assert len(own) == 3, f"CUDA kernels of the boundary conversions: {own}"

    train_packed(f"check_variants: {folder}")
    print(f"check_variants: torch {torch.__version__}, {own} have CUDA kernels\n{kernel.hooks_status()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compute", nargs="*", help=f"variants to check, of {', '.join(RELEASES)} (default: all built)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        check_here(arguments.inside)
        return
    unknown = [name for name in arguments.compute if name not in RELEASES]
    if unknown:
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(RELEASES)}")
    here = f"{machine_here()}-linux/metadata.json"
    built = [name for name in RELEASES if any((ROOT / "build").glob(f"torch-*-{name}-{here}"))]
    if not built:
        sys.exit("check_variants: build/ holds no CUDA variant; run make variants")
    became = {name: "FAILED: not built, run make variants" for name in arguments.compute if name not in built}
    for name in [name for name in arguments.compute or built if name in built]:
        try:
            python = environment(name)
            no_gpu = dict(os.environ, CUDA_VISIBLE_DEVICES="")
            done = subprocess.run([str(python), __file__, "--inside", name], env=no_gpu)
            models = ", ".join(MODELS)
            became[name] = f"ok: {models} trained" if done.returncode == 0 else "FAILED, see above"
        except subprocess.CalledProcessError as error:
            became[name] = f"FAILED: no such torch, {' '.join(str(word) for word in error.cmd[:2])} failed"
    for name, result in became.items():
        print(f"check_variants: {name} in {torch_for(name)}: {result}")
    for name in [name for name in RELEASES if name not in became]:
        print(f"check_variants: {name}: not run")
    sys.exit(1 if any(result.startswith("FAILED") for result in became.values()) else 0)


if __name__ == "__main__":
    main()
