"""Every public function under torch.compile(fullgraph=True, dynamic=True), all of its arguments inputs of the graph.

Packs of 1 to 64 samples: outputs and gradients have the bits of eager mode, out of at most two graphs. With states
there is one for a pack of one sample, because PyTorch compiles a size of 1 by itself; without states one for all.

By default the first case of each function runs; every case, and PyTorch's default backend for each function, with

    PACKFREE_COMPILE=all .venv/bin/python -m pytest tests/compile/test_compile_functions.py
"""

import logging
import os

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from tests.harness.ops import EXACT, WITH_PROJECTIONS, flash_attn_varlen
from tests.harness.ops.steps import Step
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits, check_against_reference, run_with_gradients
from tests.harness.states import without_states

ALL = os.environ.get("PACKFREE_COMPILE") == "all"

# Numbers of samples and tokens that are no other size of a case: PyTorch takes equal sizes for the same size.
PACKS = [
    Pack("eleven", (5, 9, 13, 3, 1, 1, 10, 2, 6, 7, 4)),
    Pack("sixty-four", (1, 2, 1, 3) * 16),
    Pack("one", (23,)),
    Pack("all of one token", (1,) * 29),
    Pack("one long", (1, 50, 2)),
]
ROWS = [Pack("", lengths) for lengths in ((9,) * 11, (2,) * 64, (23,), (3,) * 29)]

FUNCTIONS = {**EXACT, **WITH_PROJECTIONS, "flash_attn_func": [flash_attn_varlen.rows_under_test]}


def _cases():
    """Function, what makes its op, spelling of the boundaries, packs."""
    cases = []
    for name, makes in FUNCTIONS.items():
        if name.endswith("without a projection") and not ALL:
            continue
        packs = ROWS if name == "flash_attn_func" else PACKS
        for number, make in enumerate(makes if ALL else makes[:1]):
            spellings = make().spellings
            if name in WITH_PROJECTIONS and not ALL:
                # A whole layer hands its boundaries to functions that are tried with everything.
                spellings, packs = spellings[:1], packs[:2]
            for spelling in spellings:
                cases.append(pytest.param(name, make, spelling, packs, id=f"{name}-{number}-{spelling}"))
    return cases


class Compiled:
    """The public function ``name`` compiled; ``with compiled:`` puts it in the place of the function itself.

    Without ``states`` it is not asked for any.
    """

    def __init__(self, kernel, name, backend="aot_eager", states=True, **options):
        torch._dynamo.reset()
        self.states = states
        self.kernel, self.name, self.function = kernel, name, getattr(kernel, name)
        self.call = torch.compile(self.function, fullgraph=True, dynamic=True, backend=backend, **options)

    @property
    def graphs(self) -> int:
        """Those that are kept. PyTorch may trace one twice, to take a float for a constant."""
        return len(_debug_get_cache_entry_list(self.function.__code__))

    def __enter__(self):
        setattr(self.kernel, self.name, self.call if self.states else without_states(self.call))

    def __exit__(self, *error):
        setattr(self.kernel, self.name, self.function)


def results_of(op, pack, spelling, **more):
    """Outputs and gradients of all inputs. Where the number of samples cannot be read there are no states for each."""

    def known(tensors):
        return {key: value for key, value in tensors.items() if spelling == "cu_seqlens" or op.kind(key) != "states"}

    torch.manual_seed(0)
    inputs, boundaries = known(op.make(pack, torch.float32)), op.boundaries(pack, spelling)
    return run_with_gradients(lambda leaves: known(op.run(leaves, **boundaries, **more)), inputs)


def check_same_bits(op, compiled, pack, spelling, **more):
    expected = results_of(op, pack, spelling, **more)
    with compiled:
        got = results_of(op, pack, spelling, **more)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert_same_bits(f"{key} of {len(pack.lengths)} samples", got[key], value)


