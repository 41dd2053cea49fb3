"""What the replacements of transformers' functions hand on to ours."""

import functools
import inspect

import pytest
import torch

BOUNDARIES = {"cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "seq_idx", "position_ids"}
# Function -> its tensors, of one row with four tokens, and which of ours means nothing for the result.
HANDED_ON = {
    "causal_conv1d_fn": (dict(x=(1, 2, 4), weight=(2, 3)), set()),
    "chunk_gated_delta_rule": (dict(q=(1, 4, 1, 2), k=(1, 4, 1, 2), v=(1, 4, 1, 2)), {"chunk_size"}),
    "chunk_kda": (dict(q=(1, 4, 1, 2), k=(1, 4, 1, 2), v=(1, 4, 1, 2)), {"chunk_size"}),
    "mamba_chunk_scan_combined": (
        dict(x=(1, 4, 1, 2), dt=(1, 4, 1), A=(1,), B=(1, 4, 1, 2), C=(1, 4, 1, 2)), set()
    ),
    "selective_scan_fn": (dict(u=(1, 2, 4), delta=(1, 2, 4), A=(2, 2), B=(1, 2, 4), C=(1, 2, 4)), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDED_ON)
def test_every_argument_of_a_packed_call_reaches_ours(kernel, name):
    """What upstream's function knows is not dropped on the way; what it does not know stays behind."""
    ours, got = getattr(kernel, name), {}

    @functools.wraps(ours)
    def record(*args, **keywords):
        got.update(inspect.signature(ours).bind(*args, **keywords).arguments)
        return args[0]

    shapes, without_meaning = HANDED_ON[name]
    tensors = [torch.zeros(shape) for shape in shapes.values()]
    more = set(inspect.signature(ours).parameters) - set(shapes) - BOUNDARIES
    given = {argument: "silu" if argument == "activation" else object() for argument in more}
    hooked = kernel.hooks.functions.REPLACEMENTS[name](name, None, record)
    hooked(*tensors, **given, num_items_in_batch=3, cu_seqlens=torch.tensor([0, 1, 4], dtype=torch.int32))
    for argument in more - without_meaning:
        assert got.pop(argument) is given[argument], argument
    assert set(got) - set(shapes) <= BOUNDARIES
