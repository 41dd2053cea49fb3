"""The delta rules' Triton kernels, in Triton's interpreter: what the CPU kernels promise, over their own chunks.

Arguments, spellings of boundaries and refusals come before the ops and are tested with the CPU kernels.
"""

import dataclasses
import importlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.harness import properties
from tests.harness.ops import gated_delta_rule, kda
from tests.harness.ops.delta_rules import CASES, Case
from tests.harness.packings import Pack
from tests.harness.triton import DTYPES, served_by_triton
from tests.ops.test_delta_rules import RULES, check_forward, every_rule, test_small_gradients_of_decay
from tests.ops.test_delta_rules_cases import EXTREMES, EXTREMES_OF_CHANNELS, GROWTH, check_extreme

__all__ = ["test_small_gradients_of_decay"]  # collected here too, where the Triton kernels serve it

# The interpreter takes its time for each chunk and head.
ONE_HEAD = Case("one head", value_heads=1)
EVERY_CASE = [
    pytest.param(module.RULE, dataclasses.replace(case, key_heads=1, value_heads=1) if case.key_heads > 2 else case,
                 id=f"{module.RULE}-{case}")
    for module in (gated_delta_rule, kda) for case in module.CASES
]  # fmt: skip


@pytest.fixture(autouse=True)
def _served(kernel):
    with served_by_triton(kernel):
        yield


def module(kernel, name):
    return importlib.import_module(f"{kernel.__name__}.{name}")


def over_an_edge(kernel, padding=0):
    """A sequence of two chunks, an empty one and a short one."""
    return Pack("over an edge", (module(kernel, "_triton.delta_sizes").CHUNK + 1, 0, 2), padding)


@pytest.mark.parametrize("rule, case", EVERY_CASE)
def test_matches_reference(rule, case):
    properties.check_against_reference(rule.op_under_test(case), Pack("", (9,), padding=1), torch.float32)


@every_rule
def test_matches_reference_over_an_edge(kernel, rule):
    properties.check_against_reference(rule.op_under_test(CASES[0]), over_an_edge(kernel, padding=1), torch.float32)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@every_rule
def test_matches_reference_in_16_bits(rule, dtype):
    properties.check_against_reference(rule.op_under_test(ONE_HEAD), Pack("", (3, 1)), dtype)


@pytest.mark.parametrize("key_dim, value_dim", [(70, 35), (130, 12)], ids=str)
@every_rule
def test_matches_reference_over_more_than_one_tile(rule, key_dim, value_dim):
    """Head dims that are not a multiple of any tile of K or V, and more than one of each; also beyond K = 128."""
    case = Case("", value_heads=1, key_dim=key_dim, value_dim=value_dim)
    properties.check_against_reference(rule.op_under_test(case), Pack("", (6,)), torch.float32)


@pytest.mark.parametrize("rule, case", EVERY_CASE)
def test_recurrent_matches_reference(rule, case):
    check_forward(rule.op_under_test(case, rule.recurrent), Pack("", (0, 5, 1), padding=1), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@every_rule
def test_recurrent_matches_reference_in_16_bits(rule, dtype):
    check_forward(rule.op_under_test(CASES[0], rule.recurrent), Pack("", (0, 5, 1), padding=1), dtype)


@every_rule
def test_packed_equals_alone(kernel, rule):
    properties.check_packed_equals_alone(rule.op_under_test(ONE_HEAD), over_an_edge(kernel, padding=2), torch.float32)


@every_rule
def test_isolation(rule):
    properties.check_isolation(rule.op_under_test(ONE_HEAD), Pack("", (3, 2)), torch.float32, victims=[0])


@every_rule
def test_padding_may_hold_anything(rule):
    op, pack = rule.op_under_test(ONE_HEAD), Pack("", (3,), padding=2)
    inputs = op.make(pack, torch.float32)
    clean = properties.run_with_gradients(lambda x: op.run(x, cu_seqlens=pack.cu_seqlens), inputs)
    for name in op.token_axis.keys() & inputs.keys():
        inputs[name][:, -pack.padding :] = torch.nan
    spoiled = properties.run_with_gradients(lambda x: op.run(x, cu_seqlens=pack.cu_seqlens), inputs)
    for name, value in clean.items():
        properties.assert_same_bits(name, value, spoiled[name])


@every_rule
def test_extreme_decay(kernel, rule):
    check_extreme(EXTREMES["-1e4 at one token"], rule, rule.chunk, module(kernel, "_triton.delta_sizes").CHUNK + 5)


def test_extreme_decay_of_channels():
    check_extreme(EXTREMES_OF_CHANNELS["channels apart"], kda.RULE, kda.RULE.chunk, 20)


def test_growing_channels():
    check_extreme(GROWTH["some channels grow"], kda.RULE, kda.RULE.chunk, 9)


def arguments(rule, dtype, device, gate=True):
    """Positional arguments of the ops' tokens, gate, boundaries and states, with strides that no kernel expects."""
    T, H, HV, K, V, N = 100, 2, 4, 128, 64, 3

    def new(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    decays = (T, HV, K) if rule.per_channel else (T, HV)
    tokens = [*(new(n, T, X, dtype=dtype).transpose(0, 1) for n, X in ((H, K), (H, K), (HV, V))), new(*decays)]
    options = ((new(HV), new(HV, K), -5.0) if gate else (None, None, None)) if rule.per_channel else ()
    return (*tokens, new(T, HV), *options, new(N + 1, dtype=torch.int32), new(N, HV, K, V))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_value_is_read(kernel, rule):
    """On fake CUDA tensors, which have none, for every kind of GPU."""
    launch, devices = module(kernel, "_triton.launch"), module(kernel, "_devices")
    for target in launch.TARGETS:
        for dtype in (torch.float32, torch.bfloat16):
            with FakeTensorMode(), launch.recorded(target) as launches:
                inputs = arguments(rule, dtype, "cuda")
                q, k, v = inputs[:3]
                for op in (f"{rule}_fwd", f"{rule}_recurrent_fwd"):
                    o, state = devices.triton_implementation(op)(*inputs, 0.5, True, True)
                    assert o.shape == v.shape and o.dtype == dtype and o.is_cuda
                    assert state.shape == (3, 4, 128, 64) and state.dtype == torch.float32
                do = torch.empty(v.shape, dtype=dtype, device="cuda")
                results = devices.triton_implementation(f"{rule}_bwd")(do, state, *inputs, 0.5, True)
                for result, source in zip(results, (q, k, v)):
                    assert result.shape == source.shape and result.dtype == dtype
                assert results[-1].shape == state.shape
            names = {record.kernel.__name__ for record in launches}
            assert {"_pairs", "_solve", "_walk", "_outputs", "_step", "_walk_back", "_finish_rows"} <= names


@every_rule
def test_float64_is_refused(kernel, rule):
    inputs = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in
              arguments(rule, torch.float64, "cpu")]  # fmt: skip
    for op in (f"{rule}_fwd", f"{rule}_recurrent_fwd"):
        with pytest.raises(TypeError, match=rf"{op}: q must be float32, bfloat16 or float16 on a GPU, got float64"):
            module(kernel, "_devices").triton_implementation(op)(*inputs, 0.5, True, True)
