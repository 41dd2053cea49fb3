"""Run a folder of other people's model tests without and with this package, and report what only we break.

    python -m tools.maintainers.foreign_tests FOLDER [--types llama mamba] [--modes hooks attention]

FOLDER holds test_modeling_TYPE.py files at any depth and whatever they import: for example the ``tests`` folder of a
checkout of transformers at the installed version, with its ``utils`` folder and ``src/transformers`` (a link to the
installed package will do) beside it. Nothing of it becomes part of this repository.

Every test runs in one pytest session per mode: ``without`` this package, with its ``hooks`` loaded, and with our
``attention`` as the default one. A test that passes without and fails with us runs again in both modes, so that what
is random is not reported. What we refuse on purpose is listed as refused. Exit status: 0 none is broken, 1 some are.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
REPO_ID = "org/packfree-kernels"
WITHOUT, HOOKS, ATTENTION = "without", "hooks", "attention"

# They need a network, several processes or a toolchain for export, and say nothing about a model in one process.
LEFT_OUT = "not pipeline and not tensor_parallel and not fsdp and not export and not expert_parallel"

INDENT = {"initial_indent": "    ", "subsequent_indent": "    "}


class Refusal(NamedTuple):
    """What is refused on purpose: a test by words of its name and of the error, and why it passes without us."""

    test: str
    error: str
    why: str


REFUSALS = (
    Refusal(
        "test_custom_4d_attention_mask",
        "that shows one to another",
        "a row with three endings of one beginning: layers besides attention read it as one line, and are off by as "
        "much as the logits are large; the test allows 1e-3 of probabilities that are nearly even",
    ),
)


class Result(NamedTuple):
    test: str
    outcome: str
    error: str
    seconds: float

    @property
    def type(self) -> str:
        return type_of(self.test.partition("::")[0])


def type_of(path: str) -> str:
    return Path(path).stem.replace("test_modeling_", "")


def test_files(folder: Path, types: List[str]) -> List[Path]:
    found = sorted(path for path in folder.rglob("test_modeling_*.py") if type_of(str(path)) != "common")
    chosen = [path for path in found if not types or type_of(str(path)) in types]
    missing = set(types) - {type_of(str(path)) for path in chosen}
    if missing or not chosen:
        wanted = ", ".join(sorted(missing)) or "any type"
        raise SystemExit(f"foreign_tests: no test_modeling_*.py in {folder} for {wanted}")
    return chosen


def environment(mode: str, results: Path, build: Path) -> Dict[str, str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PACKFREE_FOREIGN_MODE": mode,
        "PACKFREE_FOREIGN_RESULTS": str(results),
        "LOCAL_KERNELS": f"{REPO_ID}={build}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def session(mode: str, tests: List[str], folder: Path, options: argparse.Namespace) -> Iterator[Result]:
    """Run ``tests`` (files or node ids) in one pytest session; yields each result as it comes."""
    # A package is imported from the folder above it.
    top = folder.parent if (folder / "__init__.py").exists() else folder
    command = [sys.executable, "-m", "pytest", "-p", "foreign_plugin", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
    command += ["--rootdir", str(top), "-c", os.devnull, "--tb=short", *(["-k", options.k] if options.k else [])]
    with tempfile.TemporaryDirectory() as temporary:
        results, log = Path(temporary) / "results", Path(temporary) / "log"
        results.touch()
        with log.open("w") as output:
            variables = environment(mode, results, options.build)
            process = subprocess.Popen([*command, *tests], cwd=top, env=variables, stdout=output, stderr=output)
        with results.open(encoding="utf-8") as lines:
            while True:
                over = process.poll() is not None
                for line in lines:
                    yield Result(**json.loads(line))
                if over:
                    break
                time.sleep(0.5)
        if process.returncode not in (0, 1, 5):
            raise SystemExit(f"foreign_tests: pytest ended with {process.returncode}:\n{log.read_text()[-3000:]}")


def run(mode: str, files: List[str], folder: Path, options: argparse.Namespace) -> Dict[str, Result]:
    """All results of one mode by test, with a line of progress per type."""
    everything: Dict[str, Result] = {}
    start = time.monotonic()
    for name, group in itertools.groupby(session(mode, files, folder, options), key=lambda result: result.type):
        results = list(group)
        everything.update((result.test, result) for result in results)
        passed = sum(result.outcome == "passed" for result in results)
        now = time.monotonic()
        print(f"{mode:10s} {name:22s} {len(results):5d} tests {passed:5d} passed {now - start:6.0f} s", flush=True)
        start = now
    return everything


def broken(without: Dict[str, Result], with_us: Dict[str, Result]) -> List[str]:
    """Tests that pass without this package, and with it fail or are not even collected."""
    passed = [test for test, result in without.items() if result.outcome == "passed"]
    return [test for test in passed if test not in with_us or with_us[test].outcome == "failed"]


def confirmed(suspects: Dict[str, List[str]], folder: Path, options: argparse.Namespace) -> Dict[str, List[str]]:
    """Those of each mode's ``suspects`` that break a second time."""

    def again(mode: str, tests: List[str]) -> Dict[str, Result]:
        return {result.test: result for result in session(mode, tests, folder, options)} if tests else {}

    without = again(WITHOUT, sorted({test for tests in suspects.values() for test in tests}))
    return {mode: broken({test: without[test] for test in tests if test in without}, again(mode, tests))
            for mode, tests in suspects.items()}  # fmt: skip


