"""The public functions have the parameters of the functions they follow: names, order, kinds and defaults.

tests/data/upstream_signatures.json was read from the releases by tools/maintainers/upstream_signatures.py.
"""

import inspect
import json

import pytest

from tests.conftest import ROOT, load_tool

TABLE = json.loads((ROOT / "tests" / "data" / "upstream_signatures.json").read_text())

# function -> parameter -> why it is not upstream's.
DIFFERENT = {
    "chunk_gated_delta_rule": {"head_first": "upstream raises for every value; here it is unknown, which raises too"},
    "flash_attn_varlen_func": {
        "cu_seqlens_k": "may be left out: cu_seqlens_q serves both",
        "max_seqlen_q": "may be left out: it is not needed",
        "max_seqlen_k": "may be left out: it is not needed",
    },
}
# Positional parameters behind upstream's last.
MORE = {
    "mamba_chunk_scan_combined": ["state_dtype"],  # on mamba's main branch at this place, after the release
    "mamba_split_conv1d_scan_combined": ["state_dtype"],  # likewise
}


def value_of(parameter):
    if "default" not in parameter:
        return inspect.Parameter.empty
    return eval(parameter["default"], {"__builtins__": {}}, {"float": float})


def differences(row, function):
    """Names of upstream's parameters that ``function`` lacks, has elsewhere or with another default."""
    ours = inspect.signature(function).parameters
    places = {name: place for place, (name, p) in enumerate(ours.items()) if p.kind is p.POSITIONAL_OR_KEYWORD}
    found = []
    for place, theirs in enumerate(row["parameters"]):
        name = theirs["name"]
        at_its_place = name in ours if theirs["kind"] != "positional" else places.get(name) == place
        # What upstream asks for by `in kwargs` has no default to compare with.
        known = theirs["kind"] != "kwargs" or "default" in theirs
        if not at_its_place or (known and ours[name].default != value_of(theirs)):
            found.append(name)
    return found


@pytest.mark.kernels_ci
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["function"])
def test_parameters_are_upstreams(kernel, row):
    function = getattr(kernel, row["function"])
    assert differences(row, function) == list(DIFFERENT.get(row["function"], {}))
    upstream = [parameter["name"] for parameter in row["parameters"] if parameter["kind"] == "positional"]
    ours = inspect.signature(function).parameters.values()
    positional = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == upstream + MORE.get(row["function"], [])
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in ours)


def test_every_function_is_in_the_table(kernel):
    functions = {name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name))}
    assert functions - {row["function"] for row in TABLE} == {
        "cpu_tier", "hooks_status", "install_hooks", "leak_report", "remove_hooks", "sequence_parallel", "shard_batch",
    }  # fmt: skip


def test_differences_are_seen():
    """A parameter that is moved, missing, of another default or of a keyword upstream takes by name."""

    def ours(a, c, b=2, *, d=4): ...

    rows = [("a", "positional", None), ("b", "positional", "2"), ("c", "positional", None), ("d", "kwargs", "3"),
            ("e", "kwargs", None)]  # fmt: skip
    parameters = [dict(name=name, kind=kind, **({} if d is None else {"default": d})) for name, kind, d in rows]
    assert differences({"parameters": parameters}, ours) == ["b", "c", "d", "e"]


SOURCE = '''
def f(a, b: int = 1, c=(-1, float("inf")), *, d, e=None, **rest):
    if "old" in rest:
        rest.pop("old")
    size = rest.pop("size", 64)
    return rest.get("flag", False), rest.get("bare")
'''


def test_the_table_is_read_from_text():
    tool = load_tool("maintainers.upstream_signatures")
    (row,) = tool.signatures(tool.Source("p", "1", "p/f.py", ["f"]), SOURCE)
    assert [(p["name"], p["kind"], p.get("default")) for p in row["parameters"]] == [
        ("a", "positional", None),
        ("b", "positional", "1"),
        ("c", "positional", "(-1, float('inf'))"),
        ("d", "keyword", None),
        ("e", "keyword", "None"),
        ("old", "kwargs", None),
        ("size", "kwargs", "64"),
        ("flag", "kwargs", "False"),
        ("bare", "kwargs", "None"),
    ]
    assert {(row["package"], row["version"]) for row in TABLE} == {(s.package, s.version) for s in tool.SOURCES}
