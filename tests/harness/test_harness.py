"""The harness must reject what it is there to find: small, realistic faults put into a correct function."""

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.causal_conv1d import Case, op_under_test
from tests.harness.packings import Pack
from tests.harness.tolerance import DRAWS, check_close, nudged

PACK = Pack("ragged", (5, 9, 17, 3))


def faulty(change):
    """The convolution with ``change(outputs, pack)`` applied, as an op under test."""
    op = op_under_test(Case("plain"))
    run = op.run

    def wrong(inputs, **boundaries):
        return change(run, inputs, boundaries)

    op.run = wrong
    return op


def shifted_boundary(run, inputs, boundaries):
    offsets = boundaries["cu_seqlens"].clone()
    if len(offsets) > 2:
        offsets[1] += 1
    return run(inputs, cu_seqlens=offsets)


def dropped_tail(run, inputs, boundaries):
    outputs = run(inputs, **boundaries)
    keep = torch.ones_like(outputs["y"])
    keep[:, :, -1] = 0
    return {**outputs, "y": outputs["y"] * keep}


def ignored_boundaries(run, inputs, boundaries):
    states = inputs["initial_states"][:1]
    outputs = run({**inputs, "initial_states": states}, cu_seqlens=torch.tensor([0, inputs["x"].shape[2]]))
    return {"y": outputs["y"], "final_states": outputs["final_states"].expand(len(PACK.lengths), -1, -1) * 1}


def narrow_accumulator(run, inputs, boundaries):
    outputs = run({name: value.bfloat16() for name, value in inputs.items()}, **boundaries)
    return {name: value.float() for name, value in outputs.items()}


def detached_parameter(run, inputs, boundaries):
    return run({**inputs, "weight": inputs["weight"].detach()}, **boundaries)


def unwritten_output(run, inputs, boundaries):
    outputs = run(inputs, **boundaries)
    hole = torch.zeros_like(outputs["y"])
    hole[:, :, 3] = float("nan")
    return {**outputs, "y": outputs["y"] + hole}


def slightly_large(run, inputs, boundaries):
    outputs = run(inputs, **boundaries)
    return {**outputs, "y": outputs["y"] * (1 + 1e-5)}


@pytest.mark.parametrize(
    "fault",
    [
        shifted_boundary,
        dropped_tail,
        ignored_boundaries,
        narrow_accumulator,
        detached_parameter,
        unwritten_output,
        slightly_large,
    ],
    ids=lambda fault: fault.__name__,
)
def test_reference_check_rejects(fault):
    with pytest.raises(AssertionError):
        properties.check_against_reference(faulty(fault), PACK, torch.float32)


def test_a_lucky_reference_is_no_measure():
    """The reference happens to be exact where its error is 1e-4 as a rule: products that cancel but for 1e-3."""
    inputs = {"x": torch.tensor([1.0, 1.0 + 2**-10, 3.0])}

    def difference(values):
        x = values["x"]
        return (x[0] * x[2] / 3 - x[1] * x[2] / 3)[None]

    truth = difference({"x": inputs["x"].double()})
    ours = (truth * (1 + 1e-4)).float()

    def more_errors():
        return [(difference(nudged(inputs, draw)).double() - truth).abs() for draw in range(DRAWS)]

    with pytest.raises(AssertionError, match="is off by"):
        check_close("difference", "y", ours, truth.float(), truth)
    check_close("difference", "y", ours, truth.float(), truth, more_errors=more_errors)
    with pytest.raises(AssertionError, match="is off by"):
        check_close("difference", "y", truth.float() * 1.001, truth.float(), truth, more_errors=more_errors)


def test_isolation_check_rejects_a_leak():
    def leak(run, inputs, boundaries):
        outputs = run(inputs, **boundaries)
        return {**outputs, "y": outputs["y"] + 0 * inputs["x"].sum()}

    with pytest.raises(AssertionError, match="beside nan in sequence"):
        properties.check_isolation(faulty(leak), PACK, torch.float32)


def test_alone_check_rejects_dependence_on_the_pack():
    def depends(run, inputs, boundaries):
        outputs = run(inputs, **boundaries)
        return {**outputs, "y": outputs["y"] * (1 + 1e-7 * inputs["x"].shape[2])}

    with pytest.raises(AssertionError, match="packed and alone"):
        properties.check_packed_equals_alone(faulty(depends), PACK, torch.float32)


def test_repeat_check_rejects_noise():
    calls = []

    def noisy(run, inputs, boundaries):
        calls.append(1)
        outputs = run(inputs, **boundaries)
        return {**outputs, "y": outputs["y"] + 1e-6 * len(calls)}

    with pytest.raises(AssertionError, match="number of threads"):
        properties.check_repeatable(faulty(noisy), PACK, torch.float32)


def test_spelling_check_rejects_a_difference():
    def picky(run, inputs, boundaries):
        outputs = run(inputs, **boundaries)
        return {**outputs, "y": outputs["y"] * (2 if "position_ids" in boundaries else 1)}

    with pytest.raises(AssertionError, match="cu_seqlens and position_ids"):
        properties.check_spellings(faulty(picky), PACK, torch.float32)
