"""What holds for every op that Triton serves: all dtypes, no sequence at all, outputs that share nothing."""

import dataclasses
import importlib
from collections import Counter

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.conftest import load_tool
from tests.harness import properties
from tests.harness.ops import flash_attn_varlen, gated_delta_rule, kda, mamba2_scan
from tests.harness.packings import Pack
from tests.harness.triton import served_by_triton
from tests.ops.test_delta_rules import check_forward

DELTA_RULES = (gated_delta_rule.RULE, kda.RULE)
GATED = dataclasses.replace(kda.CASES[-3], value_heads=1)
ATTENTION = flash_attn_varlen.Case("small", (2, 1), (16, 16), window=(3, 0), sinks=True)
MAMBA2 = dataclasses.replace(mamba2_scan.CASES[0], heads=2, groups=1, head_dim=3, state_dim=5)
OPS = {
    "flash_attn_varlen": lambda: flash_attn_varlen.op_under_test(ATTENTION),
    "gated_delta_rule": lambda: gated_delta_rule.op_under_test(gated_delta_rule.CASES[0]),
    "kda": lambda: kda.op_under_test(GATED),
    "mamba2_scan": lambda: mamba2_scan.op_under_test(MAMBA2),
}
every_op = pytest.mark.parametrize("name", OPS)


@pytest.fixture(autouse=True)
def _served(kernel):
    with served_by_triton(kernel):
        yield


@pytest.fixture
def started(monkeypatch):
    """The names of the kernels that run, and how often."""
    names = Counter()
    run = InterpretedFunction.run

    def counted(self, *arguments, **options):
        names[self.fn.__name__] += 1
        return run(self, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    return names


@pytest.fixture(scope="module")
def calls(kernel):
    """Calls of every op, and the tool that makes them on fake CUDA tensors."""
    tool = load_tool("maintainers.triton_calls")
    return tool, [call for call in tool.all_calls() if call.dtype == torch.bfloat16]


def test_every_kernel_in_bfloat16(kernel, calls, started):
    """Against the references, forward and backward."""
    tool, every_call = calls
    for name, make in OPS.items():
        # More units of heads than one, whose sums are a kernel of their own.
        case = dataclasses.replace(MAMBA2, heads=9, head_dim=2, state_dim=3)
        op = mamba2_scan.op_under_test(case) if name == "mamba2_scan" else make()
        properties.check_against_reference(op, Pack("", (3, 0, 1), padding=1), torch.bfloat16)
    ranges = flash_attn_varlen.op_under_test(flash_attn_varlen.Case("ranges", (2, 1), (16, 16), ranges="blocks"))
    properties.check_against_reference(ranges, Pack("", (3, 0, 1), padding=1), torch.bfloat16)
    for rule in DELTA_RULES:
        check_forward(rule.op_under_test(kda.CASES[0], rule.recurrent), Pack("", (2, 1)), torch.bfloat16)
    target = importlib.import_module(f"{kernel.__name__}._triton.launch").SM90
    expected = {
        launch.kernel.fn.__name__ for call in every_call for launch in tool.launches_of(kernel, target, call)
    }
    assert expected and expected <= started.keys(), expected - started.keys()


@every_op
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_sequence(name, tokens):
    """Offsets may be [0] alone: all tokens are padding, whose results and gradients are 0."""
    op, pack = OPS[name](), Pack("none", (), padding=tokens)
    inputs = op.make(pack, torch.float32)
    result = properties.run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack)), inputs)
    for tensor, value in result.items():
        assert bool((value == 0).all()), tensor


def test_outputs_share_no_memory(kernel, calls):
    """Absent ones neither: an op must not return one tensor twice."""
    tool, every_call = calls
    devices = importlib.import_module(f"{kernel.__name__}._devices")
    implementation, returned = devices.triton_implementation, {}

    def watched(op):
        def run(*arguments):
            returned[op] = implementation(op)(*arguments)
            return returned[op]

        return run

    target = importlib.import_module(f"{kernel.__name__}._triton.launch").SM90
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "triton_implementation", watched)
        for call in every_call:
            for given in (call, _without_options(call)):
                tool.launches_of(kernel, target, given)
                for op, outputs in returned.items():
                    storages = {value.untyped_storage()._cdata for value in outputs}
                    assert len(storages) == len(outputs), f"{op} ({call})"
                returned.clear()


def _without_options(call):
    """The call without the tensors that its op can do without."""
    optional = ("s_aux", "initial_state", "a_log", "dt_bias", "D", "z")

    def arguments():
        return {name: None if name in optional else value for name, value in call.arguments().items()}

    return dataclasses.replace(call, arguments=arguments)
