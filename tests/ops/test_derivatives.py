"""Every public function's derivatives: gradients by each way PyTorch has to ask for them, others refused by name."""

import inspect
import math
import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.fake_cuda import fake, fake_cuda
from tests.harness.ops import EXACT, WITH_PROJECTIONS, flash_attn_varlen
from tests.harness.ops.steps import Step
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits, cotangents, run_with_gradients
from tests.harness.triton import served_by_triton

# A sample at a time is how vmap runs an op for which it has no rule.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

PACK = Pack("", (3, 5))

# What computes for decoding, and what its refusal says to call.
FORWARD_ONLY = {
    "causal_conv1d_update": "causal_conv1d_fn",
    "flash_attn_with_kvcache": "flash_attn_varlen_func",
    "fused_recurrent_gated_delta_rule": "chunk_gated_delta_rule",
    "fused_recurrent_kda": "chunk_kda",
    "selective_state_update": "mamba_chunk_scan_combined or selective_scan_fn",
}
# Functions that call others of the package: any of these may be the one that refuses.
MADE_OF = {
    "flash_attn_func": "flash_attn_varlen_func",
    "mamba_inner_fn": "causal_conv1d_fn|selective_scan_fn",
    "mamba_split_conv1d_scan_combined": "causal_conv1d_fn|mamba_chunk_scan_combined",
}


DIFFERENTIABLE = {
    name: cases[0] for name, cases in {**EXACT, **WITH_PROJECTIONS}.items() if name.split(" ")[0] not in FORWARD_ONLY
}
DIFFERENTIABLE["flash_attn_func"] = flash_attn_varlen.rows_under_test
every_function = pytest.mark.parametrize("name", DIFFERENTIABLE)


def assert_close(name, left, right):
    tolerance = 1e-12 if right.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


class Call:
    """A function of this package on small inputs: ``loss(*tensors)`` weighs every element of every output."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64):
        self.op = DIFFERENTIABLE[name]()
        base = name.split(" ")[0]
        self.refused_by = f"^({MADE_OF.get(base, base)}): has no"
        # Rows of 4 tokens are what flash_attn_func takes of 8.
        self.pack = Pack("", (4, 4)) if base == "flash_attn_func" else PACK
        inputs = self.op.make(self.pack, dtype)
        self.names, self.tensors = list(inputs), list(inputs.values())
        with torch.no_grad():
            self.weights = cotangents(self.outputs(*self.tensors))

    def outputs(self, *tensors):
        return self.op.run(dict(zip(self.names, tensors)), **self.op.boundaries(self.pack))

    def loss(self, *tensors):
        outputs = self.outputs(*tensors)
        return sum((output * self.weights[name].to(output.dtype)).sum() for name, output in outputs.items())

    def gradients(self, weights=None):
        """By backward(), where the outputs weigh as here or as given."""
        inputs = dict(zip(self.names, self.tensors))
        results = run_with_gradients(lambda leaves: self.outputs(*leaves.values()), inputs, weights or self.weights)
        return [results[f"d{name}"] for name in self.names]


def test_every_public_function_is_in_a_table(kernel):
    tested = {name.split(" ")[0] for name in DIFFERENTIABLE} | set(FORWARD_ONLY)
    computing = {
        name
        for name in kernel.__all__
        if inspect.isfunction(getattr(kernel, name))
        and any(
            parameter.annotation is torch.Tensor
            for parameter in inspect.signature(getattr(kernel, name)).parameters.values()
        )
    }
    assert computing == tested


@every_function
def test_gradients_of_torch_func(name):
    """torch.func.grad, vjp and jacrev give what backward() gives."""
    call = Call(name)
    expected = call.gradients()
    places = tuple(range(len(call.tensors)))
    for gradients in (
        torch.func.grad(call.loss, places)(*call.tensors),
        torch.func.vjp(call.loss, *call.tensors)[1](torch.ones((), dtype=torch.float64)),
        torch.func.jacrev(call.loss, places)(*call.tensors),
        torch.autograd.functional.vjp(call.loss, tuple(call.tensors))[1],
    ):
        for what, left, right in zip(call.names, gradients, expected):
            assert_close(f"d{what}", left, right)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name in EXACT])
def test_gradients_of_torch_func_by_triton(kernel, name):
    """The kernels of a GPU, in Triton's interpreter, lie below the same derivatives."""
    with served_by_triton(kernel):
        call = Call(name, torch.float32)
        expected = call.gradients()
        gradients = torch.func.grad(call.loss, tuple(range(len(call.tensors))))(*call.tensors)
    for what, left, right in zip(call.names, gradients, expected):
        assert_close(f"d{what}", left, right)


