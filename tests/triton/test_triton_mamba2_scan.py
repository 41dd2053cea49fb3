"""Mamba-2's scan by its Triton kernels, in Triton's interpreter: against the reference, and packed against alone."""

import dataclasses
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness import properties
from tests.harness.ops import mamba2_fused
from tests.harness.ops.mamba2_scan import CASES, Case, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.harness.triton import DTYPES, served_by_triton

# Chunks of the plan that the interpreter picks by itself.
EDGE = 32
# The last one has states between chunks at places that are no multiple of a chunk.
PACKS = catalogue(EDGE) + [Pack("three chunks behind one token", (1, 3 * EDGE))]
AROUND = Pack("around an edge with gaps", (3, 0, EDGE + 1), padding=3)


FEW_HEADS = Case("two heads of a group", heads=2, groups=1, head_dim=3, state_dim=5)


@pytest.fixture(autouse=True)
def by_triton(kernel):
    with served_by_triton(kernel):
        yield


@pytest.fixture(scope="module")
def launch(kernel):
    return importlib.import_module(f"{kernel.__name__}._triton.launch")


@pytest.fixture(scope="module")
def chunk(kernel):
    return importlib.import_module(f"{kernel.__name__}._triton.mamba2_chunk")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_shortly(dtype):
    properties.check_against_reference(op_under_test(CASES[0]), SMALL, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case):
    properties.check_against_reference(op_under_test(case), AROUND, torch.float32)


@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_matches_reference_in_every_packing(pack):
    properties.check_against_reference(op_under_test(FEW_HEADS), pack, torch.float32)


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_matches_reference_in_half_precision(case):
    properties.check_against_reference(op_under_test(case), AROUND, torch.float16)


@pytest.mark.parametrize("gpu, dtype", [("SM90", torch.bfloat16), ("GFX942", torch.float16)], ids=str)
def test_matches_reference_in_every_plan(launch, chunk, monkeypatch, gpu, dtype):
    """Newer GPUs take longer chunks and larger tiles."""
    few = dataclasses.replace(getattr(launch, gpu), multiprocessors=3)
    monkeypatch.setattr(launch, "_INTERPRETER", few)
    plan = chunk.plan_for(torch.empty(1, dtype=dtype))
    assert plan.chunk != EDGE
    case = Case("wide", heads=1, groups=1, head_dim=70, state_dim=66, skip="channel")
    pack = Pack("around this plan's edge", (plan.chunk + 1, 2), padding=3)
    properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_packed_equals_alone(dtype):
    pack = Pack("an edge and gaps", (3, 0, EDGE + 1, 0, 1), padding=2)
    properties.check_packed_equals_alone(op_under_test(FEW_HEADS), pack, dtype)


def test_packing_properties():
    op, pack = op_under_test(FEW_HEADS), Pack("ragged", (5, EDGE + 1, 2))
    properties.check_permutation(op, pack, torch.float32)
    properties.check_isolation(op, pack, torch.float32, victims=[1])
    properties.check_spellings(op, pack, torch.float32)


def test_memory_forms():
    properties.check_memory_forms(op_under_test(FEW_HEADS), Pack("ragged", (5, 3)), torch.float16)


def test_padding_and_neighbours_may_hold_nan():
    """Rows behind the last offset are not read, and what lies there comes out as 0."""
    op = op_under_test(FEW_HEADS)
    pack = Pack("padding behind", (3, EDGE), padding=5)
    inputs = op.make(pack, torch.float32)
    clean = run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack)), inputs)
    for name in op.token_axis.keys() & inputs.keys():
        inputs[name][:, -pack.padding :] = float("nan")
    dirty = run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack)), inputs)
    for name, value in dirty.items():
        assert_same_bits(name, value, clean[name])


def test_state_carries_over():
    """Split at a chunk's edge = whole, to the bit."""
    op = op_under_test(FEW_HEADS)
    inputs = op.make(Pack("whole", (EDGE + 5,)), torch.float32)
    whole = run_with_gradients(lambda leaves: op.run(leaves), inputs)
    weights = properties.cotangents({name: whole[name] for name in ("y", "final_states")})

    def in_two(leaves):
        along = op.token_axis.keys() & leaves.keys()
        first = op.run({**leaves, **{name: leaves[name][:, :EDGE] for name in along}})
        rest = {name: leaves[name][:, EDGE:] for name in along}
        second = op.run({**leaves, **rest, "initial_states": first["final_states"]})
        return {"y": torch.cat([first["y"], second["y"]], 1), "final_states": second["final_states"]}

    for name, value in run_with_gradients(in_two, inputs, weights).items():
        if op.kind(name) != "parameter":
            assert_same_bits(name, value, whole[name])


