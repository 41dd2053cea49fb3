"""The Triton kernels at the sizes of models, in Triton's interpreter: tiles of D 64, 128, 256, states of 128, 256.

A slow lane, ``PACKFREE_TRITON=all``: each case takes minutes. What runs without it has small tiles and the same code.
"""

import importlib
import os

import pytest

from tests.harness import properties
from tests.harness.ops.sizes import BY_TRITON, PACK
from tests.harness.triton import DTYPES, served_by_triton

pytestmark = pytest.mark.skipif(os.environ.get("PACKFREE_TRITON") != "all", reason="slow; set PACKFREE_TRITON=all")
CASES = [
    pytest.param(make, dtype, id=f"{function}-{size}-{str(dtype).removeprefix('torch.')}")
    for function, sizes in BY_TRITON.items()
    for size, make in sizes.items()
    for dtype in DTYPES
]


@pytest.mark.parametrize("make, dtype", CASES)
def test_matches_reference_at_the_sizes_of_models(kernel, monkeypatch, make, dtype):
    """By the plan of a Hopper GPU, whose chunks and tiles are the longest."""
    launch = importlib.import_module(f"{kernel.__name__}._triton.launch")
    few = launch.Target("cuda", 90, 3, launch.SM90.shared_memory)
    monkeypatch.setattr(launch, "_INTERPRETER", few)
    with served_by_triton(kernel):
        properties.check_against_reference(make(), PACK, dtype)
