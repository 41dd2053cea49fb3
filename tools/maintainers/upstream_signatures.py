"""Write tests/data/upstream_signatures.json: the signatures that this package's functions keep to.

The sources of the releases named below are downloaded by pip and read as text; nothing of them is imported. torch must
be installed, since the setup scripts that pip runs for a file's metadata want it.

    python -m tools.maintainers.upstream_signatures
    python -m tools.maintainers.upstream_signatures FOLDER      sources that lie in FOLDER, as .tar.gz
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "upstream_signatures.json"
# The setup scripts compile unless told not to.
NO_COMPILER = {name: "TRUE" for name in ("CAUSAL_CONV1D_SKIP_CUDA_BUILD", "MAMBA_SKIP_CUDA_BUILD",
                                         "FLASH_ATTENTION_SKIP_CUDA_BUILD")}  # fmt: skip


class Source(NamedTuple):
    """Where a release defines functions. flash-linear-attention has its ops in fla-core."""

    package: str
    version: str
    file: str
    functions: Sequence[str]


SOURCES = [
    Source("fla-core", "0.6.0", "fla/ops/gated_delta_rule/chunk.py", ["chunk_gated_delta_rule"]),
    Source("fla-core", "0.6.0", "fla/ops/gated_delta_rule/fused_recurrent.py", ["fused_recurrent_gated_delta_rule"]),
    Source("fla-core", "0.6.0", "fla/ops/kda/chunk.py", ["chunk_kda"]),
    Source("fla-core", "0.6.0", "fla/ops/kda/fused_recurrent.py", ["fused_recurrent_kda"]),
    Source("causal-conv1d", "1.7.0", "causal_conv1d/causal_conv1d_interface.py",
           ["causal_conv1d_fn", "causal_conv1d_update"]),
    Source("mamba-ssm", "2.3.2.post1", "mamba_ssm/ops/triton/ssd_combined.py",
           ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]),
    Source("mamba-ssm", "2.3.2.post1", "mamba_ssm/ops/triton/selective_state_update.py", ["selective_state_update"]),
    Source("mamba-ssm", "2.3.2.post1", "mamba_ssm/ops/selective_scan_interface.py",
           ["selective_scan_fn", "mamba_inner_fn"]),
    Source("flash-attn", "2.8.3.post2", "flash_attn/flash_attn_interface.py",
           ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]),
]  # fmt: skip


def signature_of(function: ast.FunctionDef) -> List[Dict[str, Any]]:
    """Parameters in order: name, kind, and the default as Python text where there is one.

    Kinds are positional, keyword, and for names that the function takes out of its ``**kwargs``: kwargs.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    rows = [_row(argument.arg, "positional", default) for argument, default in zip(positional, defaults)]
    only = zip(arguments.kwonlyargs, arguments.kw_defaults)
    rows += [_row(argument.arg, "keyword", default) for argument, default in only]
    return rows + (list(_taken_from(arguments.kwarg.arg, function)) if arguments.kwarg else [])


def _row(name: str, kind: str, default: Any) -> Dict[str, Any]:
    return {"name": name, "kind": kind, **({} if default is None else {"default": ast.unparse(default)})}


def _taken_from(kwargs: str, function: ast.FunctionDef) -> Iterator[Dict[str, Any]]:
    """``kwargs.get("x")``, ``kwargs.pop("x", default)`` and ``"x" in kwargs``, each name once."""
    seen = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (f"{kwargs}.get", f"{kwargs}.pop"):
            name, default = (*node.args, ast.Constant(None))[:2]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == kwargs:
            name, default = node.left, None
        else:
            continue
        name = ast.literal_eval(name)
        if name not in seen:
            seen.add(name)
            yield _row(name, "kwargs", default)


def signatures(source: Source, text: str) -> List[Dict[str, Any]]:
    """A row of the table for each function of ``source``, whose file reads ``text``."""
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return [
        {"function": name, "package": source.package, "version": source.version, "file": source.file,
         "parameters": signature_of(found[name])}
        for name in source.functions
    ]  # fmt: skip


def download(folder: Path) -> None:
    for package, version in sorted({(source.package, source.version) for source in SOURCES}):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
             "--no-build-isolation", f"{package}=={version}"],
            cwd=folder, env={**os.environ, **NO_COMPILER}, check=True,
        )  # fmt: skip


def read(folder: Path, source: Source) -> str:
    root = f"{source.package.replace('-', '_')}-{source.version}"
    with tarfile.open(folder / f"{root}.tar.gz") as archive:
        return archive.extractfile(f"{root}/{source.file}").read().decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where the sources lie; without it they are downloaded")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as own:
        if folder is None:
            download(Path(own))
        rows = [row for source in SOURCES for row in signatures(source, read(folder or Path(own), source))]
    TABLE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{TABLE.relative_to(ROOT)}: {len(rows)} functions")


if __name__ == "__main__":
    main()