def test_many_units_of_heads():
    """More heads in a group than one program sums dB and dC over."""
    case = Case("many heads", heads=9, groups=1, head_dim=2, state_dim=3, gate=False)
    properties.check_against_reference(op_under_test(case), Pack("short", (5,), padding=2), torch.float32)


def test_long_decays_keep_what_follows(kernel):
    """A step of huge decay leaves the small decays behind it as exact as they were."""
    T = 8
    dt = torch.full((1, T, 1), 1e-3)
    dt[:, 2] = 1e4
    x, B, C = (torch.randn(1, T, 1, 4) for _ in range(3))
    arguments = (x, dt, torch.tensor([-1.0]), B, C)
    y = kernel.mamba_chunk_scan_combined(*arguments, chunk_size=8)
    rows = [value if value.dim() == 1 else value[0] for value in arguments]
    truth, _ = kernel.mamba2_scan.mamba2_scan_reference(
        *(value.double() for value in rows), torch.tensor([0, T], dtype=torch.int32)
    )
    torch.testing.assert_close(y[0].double(), truth, rtol=1e-5, atol=1e-6 * float(truth[3:].abs().max()))


def test_softplus_over_its_whole_range(kernel, chunk):
    """Steps of one chunk's heads: from where exp(dt) is all there is to where dt is."""
    work = importlib.import_module(f"{kernel.__name__}._triton.work")
    dt = torch.linspace(-80, 40, 20 * 37).reshape(20, 37)
    x, B = torch.zeros(20, 37, 1), torch.zeros(20, 1, 1)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32)
    scan = chunk.ScanInputs.made(
        x, dt, torch.zeros(37), B, B, None, None, None, cu_seqlens, None, True, 0.0, float("inf")
    )
    chunks = work.cut_into_blocks(cu_seqlens, 20, scan.plan.chunk)
    torch.testing.assert_close(scan.steps(chunks)[0].t().double(), F.softplus(dt.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("pack", [Pack("nothing", ()), Pack("empty", (0, 0)), Pack("none", (), padding=3)], ids=str)
def test_no_tokens(pack):
    op = op_under_test(CASES[0])
    result = run_with_gradients(lambda leaves: op.run(leaves, **op.boundaries(pack)), op.make(pack, torch.float32))
    for name, value in result.items():
        assert op.kind(name) == "states" or bool((value == 0).all()), name


def test_fused_layer():
    layer = mamba2_fused.LAYERS[1]
    properties.check_against_reference(layer.op(), Pack("ragged", (5, 9)), torch.float32)


def test_float64_is_refused(kernel):
    shapes = [(4, 1, 2), (4, 1), (1,), (4, 1, 3), (4, 1, 3)]
    x, *rest = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    given = (x, *rest, None, None, None, torch.tensor([0, 4], dtype=torch.int32), None, True, 0.0, 1.0)
    text = "mamba2_scan: x must be float32, bfloat16 or float16 on a GPU .* got float64"
    for op, arguments in (("mamba2_scan_fwd", (*given, False)), ("mamba2_scan_bwd", (x, None, *given))):
        with pytest.raises(TypeError, match=text):
            getattr(kernel._ops.ops, op)(*arguments)


@pytest.mark.parametrize("gpu", ["SM80", "SM90", "SM100", "GFX942"])
def test_reads_no_value(kernel, launch, gpu):
    """On fake CUDA tensors, which have no values, with shapes and dtypes as the op's fakes promise."""
    devices = importlib.import_module(f"{kernel.__name__}._devices")
    with FakeTensorMode(), launch.recorded(getattr(launch, gpu)) as launches:

        def new(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="cuda")

        x, dt, rates, state = new(100, 12, 70, dtype=torch.bfloat16), new(100, 12), new(12), new(5, 12, 70, 130)
        B = new(100, 1, 130, dtype=torch.bfloat16)
        given = (x, dt, rates, B, B, new(12, 70), x, rates, new(6, dtype=torch.int32), state, True, 0.0, 1.0)
        outputs = devices.triton_implementation("mamba2_scan_fwd")(*given, True)
        assert [value.shape for value in outputs] == [x.shape, state.shape]
        gradients = devices.triton_implementation("mamba2_scan_bwd")(x, state, *given)
    expected = (x, dt, rates, B, B, given[5], x, rates, state)
    assert [(value.shape, value.dtype) for value in gradients] == [(value.shape, value.dtype) for value in expected]
    started = {call.kernel.__name__ for call in launches}
    for name in ("triton_fwd", "triton_bwd"):
        module = importlib.import_module(f"{kernel.__name__}.mamba2_scan.{name}")
        kernels = {name for name, value in vars(module).items() if name.startswith("_") and hasattr(value, "fn")}
        assert kernels and kernels <= started, kernels - started
