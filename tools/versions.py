"""Which releases of torch, Python and transformers run this package: a table, made by running them.

    python tools/versions.py                 what the table lacks: an environment for each torch and Python, GB each
    python tools/versions.py --again         everything
    python tools/versions.py --only 2.15     combinations whose line holds a word; the others keep theirs
    python tools/versions.py --list          name the combinations, run nothing

Every torch, every Python and every minor release of transformers that the package says it serves is run beside the
pinned others, and so are the oldest of all with the oldest and the newest with the newest. Each runs what build/ holds,
as the loader chooses it: a model loaded by the one string, the table of models (tests/models/models_table.py) and
random packs (tests/ops/test_random_packs.py). "not had" is a release that pip does not find for that Python. torch
comes from PyPI, where it is a CUDA build on Linux; no GPU is needed. Environments lie in .toolkits/versions and are
removed as they are done.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".toolkits" / "versions"
TABLE = ROOT / "tests" / "data" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
REPO_ID = "org/packfree-kernels"

TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
TRANSFORMERS = ("5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0")
# The newest transformers for a Python that the pinned one does not serve.
LAST_OF = {"3.10": "5.20.2"}
# Beside torch; transformers brings what else it needs.
PACKAGES = ("pytest", "hypothesis", "expecttest", "accelerate")
PACKS = 20
# PyPI alone: a CPU build that pip finds elsewhere would rank above what most users get.
PYPI = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_INDEX_URL": ""}

# What a user does, and what then serves; the last line of the output is read.
LOAD = f"""
import json
import pathlib
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.hub_kernels import allow_all_hub_kernels
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
try:
    with allow_all_hub_kernels():
        AutoModelForCausalLM.from_config(config, attn_implementation="{REPO_ID}")
    loads = "loads"
except Exception as error:
    loads = f"refused: {{str(error).strip().splitlines()[0]}}"
