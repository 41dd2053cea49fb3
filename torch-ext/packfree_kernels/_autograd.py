"""Derivatives of every op: the gradients that its backward op computes; any other is refused by name.

Ours is a kernel at the dispatcher's Autograd key. What ``torch.library.register_autograd`` puts there stops
``torch.func.grad`` and ``vjp`` with an error, drops the tangents of forward mode, and lets a second derivative be 0.

An op ``<name>_fwd`` has the gradients that ``<name>_bwd`` computes, and what passes between the two is read from their
schemas. An argument of ``<name>_bwd`` is what ``<name>_fwd`` takes or returns under that name; with a ``d`` before the
name of an output it is the gradient of that output. The results are gradients of inputs, named in the same way. A
gradient that the loss does not have is handed on as None where ``<name>_bwd`` takes None, so that no zeros of the size
of all states are made.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction

from ._ops import add_op_namespace_prefix, ops

_NAMESPACE, _PREFIX = add_op_namespace_prefix("").split("::")
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")

# Called on gradients by the name of their input, and on the backward op's arguments by name.
Finish = Callable[[Dict[str, Tensor], Dict[str, Any]], Dict[str, Tensor]]
Gradients = Tuple[Optional[Tensor], ...]


def differentiable(
    name: str, function: str, states: str = "", asked_by: str = "", finish: Optional[Finish] = None
) -> None:
    """Give op ``<name>_fwd`` the gradients that op ``<name>_bwd`` computes, and refuse to differentiate those.

    Args:
        name: of the two ops.
        function: the public function that calls them, for messages.
        states: the output that is empty, and has no gradient, unless the input ``asked_by`` is true; "" if none is.
        finish: brings gradients into the form of their inputs where the backward op gives another.
    """
    formula = _Formula(name, states, asked_by, finish)
    _register(f"{name}_fwd", function, formula.save, formula.gradients)
    refusal = (
        f"{function}: has no second derivative, as the kernel of its gradients has no gradient; where one is needed, "
        "call a function made of PyTorch's own operations"
    )
    _register(f"{name}_bwd", function, _save_nothing, _refuse(refusal))


def forward_only(name: str, function: str, instead: str) -> None:
    """Let op ``name`` of the public ``function`` run on anything, and refuse to differentiate what comes out.

    ``instead`` ends the message: what to call for gradients.
    """
    _register(name, function, _save_nothing, _refuse(no_backward(function, instead)))


def refuse_backward(
    function: str, instead: str, results: Tuple[Tensor, ...], arguments: Sequence[Optional[Tensor]]
) -> Tuple[Tensor, ...]:
    """The ``results`` of a function without a backward pass, which it has computed of ``arguments``.

    As of :func:`forward_only`, for a function that is made of several operations and runs them under ``no_grad``.
    """
    given = [argument for argument in arguments if argument is not None]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given):
        return results
    return _NoBackward.apply(no_backward(function, instead), len(results), *results, *given)


def refuse_tangents(function: str, arguments: Sequence[Any]) -> None:
    """Raises NotImplementedError: forward-mode derivatives with respect to one of ``arguments`` are asked for."""
    if any(isinstance(argument, Tensor) and unpack_dual(argument).tangent is not None for argument in arguments):
        raise NotImplementedError(
            f"{function}: has no forward-mode derivative (jvp, jacfwd, hessian); take gradients in reverse mode (grad, "
            "vjp, jacrev), or call a function made of PyTorch's own operations"
        )


def refuse_graph_of_updated(function: str, name: str, tensor: Tensor) -> None:
    """Raises NotImplementedError: ``tensor``, updated in place without a gradient, is part of a graph of gradients."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise NotImplementedError(
            f"{function}: {name} must not require gradients, being updated in place without one; call it under "
            "torch.no_grad()"
        )


def no_backward(function: str, instead: str) -> str:
    return f"{function}: has no backward pass; call {instead}"


