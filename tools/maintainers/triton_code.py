"""What makes a Triton kernel another one: its code, told apart from names, comments and layout."""

from __future__ import annotations

import ast
import functools
import hashlib

import triton
from triton.runtime.jit import JITCallable


class _Numbered(ast.NodeTransformer):
    """Calls arguments and variables v0, v1, ... in the order of their first mention: a new name is no new kernel."""

    def __init__(self, function: ast.FunctionDef):
        stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not is_read(node)}
        self.local = stored | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        self.numbers: dict[str, str] = {}

    def number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"v{len(self.numbers)}") if name in self.local else name

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.number(node.arg)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.number(node.id)
        return node


def is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


@functools.lru_cache(maxsize=None)
def code_of(function: JITCallable) -> str:
    """The code of a kernel and of what it calls, without docstrings, comments, layout and names of variables."""
    tree = ast.parse(function.src)
    body = tree.body[0].body
    if ast.get_docstring(tree.body[0]) is not None:
        del body[0]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    parts = [ast.unparse(_Numbered(tree.body[0]).visit(tree))]
    for name in sorted(used & function.fn.__globals__.keys()):
        value = function.fn.__globals__[name]
        if isinstance(value, JITCallable):
            parts.append(code_of(value))
        elif isinstance(value, (bool, int, float, str, triton.language.constexpr)):
            parts.append(f"{name}={value}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
