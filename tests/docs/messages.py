"""Every error and warning text that the package's sources can produce, read from them without running anything.

A text is a template: what is filled in at run time is the character ``…``. ``f"{op}: {name} must be {what}"`` is
``…: … must be …``. A value that is a variable is followed to what is assigned to it, to the arguments of the calls of
its function, or to what a function of the same module returns; so one place in the sources may give several texts.
"""

import ast
import itertools
import re
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from tests.conftest import ROOT

PACKAGE = ROOT / "torch-ext" / "packfree_kernels"
HOLE = "…"
# Functions of _checks.py that make an error of (op, argument, must, got).
HOUSE_WORDING = ("value_error", "type_error")
# Functions whose argument of this number is a text that users see.
OTHER_TEXTS = {"_assert_async": 1, "warn": 0}
# What keeps the third of those four arguments in a table: its argument of this number.
TABLES = {"_Kind": 1}
_DEEPEST = 4


class Message(NamedTuple):
    """A text and where it is made: ``hooks/masks.py:159``."""

    where: str
    text: str


class Module:
    """A source file, with what is needed to follow a name to the strings it may hold."""

    def __init__(self, path: Path):
        self.name = path.relative_to(PACKAGE).as_posix()
        self.tree = ast.parse(path.read_text())
        self.functions: Dict[str, ast.FunctionDef] = {}
        self.around: Dict[ast.AST, Optional[ast.FunctionDef]] = {}
        self._walk(self.tree, None)
        self.calls = [node for node in self.around if isinstance(node, ast.Call)]

    def _walk(self, node: ast.AST, function: Optional[ast.FunctionDef]) -> None:
        for child in ast.iter_child_nodes(node):
            self.around[child] = function
            inside = function
            if isinstance(child, ast.FunctionDef):
                self.functions[child.name] = inside = child
            self._walk(child, inside)

    def texts(self, node: Optional[ast.AST], depth: int = 0) -> Set[str]:
        """What the expression ``node`` may be as a string."""
        if node is None or depth > _DEEPEST:
            return {HOLE}
        if isinstance(node, ast.Constant):
            return {str(node.value)}
        if isinstance(node, ast.FormattedValue):
            return self.texts(node.value, depth)
        if isinstance(node, ast.JoinedStr):
            return _joined(self.texts(part, depth) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not _adds_a_number(node):
            return _joined([self.texts(node.left, depth), self.texts(node.right, depth)])
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, depth) | self.texts(node.orelse, depth)
        if isinstance(node, ast.Name):
            return self._of_name(node, depth + 1)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth + 1)
        return {HOLE}

    def _of_name(self, node: ast.Name, depth: int) -> Set[str]:
        function = self.around[node]
        while function is not None:
            if node.id in parameters_of(function):
                places = [argument_of(call, function, node.id) for call in self.calls if name_of(call) == function.name]
                return self._any_of([place for place in places if place is not None], depth)
            values = _assigned(list(ast.walk(function)), node)
            if values:
                return self._any_of(values, depth)
            function = self.around[function]
        return self._any_of(_assigned(self.tree.body, node), depth)

    def _of_call(self, node: ast.Call, depth: int) -> Set[str]:
        """What a function of this module returns, where that is written there as a string."""
        function = self.functions.get(name_of(node))
        returns = [] if function is None else [part for part in ast.walk(function) if isinstance(part, ast.Return)]
        strings = [part.value for part in returns if isinstance(part.value, ast.JoinedStr) or _is_text(part.value)]
        return self._any_of(strings, depth)

    def _any_of(self, nodes: List[ast.AST], depth: int) -> Set[str]:
        return set().union(*(self.texts(node, depth) for node in nodes)) if nodes else {HOLE}


def parameters_of(function: ast.FunctionDef) -> List[str]:
    return [argument.arg for argument in function.args.args if argument.arg != "self"]


