"""Products (``tl.dot``) in a kernel's TTIR, Triton's first form of a kernel, which no target has changed yet.

What products must not look like, because some Triton that our users have compiles it to an error or to wrong numbers:

* a sum over less than 16: Triton 3.6 and 3.7 refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SHORTEST = 16

_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_RESULT = re.compile(r"^(%[\w.$-]+)(?::(\d+))? = (.*)$")
_OPERATION = re.compile(r'^"?([a-z_]+\.[a-z_.]+)')
_ENTRY = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")
_TILES = re.compile(r"tensor<(\d+)x(\d+)x\w+> \* tensor<(\d+)x(\d+)x\w+>")


@dataclass
class _Operation:
    name: str
    operands: list[str]
    line: str
    region: int
    in_loop: bool


@dataclass
class _Kernel:
    """Who makes each value, and of what: an operation, or the values that enter or leave a loop or a branch."""

    made_by: dict[str, _Operation] = field(default_factory=dict)
    passed_on: dict[str, list[str]] = field(default_factory=dict)
    products: list[_Operation] = field(default_factory=list)


def _parsed(text: str) -> _Kernel:
    kernel = _Kernel()
    # Of each open region: its number, the results of its owner, what a loop carries, and whether it lies in a loop.
    open_regions: list[tuple[int, list[str], list[str], bool]] = [(0, [], [], False)]
    count = 0
    for line in map(str.strip, text.splitlines()):
        if line.startswith("}"):
            owner = open_regions.pop()
            if line.endswith("{"):  # } else {
                count += 1
                open_regions.append((count, *owner[1:]))
            continue
        region, results, carried, in_loop = open_regions[-1]
        named = _RESULT.match(line)
        body = named[3] if named else line
        body = body.split(" loc(")[0]
        operation = _OPERATION.match(body)
        name = operation[1] if operation else ""
        made = [] if not named else [named[1]] if not named[2] else [f"{named[1]}#{i}" for i in range(int(named[2]))]
        if name == "scf.yield":
            for i, value in enumerate(_VALUE.findall(body.split(" : ")[0])):
                for target in (*results[i : i + 1], *carried[i : i + 1]):
                    kernel.passed_on.setdefault(target, []).append(value)
        elif name in ("scf.for", "scf.if"):
            entries = _ENTRY.findall(body.split("iter_args", 1)[-1]) if "iter_args" in body else []
            for inside, outside in entries:
                kernel.passed_on.setdefault(inside, []).append(outside)
            count += 1
            open_regions.append((count, made, [inside for inside, _ in entries], in_loop or name != "scf.if"))
            continue
        else:
            found = _Operation(name, _VALUE.findall(body.split(" : ")[0]), body, region, in_loop)
            kernel.made_by.update((value, found) for value in made)
            if name == "tt.dot":
                kernel.products.append(found)
        if line.endswith("{") or line.endswith("({"):
            count += 1
            open_regions.append((count, made, [], in_loop))
    return kernel


def shortest_axis(text: str) -> int:
    """Of all products in TTIR ``text``; 0 if there is none."""
    axes = [int(axis) for product in _parsed(text).products for axis in _TILES.search(product.line).groups()]
    return min(axes, default=0)


def hazards(text: str) -> Iterator[str]:
    """What is wrong with the products of a kernel in TTIR ``text``."""
    for product in _parsed(text).products:
        summed = int(_TILES.search(product.line)[2])
        if summed < SHORTEST:
            yield f"has a product that sums over {summed}"