@pytest.mark.parametrize("name, make, spelling, packs", _cases())
def test_few_graphs_for_any_pack(kernel, name, make, spelling, packs):
    op, compiled = make(), Compiled(kernel, name.split(" ")[0], states=spelling == "cu_seqlens")
    for pack in packs:
        check_same_bits(op, compiled, pack, spelling)
    assert 0 < compiled.graphs <= 2


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "chunk_gated_delta_rule", "flash_attn_varlen_func"])
def test_optional_arguments(kernel, name):
    """Those that the harness leaves out; numbers are inputs of the graph too."""
    op, compiled = EXACT[name][0](), Compiled(kernel, name)
    for pack in PACKS[:2]:
        states, offsets, longest = len(pack.lengths), pack.cu_seqlens, torch.tensor(max(pack.lengths))
        more = {
            "causal_conv1d_fn": dict(final_states_out=torch.zeros(states, 20, 3)),
            "chunk_gated_delta_rule": dict(
                cu_seqlens_cpu=offsets.clone(),
                chunk_indices=torch.zeros(states, 2, dtype=torch.int32),
                scale=0.3,
                chunk_size=64,
            ),
            "flash_attn_varlen_func": dict(
                cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest, softmax_scale=0.3
            ),
        }
        check_same_bits(op, compiled, pack, "cu_seqlens", **more[name])
    assert compiled.graphs == 1


# On a CPU there are no CUDA graphs, which "reduce-overhead" is about: it is the default mode then, without a warning.
@pytest.mark.filterwarnings(
    "error",
    "ignore:.*torch.jit.*:DeprecationWarning",
    # PyTorch looks at each input's gradient while it traces, and hides the warning by a filter of its own.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"] if ALL else ["reduce-overhead"])
@pytest.mark.parametrize("name", FUNCTIONS if ALL else ["causal_conv1d_fn"])
def test_default_backend(kernel, name, mode, caplog):
    """Inductor rounds PyTorch's own parts as it likes: the results are within the budget of eager mode's."""
    op = FUNCTIONS[name][0]()
    compiled = Compiled(kernel, name.split(" ")[0], "inductor", mode=mode)
    # The functions for decoding have no gradients, so their reference is not asked for any.
    gradients = not name.startswith("fused_recurrent")
    for pack in ROWS[:2] if name == "flash_attn_func" else PACKS[:2]:
        with compiled, torch.set_grad_enabled(gradients):
            check_against_reference(op, pack, torch.float32)
    assert compiled.graphs == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("slots", [False, True], ids=["rows", "slots"])
@pytest.mark.parametrize("name", ["causal_conv1d_update", "selective_state_update", "flash_attn_with_kvcache"])
def test_few_graphs_for_any_batch(kernel, name, slots):
    """Steps of decoding, with what they update in place."""
    compiled = Compiled(kernel, name)
    for batch in (11, 17) if slots else (11, 1, 17):
        step = Step(kernel, name, batch, slots)
        expected, updated = step()
        step.function = compiled.call
        got, updated_by_it = step()
        for left, right in zip([got, *updated_by_it], [expected, *updated]):
            assert_same_bits(f"batch of {batch}", left, right)
    assert 0 < compiled.graphs <= 2


@pytest.mark.parametrize(
    "argument, change",
    [
        ("cache_seqlens", dict(cache_seqlens=torch.tensor([4, 9]))),
        ("block_table", dict(cache_seqlens=torch.tensor([1, 5]), block_table=torch.tensor([[0, 1], [2, -1]]))),
        ("cache_batch_idx", dict(block_table=None, cache_batch_idx=torch.tensor([0, 7]))),
    ],
)
def test_values_are_checked_in_the_graph(kernel, argument, change):
    """What eager mode refuses by value before it computes."""
    step = Step(kernel, "flash_attn_with_kvcache", slots=True)
    step.function = Compiled(kernel, "flash_attn_with_kvcache", "eager").call
    with pytest.raises(RuntimeError, match=f"flash_attn_with_kvcache: {argument} must point into the cache"):
        step(**change)


def test_window_in_a_tensor_is_refused(kernel):
    """Its values are numbers that a graph is compiled for."""
    q = torch.randn(10, 2, 8)
    call = Compiled(kernel, "flash_attn_varlen_func", "eager").call
    with pytest.raises(Exception, match="window_size must be two numbers where values cannot be read, got a tensor"):
        call(q, q, q, PACKS[0].cu_seqlens.clamp(max=10), window_size=torch.tensor([3, 0]))


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "chunk_kda", "mamba_chunk_scan_combined", "selective_scan_fn"])
def test_states_of_an_unknown_number_of_samples_are_refused(kernel, name):
    """One a token would be neither eager mode's shape nor a size of memory that anyone expects."""
    op, compiled = EXACT[name][0](), Compiled(kernel, name)
    for spelling in ("seq_idx", "position_ids"):
        with compiled, pytest.raises(Exception, match="cu_seqlens must be given under torch.compile where there is a"):
            op.run(op.make(PACKS[0], torch.float32), **op.boundaries(PACKS[0], spelling))
