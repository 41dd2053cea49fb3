"""One pack cut over the ranks of a process group; see README.md in this folder."""

from .context import ContextParallel

__all__ = ["ContextParallel"]
