"""What runs on the ranks: layers on top of one another, as a model has them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack

WIDTH, HEADS, DIM = 12, 2, 6


def parameters(dtype):
    """Of one layer."""
    shapes = {
        "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "g": (HEADS, WIDTH), "beta": (HEADS, WIDTH),
        "conv q": (WIDTH, 4), "conv k": (WIDTH, 3), "conv v": (WIDTH, 4), "out": (WIDTH, WIDTH),
    }  # fmt: skip
    return {name: (0.5 * torch.randn(shape, dtype=dtype)).requires_grad_() for name, shape in shapes.items()}


def layer(x, p, context, cu_seqlens):
    """Three convolutions beside one another, behind them a delta rule and attention; ``x`` ``[1, T, WIDTH]``."""
    kernel = load_kernel()
    given = {"cu_seqlens": cu_seqlens} if context is None else {"cp_context": context}
    q, k, v = (
        kernel.causal_conv1d_fn(F.linear(x, p[name]).transpose(1, 2), p[f"conv {name}"], activation="silu", **given)
        .transpose(1, 2)
        .unflatten(2, (HEADS, DIM))
        for name in ("q", "k", "v")
    )
    g, beta = F.logsigmoid(F.linear(x, p["g"])), F.linear(x, p["beta"]).sigmoid()
    mixed, _ = kernel.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **given)
    seen = kernel.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, causal=True, cp_context=context)
    return x + F.linear((mixed + seen[None]).flatten(2), p["out"])


def run(x, layers, weights, context, cu_seqlens, checkpointed):
    for p in layers:
        arguments = (layer, x, p, context, cu_seqlens)
        x = checkpoint(*arguments, use_reentrant=False) if checkpointed else layer(*arguments[1:])
    (x * weights).sum().backward()
    return x.detach()


def compare(group, samples, lengths, checkpointed):
    """Two layers on shards give the outputs and gradients of the whole pack."""
    pack, dtype = Pack("layers", samples), torch.float64
    torch.manual_seed(0)
    whole = torch.randn(1, pack.tokens, WIDTH, dtype=dtype)
    weights = torch.randn(1, pack.tokens, WIDTH, dtype=dtype)
    layers = [parameters(dtype) for _ in range(2)]
    copies = [{name: value.detach().clone().requires_grad_() for name, value in p.items()} for p in layers]
    context = load_kernel().ContextParallel(group, pack.cu_seqlens, lengths)
    begin = sum(lengths[: context.rank])
    own = slice(begin, begin + context.tokens)
    x, part = whole.clone().requires_grad_(), whole[:, own].clone().requires_grad_()
    expected = run(x, layers, weights, None, pack.cu_seqlens, False)
    got = run(part, copies, weights[:, own], context, context.cu_seqlens, checkpointed)
    limit = dict(rtol=0, atol=1e-9)
    torch.testing.assert_close(got, expected[:, own], **limit)
    torch.testing.assert_close(part.grad, x.grad[:, own], **limit)
    for theirs, ours in zip(layers, copies):
        for name, value in theirs.items():
            gradient = ours[name].grad
            dist.all_reduce(gradient, group=group)
            torch.testing.assert_close(gradient, value.grad, **limit, msg=lambda text, name=name: f"{name}: {text}")


def states_under_autocast(group):
    """Autocast, which rounds products of matrices, does not reach those of states."""
    kernel = load_kernel()
    torch.manual_seed(0)
    tokens = 4 * dist.get_world_size(group)
    q, k, v = torch.randn(3, 1, tokens, 2, 8)
    g, beta = -torch.rand(1, tokens, 2) / 10, torch.rand(1, tokens, 2)
    context = kernel.ContextParallel(group, [0, tokens])
    own = slice(4 * context.rank, 4 * context.rank + 4)
    leaves = [x[:, own].clone().requires_grad_() for x in (q, k, v, g, beta)]

    def run():
        o, _ = kernel.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cp_context=context)
        return o, *torch.autograd.grad(o.square().sum(), leaves)

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run()
    for one, other in zip(plain, rounded):
        assert torch.equal(one, other)
