"""One pack cut over the ranks of a process group; see README.md in this folder."""

from .batch import shard_batch
from .context import ContextParallel
from .switch import sequence_parallel

__all__ = ["ContextParallel", "sequence_parallel", "shard_batch"]