class _NoBackward(torch.autograd.Function):
    """Copies of the first ``count`` tensors, whose gradients with respect to any are refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(message: str, count: int, *tensors: Tensor) -> Tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[Tensor]) -> Gradients:
        raise NotImplementedError(ctx.message)


class _Formula:
    """How the gradients of ``<name>_fwd`` are computed, as the schemas tell; see the head of this file."""

    def __init__(self, name: str, states: str, asked_by: str, finish: Optional[Finish]):
        forward, self.backward = getattr(ops, f"{name}_fwd").default._schema, getattr(ops, f"{name}_bwd").default
        self.inputs = [argument.name for argument in forward.arguments]
        self.outputs = [result.name for result in forward.returns]
        self.arguments = [argument.name for argument in self.backward._schema.arguments]
        self.results = [result.name[1:] for result in self.backward._schema.returns]
        types = {argument.name: str(argument.type) for argument in self.backward._schema.arguments}
        values = [name for name in self.arguments if name in self.inputs or name in self.outputs]
        self.saved = [name for name in values if "Tensor" in types[name]]
        self.options = [name for name in values if "Tensor" not in types[name]]
        self.needed = [name for name in self.outputs if types.get(f"d{name}") == "Tensor"]
        self.states, self.asked_by, self.finish = states, asked_by, finish

    def save(self, ctx: Any, arguments: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        values = {**dict(zip(self.inputs, arguments)), **dict(zip(self.outputs, outputs))}
        ctx.save_for_backward(*(values[name] for name in self.saved))
        ctx.options = {name: values[name] for name in self.options}
        ctx.needed = {name: (values[name].shape, values[name].dtype) for name in self.needed}
        if self.states and not values[self.asked_by]:
            ctx.mark_non_differentiable(values[self.states])

    def gradients(self, ctx: Any, gradients: Gradients) -> Gradients:
        saved = dict(zip(self.saved, ctx.saved_tensors))
        given = {f"d{name}": gradient for name, gradient in zip(self.outputs, gradients)}
        for name, (shape, dtype) in ctx.needed.items():
            if given[f"d{name}"] is None:
                given[f"d{name}"] = saved[self.saved[0]].new_zeros(shape, dtype=dtype)
        arguments = {**saved, **ctx.options, **given}
        results = dict(zip(self.results, self.backward(*(arguments[name] for name in self.arguments))))
        if self.finish is not None:
            results = self.finish(results, arguments)
        # Of an input that was not given the backward op returns a gradient without elements.
        present = [name for name in self.results if saved[name] is not None]
        return tuple(results[name].to(saved[name].dtype) if name in present else None for name in self.inputs)


def _save_nothing(ctx: Any, arguments: Sequence[Any], outputs: Any) -> None:
    pass


def _refuse(message: str) -> Callable[[Any, Gradients], Gradients]:
    def gradients(ctx: Any, gradients: Gradients) -> Gradients:
        raise NotImplementedError(message)

    return gradients


def _register(
    name: str,
    function: str,
    save: Callable[[Any, Sequence[Any], Any], None],
    gradients: Callable[[Any, Gradients], Gradients],
) -> None:
    """Put a kernel at the Autograd key of op ``name``, whose node in the graph saves and computes as the two tell."""
    op = getattr(ops, name).default
    updated = [i for i, argument in enumerate(op._schema.arguments) if argument.is_write]
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            # Inside a node PyTorch records nothing, but the outer transforms have to, which run in here.
            with torch.enable_grad(), _set_fwd_grad_enabled(True):
                outputs = _run_below(op, keyset, arguments, updated)
        else:
            outputs = _run_below(op, keyset, arguments, updated)
        ctx.set_materialize_grads(False)
        save(ctx, arguments, outputs)
        return outputs

    def backward(ctx: Any, *of_outputs: Optional[Tensor]) -> Gradients:
        if all(gradient is None for gradient in of_outputs):
            return (None,) * (1 + len(op._schema.arguments))
        return (None, *gradients(ctx, of_outputs))

    # Not torch.autograd.Function, whose apply begins with the transforms of torch.func; Autograd is below them.
    node = type(name, (_SingleLevelFunction,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def kernel(keyset: Any, *arguments: Any) -> Any:
        # The dispatcher leaves out trailing arguments that have their default value.
        arguments = (*arguments, *defaults[len(arguments) :])
        refuse_tangents(function, arguments)
        for i in updated:
            refuse_graph_of_updated(function, op._schema.arguments[i].name, arguments[i])
        wants_gradients = any(isinstance(argument, Tensor) and argument.requires_grad for argument in arguments)
        if not (wants_gradients and torch.is_grad_enabled()):
            return _run_below(op, keyset, arguments, updated)
        # A transform of torch.func has this op's arguments at its own level and wants one node there, like those of
        # PyTorch's own ops.
        with enable_single_level_autograd_function():
            return node.apply(keyset, *arguments)

    _library.impl(f"{_PREFIX}{name}", kernel, "Autograd", with_keyset=True)


def _run_below(op: Any, keyset: Any, arguments: Sequence[Any], updated: List[int]) -> Any:
    """The op as the keys below Autograd run it: PyTorch's tracing, the outer transforms of torch.func, our kernels."""
    with torch._C._AutoDispatchBelowAutograd():
        outputs = op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
    for i in updated:
        if not arguments[i].is_inference():
            torch.autograd.graph.increment_version(arguments[i])
    return outputs
