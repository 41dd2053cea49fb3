"""Products (``tl.dot``) in a kernel's TTIR, Triton's first form of a kernel, which no target has changed yet.

What products must not look like, because some Triton that our users have compiles it to an error or to wrong numbers:

* a sum over less than 16: Triton 3.6 and 3.7 refuse it;
* less than 16 columns beside 64 rows or more, whose products read the columns from shared memory on Hopper: Triton 3.8
  and 3.9 read behind a tile of 8 (their issue 10629);
* a left operand that is the transposed result of another product: wrong on Hopper before Triton 3.7.1 (its issue 6124);
* on Blackwell, in a loop, a product of 64 rows or more that adds to the result of another one, or is made of what such
  a product gave in an earlier round: Triton before 3.9 runs them in the wrong order (its issues 9871, 10590, 10821).
  Adding the two results with ``+`` is the same to the compiler as one accumulator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SHORTEST = 16
# From this many rows on, products take operands from shared memory on Hopper, and accumulate in tensor memory on
# Blackwell.
ROWS_OF_A_WARPGROUP = 64

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
    """Who makes each value, and of what: an operation, or the values that enter or leave a loop or a branch.

    ``carried`` tells the loop, by its region, that carries a value from round to round; ``parents`` the region around
    each region.
    """

    made_by: dict[str, _Operation] = field(default_factory=dict)
    passed_on: dict[str, list[str]] = field(default_factory=dict)
    products: list[_Operation] = field(default_factory=list)
    carried: dict[str, int] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)

    def regions_around(self, region: int) -> set[int]:
        found = {region}
        while region in self.parents:
            region = self.parents[region]
            found.add(region)
        return found


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
                kernel.parents[count] = open_regions[-1][0]
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
            count += 1
            kernel.parents[count] = region
            kernel.carried.update((inside, count) for inside, _ in entries)
            for inside, outside in entries:
                kernel.passed_on.setdefault(inside, []).append(outside)
            open_regions.append((count, made, [inside for inside, _ in entries], in_loop or name != "scf.if"))
            continue
        else:
            found = _Operation(name, _VALUE.findall(body.split(" : ")[0]), body, region, in_loop)
            kernel.made_by.update((value, found) for value in made)
            if name in _PRODUCTS:
                kernel.products.append(found)
        if line.endswith("{") or line.endswith("({"):
            count += 1
            kernel.parents[count] = region
            open_regions.append((count, made, [], in_loop))
    return kernel


# What they give is no longer a tile of a product.
_ENDS = ("tt.load", "tt.reduce")
_PRODUCTS = ("tt.dot", "ttng.warp_group_dot", "ttng.tc_gen5_mma")
_TRANSPOSES = ("tt.trans", "ttg.memdesc_trans")


def _origins(kernel: _Kernel, value: str, region: int) -> Iterator[tuple[_Operation, bool, bool]]:
    """The products that ``value`` comes from, whether transposed, and whether in an earlier round of a loop around its
    use in ``region``."""
    around = kernel.regions_around(region)
    seen: set[tuple[str, bool, bool]] = set()
    waiting = [(value, False, False)]
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        value, transposed, earlier = entry
        made_by = kernel.made_by.get(value)
        if made_by is None:
            carried = earlier or kernel.carried.get(value) in around
            waiting += [(source, transposed, carried) for source in kernel.passed_on.get(value, [])]
        elif made_by.name in _PRODUCTS:
            yield made_by, transposed, earlier
        elif made_by.name == "ttng.warp_group_dot_wait":
            # It hands on each of what it waits for.
            place = int(value.partition("#")[2] or 0)
            waiting.append((made_by.operands[place], transposed, earlier))
        elif made_by.name not in _ENDS:
            turned = transposed != (made_by.name in _TRANSPOSES)
            waiting += [(source, turned, earlier) for source in made_by.operands]


def shortest_axis(text: str) -> int:
    """Of all products in TTIR ``text``; 0 if there is none."""
    axes = [int(axis) for product in _parsed(text).products for axis in _TILES.search(product.line).groups()]
    return min(axes, default=0)


def hazards(text: str, target: str) -> Iterator[str]:
    """What is wrong with the products of a kernel in TTIR ``text``, compiled for ``target`` (``"sm_90"``)."""
    kernel = _parsed(text)
    is_blackwell = target.startswith("sm_") and int(target[3:]) >= 100
    for product in kernel.products:
        left, right, accumulator = product.operands[:3]
        rows, summed, _, columns = map(int, _TILES.search(product.line).groups())
        if summed < SHORTEST:
            yield f"has a product that sums over {summed}"
        if rows >= ROWS_OF_A_WARPGROUP and columns < SHORTEST:
            yield f"has a product of {rows} rows and {columns} columns"
        if any(transposed for _, transposed, _ in _origins(kernel, left, product.region)):
            yield "multiplies a product that it has transposed"
        if not is_blackwell or not product.in_loop:
            continue
        before = kernel.made_by.get(accumulator)
        chained = before is not None and before.name == "tt.dot" and before.region == product.region
        if chained and rows >= ROWS_OF_A_WARPGROUP:
            yield "adds two products to one accumulator in a round of a loop"
        factors = [found for operand in (left, right) for found in _origins(kernel, operand, product.region)]
        if any(earlier and _rows(origin) >= ROWS_OF_A_WARPGROUP for origin, _, earlier in factors):
            yield "multiplies what a product of an earlier round gave"


def _rows(product: _Operation) -> int:
    return int(_TILES.search(product.line)[1])


def transposed_operands(text: str) -> int:
    """How many products of a kernel in TTGIR ``text``, of any kind, have a transposed product for a left operand."""
    kernel = _parsed(text)
    lefts = [_origins(kernel, product.operands[0], product.region) for product in kernel.products]
    return sum(any(transposed for _, transposed, _ in origins) for origins in lefts)