@every_function
def test_gradients_of_each_sample_of_a_batch(name):
    """vmap over gradients, and the rows of a Jacobian at once."""
    call = Call(name)
    places = tuple(range(len(call.tensors)))
    batch = [torch.stack([tensor, tensor.flip(0)]) for tensor in call.tensors]
    together = torch.func.vmap(torch.func.grad(call.loss, places))(*batch)
    for row in range(2):
        alone = torch.func.grad(call.loss, places)(*(tensor[row] for tensor in batch))
        for what, left, right in zip(call.names, together, alone):
            assert_close(f"d{what}", left[row], right)
    leaves = [tensor.clone().requires_grad_() for tensor in call.tensors]
    losses = call.loss(*leaves) * torch.tensor([1.0, 2.0], dtype=torch.float64)
    both = torch.autograd.grad(losses, leaves, torch.eye(2, dtype=torch.float64), is_grads_batched=True)
    for what, left, right in zip(call.names, both, call.gradients()):
        assert_close(f"d{what}", left, torch.stack([right, 2 * right]))


@every_function
def test_gradients_of_each_output_by_itself(name):
    """Where the loss uses one output, the others count as weighed with 0."""
    call = Call(name)
    for used in call.weights:
        leaves = [tensor.clone().requires_grad_() for tensor in call.tensors]
        loss = (call.outputs(*leaves)[used] * call.weights[used]).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        weights = {key: value if key == used else torch.zeros_like(value) for key, value in call.weights.items()}
        for what, leaf, left, right in zip(call.names, leaves, gradients, call.gradients(weights)):
            assert_close(f"d{what} by {used}", torch.zeros_like(leaf) if left is None else left, right)