def expected(test: str, result: Optional[Result]) -> str:
    """Why we refuse what this test asks for, or an empty string."""
    error = result.error if result else ""
    return next((refusal.why for refusal in REFUSALS if refusal.test in test and refusal.error in error), "")


def table(runs: Dict[str, Dict[str, Result]], faults: Dict[str, List[str]]) -> List[str]:
    """Type, tests, passed in each mode, broken in each mode with us; at most 80 columns."""
    types = sorted({result.type for results in runs.values() for result in results.values()})
    head = f"{'type':22s} {'tests':>6s}" + "".join(f" {mode:>10s}" for mode in runs) + f" {'broken':>7s}"
    lines = [head]
    for name in [*types, "all"]:
        chosen = {m: [r for r in runs[m].values() if name in (r.type, "all")] for m in runs}
        count = sum(type_of(t.partition("::")[0]) == name or name == "all" for tests in faults.values() for t in tests)
        passed = "".join(f" {sum(r.outcome == 'passed' for r in chosen[mode]):10d}" for mode in runs)
        lines.append(f"{name:22s} {len(chosen[WITHOUT]):6d}{passed} {count:7d}")
    return lines


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--types", nargs="*", default=[], help="the TYPEs to run; all of the folder if left out")
    parser.add_argument("--modes", nargs="*", default=[HOOKS, ATTENTION], choices=[HOOKS, ATTENTION])
    parser.add_argument("-k", default=LEFT_OUT, help="pytest's choice of tests by name (default: %(default)s)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the build to test")
    parser.add_argument("--report", type=Path, help="write every result to this file, as JSON")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    files = [str(path) for path in test_files(folder, options.types)]
    runs = {mode: run(mode, files, folder, options) for mode in (WITHOUT, *options.modes)}
    faults = confirmed({mode: broken(runs[WITHOUT], runs[mode]) for mode in options.modes}, folder, options)
    if options.report:
        report = {mode: [result._asdict() for result in results.values()] for mode, results in runs.items()}
        options.report.write_text(json.dumps({"runs": report, "broken": faults}, indent=1) + "\n")
    print(*table(runs, faults), sep="\n")
    unexpected = 0
    for mode, tests in faults.items():
        for test in tests:
            result = runs[mode].get(test)
            why = expected(test, result)
            unexpected += not why
            print(f"{'refused' if why else 'BROKEN'} ({mode}): {test}")
            print(textwrap.fill(why or (result.error if result else "not collected"), 78, **INDENT))
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