def argument_of(call: ast.Call, function: ast.FunctionDef, name: str) -> Optional[ast.AST]:
    """What ``call`` gives to the parameter ``name`` of ``function``."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    place = parameters_of(function).index(name)
    return call.args[place] if place < len(call.args) else None


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", "")


def _assigned(nodes: List[ast.AST], used: ast.Name) -> List[ast.AST]:
    """What the last assignment above ``used`` gives it, or each turn of the last loop over tuples."""
    found: List[Tuple[int, List[ast.AST]]] = []
    for node in nodes:
        if getattr(node, "lineno", used.lineno + 1) > used.lineno:
            continue
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == used.id for target in node.targets):
            found.append((node.lineno, [node.value]))
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Tuple):
            names = [getattr(target, "id", "") for target in node.target.elts]
            rows = [row.elts for row in node.iter.elts if isinstance(row, ast.Tuple) and len(row.elts) == len(names)]
            if used.id in names:
                found.append((node.lineno, [row[names.index(used.id)] for row in rows]))
    return max(found, key=lambda pair: pair[0])[1] if found else []


def _adds_a_number(node: ast.BinOp) -> bool:
    return isinstance(node.right, ast.Constant) and not isinstance(node.right.value, str)


def _is_text(node: Optional[ast.AST]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""


def _joined(parts) -> Set[str]:
    joined = {"".join(choice) for choice in itertools.product(*map(sorted, parts))}
    return {re.sub(f"{HOLE}+", HOLE, text) for text in joined}


def python_messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = Module(path)
        for call in module.calls:
            where = f"{module.name}:{call.lineno}"
            name = name_of(call)
            function = module.around[call]
            if name in HOUSE_WORDING and len(call.args) == 4:
                op, argument, must, got = (module.texts(part) for part in call.args)
                texts = _joined([op, {": "}, argument, {" must "}, must, {", got "}, got])
            elif name in TABLES and len(call.args) > TABLES[name]:
                texts = _joined([{f"{HOLE}: {HOLE} must "}, module.texts(call.args[TABLES[name]]), {f", got {HOLE}"}])
            elif name in OTHER_TEXTS and len(call.args) > OTHER_TEXTS[name]:
                texts = module.texts(call.args[OTHER_TEXTS[name]])
            elif name.endswith("Error") and name[0].isupper() and call.args:
                if function is not None and function.name in HOUSE_WORDING:
                    continue
                texts = module.texts(call.args[0])
            else:
                continue
            yield from (Message(where, text) for text in sorted(texts))


def cpp_messages() -> Iterator[Message]:
    """The texts of the checks in the bindings: string literals, with a hole for everything between them."""
    for path in sorted((ROOT / "torch-ext" / "bindings").rglob("*")):
        source = path.read_text()
        for match in re.finditer(r"(?<!define )(?:STD_TORCH|PACKFREE)_CHECK\(", source):
            arguments = _arguments(source, match.end())
            text = HOLE.join("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', argument)) for argument in arguments[1:])
            line = source.count("\n", 0, match.start()) + 1
            yield Message(f"{path.relative_to(ROOT).as_posix()}:{line}", re.sub(f"{HOLE}+", HOLE, text))
        for function in re.finditer(r"std::string text = \"([^\"]+)\"", source):
            yield Message(path.relative_to(ROOT).as_posix(), function[1] + HOLE)


def _arguments(source: str, begin: int) -> List[str]:
    """The arguments of a call whose parenthesis has been opened, cut at the commas between them."""
    depth, quoted, found, at = 1, False, [], begin
    start = begin
    while depth:
        letter = source[at]
        if quoted:
            at += letter == "\\"
            quoted = letter != '"'
        elif letter == '"':
            quoted = True
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if not quoted and ((letter == "," and depth == 1) or depth == 0):
            found.append(source[start:at])
            start = at + 1
        at += 1
    return found


def all_messages() -> List[Message]:
    return [*python_messages(), *cpp_messages()]