class _Calls(TorchDispatchMode):
    """Which operations run: names, schemas' arguments by name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [argument.name for argument in func._schema.arguments]
        self.seen.append((func._schema.name.rpartition("::")[2], dict(zip(names, args))))
        return func(*args, **(kwargs or {}))


@every_function
def test_no_gradient_is_made_for_outputs_that_the_loss_does_not_use(name):
    """Zeros of the size of all states would cost as much memory as the states."""
    call = Call(name)
    leaves = [tensor.clone().requires_grad_() for tensor in call.tensors]
    outputs = call.outputs(*leaves)
    main, *others = outputs
    with _Calls() as calls:
        torch.autograd.grad((outputs[main] * call.weights[main]).sum(), leaves, allow_unused=True)
    backward = [arguments for op, arguments in calls.seen if op.endswith("_bwd") and not op.startswith("_")]
    optional = ("dfinal_state", "dfinal_states", "dlse")
    given = [value for arguments in backward for name, value in arguments.items() if name in optional]
    assert len(given) == len(backward) > 0 and given == [None] * len(given)
    for op, arguments in calls.seen:
        if op in ("zeros", "new_zeros", "zeros_like"):
            size = arguments.get("size", getattr(arguments.get("self"), "shape", ()))
            assert all(math.prod(size) != outputs[other].numel() for other in others), (op, size)


@every_function
def test_first_gradients_that_could_be_differentiated(name):
    """With create_graph=True gradients are what they are without; only the second differentiation is refused."""
    call = Call(name)
    leaves = [tensor.clone().requires_grad_() for tensor in call.tensors]
    gradients = torch.autograd.grad(call.loss(*leaves), leaves, create_graph=True)
    for what, left, right in zip(call.names, gradients, call.gradients()):
        assert_close(f"d{what}", left, right)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    # What does not go through the gradients can still be differentiated beside them.
    (doubled,) = torch.autograd.grad((penalty.detach() * leaves[0]).sum(), leaves[:1], retain_graph=True)
    assert_close(name, doubled, penalty.detach().expand(leaves[0].shape))
    with pytest.raises(NotImplementedError, match=call.refused_by + " second derivative"):
        torch.autograd.grad(penalty, leaves[0], retain_graph=True)
    with pytest.raises(NotImplementedError, match=call.refused_by + " second derivative"):
        penalty.backward()


@every_function
def test_second_derivatives_are_refused(name):
    """With respect to the inputs, and to the weights of the outputs (forward mode by two reverse modes)."""
    call = Call(name)
    x, others, loss = call.tensors[0], call.tensors[1:], call.loss

    def of_first(x):
        return loss(x, *others)

    def gradient(x):
        return torch.func.vjp(of_first, x)[1](x.new_ones(()))[0]

    for ask in (
        lambda: torch.func.grad(lambda x: torch.func.grad(of_first)(x).square().sum())(x),
        lambda: torch.func.jacrev(torch.func.jacrev(of_first))(x),
        lambda: torch.func.vjp(gradient, x)[1](x),
        lambda: torch.autograd.functional.hessian(of_first, x),
        lambda: torch.autograd.functional.hvp(of_first, x, x),
        lambda: torch.autograd.functional.jvp(of_first, x, x),
    ):
        with pytest.raises(NotImplementedError, match=call.refused_by + " second derivative"):
            ask()


@every_function
def test_forward_mode_is_refused(name):
    """With respect to each input by itself, in and out of torch.func, over gradients too.

    What comes behind our ops, as a last projection's weight, has PyTorch's tangent.
    """
    call = Call(name)
    for place, (x, gradient) in enumerate(zip(call.tensors, call.gradients())):

        def of_one(x, place=place):
            return call.loss(*call.tensors[:place], x, *call.tensors[place + 1 :])

        try:
            _, tangent = torch.func.jvp(of_one, (x,), (x,))
        except NotImplementedError as error:
            assert re.search(call.refused_by + " forward-mode derivative", str(error))
        else:
            assert place > 0
            assert_close(call.names[place], tangent, (gradient * x).sum())
            continue
        with pytest.raises(NotImplementedError, match=call.refused_by + " forward-mode derivative"):
            torch.func.jvp(torch.func.grad(of_one), (x,), (x,))
        with pytest.raises(NotImplementedError, match=call.refused_by + " forward-mode derivative"):
            torch.func.grad(lambda x, f=of_one: torch.func.jvp(f, (x,), (x,))[1])(x)
        for leaf in (x, x.clone().requires_grad_()):
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
                of_one(forward_ad.make_dual(leaf, torch.ones_like(leaf)))
    for transform in (torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match=call.refused_by + " forward-mode derivative"):
            transform(call.loss)(*call.tensors)
    with forward_ad.dual_level():
        assert call.loss(*call.tensors).isfinite()  # nothing to derive here


def nodes_of_our_ops(kernel, tensor):
    """The nodes in the graph behind ``tensor`` that stand for ops of this package."""
    seen, left = [], [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.append(node)
            left.extend(before for before, _ in node.next_functions)
    return [node for node in seen if hasattr(kernel._ops.ops, node.name().replace("Backward", ""))]


@every_function
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_refusals_on_every_device(kernel, name, device):
    """As on the CPU, above the kernels of the device. The tensors have no values, and the CUDA ones no engine."""
    call = Call(name, torch.float32)
    with fake_cuda():
        leaves = [fake(tensor, device).requires_grad_() for tensor in call.tensors]
        cuts = {key: fake(value, device) for key, value in call.op.boundaries(call.pack).items()}
        outputs = call.op.run(dict(zip(call.names, leaves)), **cuts)
        nodes = {node for output in outputs.values() for node in nodes_of_our_ops(kernel, output)}
        assert nodes
        for node in nodes:
            given = [torch.empty(like.shape, dtype=like.dtype, device=device) for like in node._input_metadata]
            first = [gradient for gradient in node.apply(given[0], *[None] * (len(given) - 1)) if gradient is not None]
            assert first and all(gradient.device.type == device for gradient in first)
            for gradient in first:
                (second,) = [node for node in nodes_of_our_ops(kernel, gradient) if "_bwd" in node.name()]
                with pytest.raises(NotImplementedError, match=call.refused_by + " second derivative"):
                    second.apply(*map(torch.empty_like, first))
        x = leaves[0].detach()
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
            call.op.run(dict(zip(call.names, [forward_ad.make_dual(x, x), *leaves[1:]])), **cuts)


every_step = pytest.mark.parametrize("name", FORWARD_ONLY)


@every_step
def test_steps_refuse_to_be_differentiated(kernel, name):
    """They compute on anything, parameters included, and the backward pass names what to call; one way for all."""
    step = Step(kernel, name)
    with torch.no_grad():
        expected, updated = step()
    for key, value in step.inputs.items():
        out, after = step(**{key: value.clone().requires_grad_()})
        for left, right in zip([out.detach(), *after], [expected, *updated]):
            assert_same_bits(f"{name} where {key} requires gradients", left, right)
        with pytest.raises(NotImplementedError, match=f"^{name}: has no backward pass; call {FORWARD_ONLY[name]}"):
            out.sum().backward()
    with torch.no_grad():
        leaves = {key: value.clone().requires_grad_() for key, value in step.inputs.items()}
        assert not step(**leaves)[0].requires_grad
    assert not step()[0].requires_grad
    with torch.inference_mode():
        assert_same_bits(name, step()[0], expected)


@every_step
def test_steps_refuse_forward_mode(kernel, name):
    step = Step(kernel, name)
    for key, value in step.inputs.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: has no forward-mode derivative"):
            torch.func.jvp(lambda x, key=key: step(**{key: x})[0], (value,), (value,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{name}: has no forward-mode"):
            step(**{key: forward_ad.make_dual(value, value)})


@pytest.mark.parametrize("name", ["causal_conv1d_update", "selective_state_update", "flash_attn_with_kvcache"])
def test_what_a_step_updates_is_in_no_graph(kernel, name):
    """Its old values cannot be lost in silence: to a graph that it ends, or to one that has saved it."""
    step = Step(kernel, name)
    for key, value in step.updated.items():
        leaf = value.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"^{name}: {key} must not require gradients.*no_grad"):
            step(**{key: leaf})
        assert_same_bits(key, leaf.detach(), value)
        with torch.no_grad():
            step(**{key: leaf})
        factor = torch.ones((), requires_grad=True)
        saved = value.clone()
        product = (factor * saved).sum()
        step(**{key: saved})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "flash_attn_varlen_func", "chunk_kda"])
def test_compiled(name):
    """Transforms inside a compiled function; a compiled function inside a second derivative, which PyTorch refuses."""
    torch._dynamo.reset()  # what could not be compiled once is not tried again
    call = Call(name)
    places = tuple(range(len(call.tensors)))
    compiled = torch.compile(torch.func.grad(call.loss, places), fullgraph=True, backend="aot_eager")
    for what, left, right in zip(call.names, compiled(*call.tensors), call.gradients()):
        assert_close(f"d{what}", left, right)
    x = call.tensors[0].clone().requires_grad_()
    loss = torch.compile(call.loss, fullgraph=True, backend="aot_eager")(x, *call.tensors[1:])
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.sum().backward()
    forward = torch.compile(lambda x: torch.func.jvp(lambda x: call.loss(x, *call.tensors[1:]), (x,), (x,)))
    with pytest.raises(Exception, match="forward-mode derivative"):
        forward(call.tensors[0])
