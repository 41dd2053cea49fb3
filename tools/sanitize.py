"""Run the tests that reach the kernels on a build with a sanitizer, and say how many tests that was.

    python tools/sanitize.py              address and undefined-behaviour sanitizers
    python tools/sanitize.py thread       data races

The sanitizer's runtime must be in the process before Python starts, hence LD_PRELOAD. Python and torch never free some
memory, so leaks are not reported.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_packing.py", "tests/test_causal_conv1d.py", "tests/test_flash_attn_varlen.py"]
TESTS += ["tests/test_gated_delta_rule.py"]
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
# torch.compile starts compilers of its own, and a 4 GB buffer has no room beside shadow memory.
SKIPPED = "not compile and not c22 and not c59 and not kvcache_compile"


def runtime(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "address"
    if kind not in RUNTIMES:
        sys.exit(f"sanitize: the sanitizer must be one of {', '.join(RUNTIMES)}, got {kind}")
    flags = "address,undefined" if kind == "address" else kind
    subprocess.run([sys.executable, str(ROOT / "tools" / "build.py"), "--sanitize", flags], check=True)
    build = ROOT / "build" / f"sanitize-{flags}"
    suppressions = ROOT / "tools" / "sanitize.supp"
    environment = dict(
        os.environ,
        LD_PRELOAD=" ".join(runtime(name) for name in RUNTIMES[kind]),
        ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:abort_on_error=1",
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
        TSAN_OPTIONS=f"halt_on_error=1:suppressions={suppressions}:ignore_noninstrumented_modules=1",
        PACKFREE_BUILD=str(build),
    )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", SKIPPED, *TESTS]
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