from kernels import get_kernel
kernel = get_kernel("{REPO_ID}", version=1)
print(json.dumps([torch.__version__, pathlib.Path(kernel.__file__).parent.name, loads]))
"""


@dataclass(frozen=True)
class Combination:
    python: str
    torch: str
    transformers: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, transformers {self.transformers}"


@dataclass
class Row:
    """What one combination did. ``lacks`` says which release is not had; then nothing else is known.

    Attributes:
        torch: the whole version, with the CUDA release that it is built for.
        loads: what a user's call without further means did.
        models: how many types came out as the table of models says, and those that did not.
        packs: what pytest counted.
    """

    combination: Combination
    lacks: str = ""
    torch: str = ""
    kernels: str = ""
    variant: str = ""
    loads: str = ""
    models: str = ""
    packs: str = ""
    minutes: float = 0.0

    @property
    def right(self) -> bool:
        broken = any(text.startswith("error") for text in (self.loads, self.models, self.packs))
        return bool(self.lacks) or not (broken or "differ" in self.models or re.search("failed|error", self.packs))


def pinned(name: str) -> str:
    """The release of ``name`` in requirements.txt."""
    return re.search(rf"^{name}==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]


def combinations() -> List[Combination]:
    torch, transformers, python = pinned("torch"), pinned("transformers"), "3.11"
    found = [Combination(python, release, transformers) for release in TORCHES]
    found += [Combination(release, torch, transformers) for release in PYTHONS]
    found += [Combination(python, torch, release) for release in TRANSFORMERS]
    found += [Combination(older, torch, release) for older, release in LAST_OF.items()]
    found += [Combination("3.10", TORCHES[0], TRANSFORMERS[0]), Combination(PYTHONS[-1], TORCHES[-1], TRANSFORMERS[-1])]
    return sorted(set(found), key=lambda one: (_order(one.torch), _order(one.python), _order(one.transformers)))


def _order(release: str) -> List[int]:
    return [int(part) for part in release.split(".")]


def interpreter(release: str) -> Optional[str]:
    """A Python of this release on PATH or under pyenv."""
    found = shutil.which(f"python{release}")
    if found and subprocess.run([found, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
        return found
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(path) for path in sorted(roots.glob(f"{release}.*/bin/python{release}"))), None)


def pip(python: Path, *arguments: str) -> bool:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", *arguments]
    return subprocess.run(command, env={**os.environ, **PYPI}).returncode == 0


def environment(python: str, torch: str) -> "Path | str":
    """Python of a new environment with this torch, or what is not had."""
    found = interpreter(python)
    if found is None:
        return f"Python {python}"
    place = PLACE / f"{python}-{torch}"
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([found, "-m", "venv", str(place)], check=True)
    own = place / "bin" / "python"
    if not pip(own, f"torch=={torch}"):
        return f"torch {torch} for Python {python}"
    return own if pip(own, *PACKAGES) else "pytest"


def beside(python: Path, combination: Combination) -> Optional[Path]:
    """A folder with this transformers and the kernels that it takes, or the pinned one where that is not out."""
    place = PLACE / f"transformers-{combination.python}-{combination.transformers}"
    shutil.rmtree(place, ignore_errors=True)
    release, target = combination.transformers, ("--target", str(place))
    if pip(python, *target, f"transformers[kernels]=={release}"):
        return place
    return place if pip(python, *target, f"transformers=={release}", f"kernels=={pinned('kernels')}") else None


def models_of(output: str) -> str:
    """How many types came out how in the table of models."""
    cells = {name: rest for name, *rest in map(cells_of, rows_of(output))}
    if not cells:
        return f"error: {last_line(output)}"
    kinds = {"equal": 0, "equal with eager": 0, "refused": 0, "not built": 0}
    for layers, packed, _generated in cells.values():
        kinds[next((kind for kind in ("refused", "not built") if layers.startswith(kind)), "equal")] += 1
        if packed.startswith("equal, with"):
            kinds["refused"] -= 1
            kinds["equal with eager"] += 1
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    wrong = [name for name, parts in cells.items() if any("**" in part for part in parts)]
    return f"{text}; differ: {', '.join(wrong)}" if wrong else text


def cells_of(line: str) -> List[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(output: str) -> Iterator[str]:
    return (line for line in output.splitlines() if line.startswith("| ") and not line.startswith(("| model", "| ---")))


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1] if output.strip() else "error: no output"


def run(combination: Combination, python: Path, folder: Path) -> Row:
    row, start = Row(combination), time.monotonic()
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "PYTHONDONTWRITEBYTECODE": "1"}
    settings.update(LOCAL_KERNELS=f"{REPO_ID}={ROOT / 'build'}", HF_HUB_OFFLINE="1", PACKFREE_PACKS=str(PACKS))
    settings.setdefault("OMP_NUM_THREADS", "1")

    def output_of(*arguments: str) -> str:
        done = subprocess.run([str(python), *arguments], cwd=ROOT, env=settings, capture_output=True, text=True)
        (PLACE / "last.log").write_text(f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done.stdout if done.stdout.strip() else done.stderr

    try:
        row.torch, row.variant, row.loads = json.loads(last_line(output_of("-c", LOAD)))
    except ValueError:
        row.loads = f"error: {last_line((PLACE / 'last.log').read_text())}"
        return row
    row.kernels = last_line(output_of("-c", "import kernels; print(kernels.__version__)"))
    row.models = models_of(output_of("-m", "tests.models.models_table"))
    counted = last_line(output_of("-m", "pytest", "-p", "no:cacheprovider", "tests/ops/test_random_packs.py"))
    row.packs = re.sub(r"(, \d+ warnings?)? in .*", "", counted)
    row.minutes = round((time.monotonic() - start) / 60, 1)
    return row


def known_rows() -> Dict[Combination, Row]:
    if not TABLE.exists():
        return {}
    rows = [Row(**{**row, "combination": Combination(**row["combination"])}) for row in json.loads(TABLE.read_text())]
    return {row.combination: row for row in rows}


def page(rows: List[Row]) -> str:
    """The table as a page of the documents."""
    lines = [
        "# Versions",
        "",
        "What `make versions` found, without a GPU. Each combination loaded a model by the one string and ran the",
        f"table of models and {PACKS} random packs of every function. torch is PyPI's; the variant is what the loader",
        "chose of a local build. *not had*: there is no such release for that Python. A type is *not built* where that",
        "release of transformers wants another configuration than the tests have. Where the one string is refused, the",
        "rest was run with transformers' check of the kernels release widened.",
        "",
        "| torch | Python | transformers, kernels | variant | the one string | models | random packs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.combination
        if row.lacks:
            cells = [one.torch, one.python, one.transformers, "", f"not had: {row.lacks}", "", ""]
        else:
            cells = [row.torch, one.python, f"{one.transformers}, {row.kernels}", row.variant]
            cells += [row.loads.split(". ")[0], row.models, row.packs]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def save(found: Dict[Combination, Row]) -> List[Row]:
    rows = [found[one] for one in combinations() if one in found]
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n")
    PAGE.write_text(page(rows))
    return rows


def outcome(combination: Combination, python: "Path | str") -> Row:
    """The row of a combination in this environment, or in the lack of one."""
    if isinstance(python, str):
        return Row(combination, lacks=python)
    folder = beside(python, combination)
    if folder is None:
        return Row(combination, lacks=f"transformers {combination.transformers} for Python {combination.python}")
    row = run(combination, python, folder)
    shutil.rmtree(folder)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run what the table has, too")
    parser.add_argument("--only", default="", metavar="WORD", help="combinations whose line holds WORD, again")
    parser.add_argument("--list", action="store_true", help="name the combinations, run nothing")
    arguments = parser.parse_args()
    found = known_rows()
    wanted = [one for one in combinations() if arguments.only in str(one)]
    if not (arguments.again or arguments.only):
        wanted = [one for one in wanted if one not in found]
    if arguments.list:
        print(*wanted, sep="\n")
        return
    PLACE.mkdir(parents=True, exist_ok=True)
    for python, torch in dict.fromkeys((one.python, one.torch) for one in wanted):
        here = [one for one in wanted if (one.python, one.torch) == (python, torch)]
        print(f"versions: Python {python} with torch {torch}, {len(here)} transformers; gets some GB", flush=True)
        own = environment(python, torch)
        for combination in here:
            row = found[combination] = outcome(combination, own)
            lacking = [f"not had: {row.lacks}"] if row.lacks else []
            parts = lacking or [row.loads, row.models, row.packs, f"{row.minutes} min"]
            print(f"versions: {combination}: {'; '.join(parts)}", flush=True)
            save(found)
        shutil.rmtree(PLACE / f"{python}-{torch}", ignore_errors=True)
    wrong = [row.combination for row in save(found) if not row.right]
    print(*(f"versions: NOT RIGHT: {one}" for one in wrong), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
