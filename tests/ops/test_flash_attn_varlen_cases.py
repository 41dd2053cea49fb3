"""flash_attn_varlen: faults that users of packed attention met in other packages, one test each, and compilation."""

import subprocess
import sys
import textwrap

import pytest
import torch

from tests.conftest import ROOT
from tests.harness import properties
from tests.harness.ops.flash_attn_varlen import Case, op_under_test
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits


def per_sequence(kernel, q, k, v, offsets_q, offsets_k, **settings):
    """The packed result, and the same sequences through the reference, joined."""
    ours = kernel.flash_attn_varlen_func(q, k, v, offsets_q, offsets_k, **settings)
    pieces = []
    for n in range(len(offsets_q) - 1):
        lengths = (offsets_q[n + 1] - offsets_q[n], offsets_k[n + 1] - offsets_k[n])
        alone = [torch.tensor([0, length]) for length in lengths]
        out, _ = kernel.flash_attn_varlen.flash_attn_varlen_reference(
            q[offsets_q[n] : offsets_q[n + 1]],
            k[offsets_k[n] : offsets_k[n + 1]],
            v[offsets_k[n] : offsets_k[n + 1]],
            *alone,
            **settings,
        )
        pieces.append(out)
    return ours, torch.cat(pieces)


def gradients_agree(inputs, ours, reference):
    """Outputs within 1e-5 and gradients within 1e-4 of the reference."""
    left = properties.run_with_gradients(ours, inputs)
    right = properties.run_with_gradients(reference, inputs)
    for name in right:
        tolerance = 1e-5 if name == "out" else 1e-4
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance)
    return left


def pair(kernel, pack, **settings):
    """Our function and the reference on one dictionary of inputs."""

    def ours(leaves):
        return {"out": kernel.flash_attn_varlen_func(**leaves, cu_seqlens_q=pack.cu_seqlens, **settings)}

    def reference(leaves):
        out, _ = kernel.flash_attn_varlen.flash_attn_varlen_reference(
            leaves["q"], leaves["k"], leaves["v"], pack.cu_seqlens, pack.cu_seqlens, s_aux=leaves.get("s_aux"),
            **settings,
        )  # fmt: skip
        return {"out": out}

    return ours, reference


def test_c07_one_token_queries_with_empty_segments(kernel):
    q, k, v = torch.randn(2, 6, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    ours, alone = per_sequence(kernel, q, k, v, [0, 0, 1, 1, 2], [0, 0, 3, 3, 8], causal=True)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)
    with_lengths = kernel.flash_attn_varlen_func(
        q, k, v, [0, 0, 1, 1, 2], [0, 0, 3, 3, 8], max_seqlen_q=1, max_seqlen_k=5, causal=True
    )
    assert_same_bits("with lengths", with_lengths, ours)
    q, k, v = torch.randn(1, 6, 24), torch.randn(1, 2, 24), torch.randn(1, 2, 24)
    out = kernel.flash_attn_varlen_func(q, k, v, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1])
    torch.testing.assert_close(out, v.repeat_interleave(3, dim=1))


def test_c09_rows_after_the_last_boundary(kernel):
    """Scratch is poisoned by PACKFREE_DEBUG in every test."""
    properties.check_packed_equals_alone(
        op_under_test(Case("tail", heads=(2, 2), dims=(16, 16))), Pack("tail", (4, 6), padding=2), torch.float32
    )


def test_c12_max_seqlen(kernel):
    q, k, v = (torch.randn(10, 2, 16) for _ in range(3))
    expected = kernel.flash_attn_varlen_func(q, k, v, [0, 3, 10])
    for longest in (7, 64, torch.tensor(7), torch.tensor(64, dtype=torch.int32)):
        out = kernel.flash_attn_varlen_func(q, k, v, [0, 3, 10], max_seqlen_q=longest, max_seqlen_k=longest)
        assert_same_bits(f"max_seqlen {longest}", out, expected)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least the longest sequence .7., got 4"):
        kernel.flash_attn_varlen_func(q, k, v, [0, 3, 10], max_seqlen_q=4)
    for offsets in ([0, 3, 12], [2, 10], [0, 6, 4, 10]):
        with pytest.raises(ValueError, match="cu_seqlens_q must"):
            kernel.flash_attn_varlen_func(q, k, v, offsets, max_seqlen_q=10)


def test_c28_window_edges(kernel):
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    offsets = [0, 5, 12]
    outs = {}
    for window in ((2, 0), (6, 0), (-1, 0), (0, 0)):
        ours, alone = per_sequence(kernel, q, k, v, offsets, offsets, causal=True, window_size=window)
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)
        outs[window] = ours
    assert_same_bits("a window over all earlier tokens", outs[(6, 0)], outs[(-1, 0)])
    assert_same_bits("unbounded", outs[(-1, 0)], kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True))
    torch.testing.assert_close(outs[(0, 0)], v)
    # Causal cuts the right side of a window, which transformers sends as (w - 1, w - 1).
    both = kernel.flash_attn_varlen_func(q, k, v, offsets, causal=True, window_size=(2, 2))
    assert_same_bits("right side under causal", both, outs[(2, 0)])
    # Token i sees exactly i - 2 .. i: moving key i - 3 changes nothing, moving key i - 2 does.
    for distance, moves in ((3, False), (2, True)):
        other = k.clone()
        other[11 - distance] += 1.0
        out = kernel.flash_attn_varlen_func(q, other, v, offsets, causal=True, window_size=(2, 0))
        assert torch.equal(out[11], outs[(2, 0)][11]) is not moves


@pytest.mark.parametrize("side", ["left", "right"])
def test_widest_windows_hide_nothing(kernel, side):
    """Up to the largest int64, also where queries come before the first key that is aligned with one."""
    q, k, v = torch.randn(9, 2, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    all_keys = kernel.flash_attn_varlen_func(q, k, v, [0, 6, 9], [0, 2, 7])
    for width in (2**31 - 1, 2**31, 2**62, 2**63 - 1):
        window = (width, -1) if side == "left" else (-1, width)
        out = kernel.flash_attn_varlen_func(q, k, v, [0, 6, 9], [0, 2, 7], window_size=window)
        assert_same_bits(f"window {window}", out, all_keys)


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)], ids=str)
def test_c29_softcap(kernel, window):
    pack = Pack("softcap", (6, 9))
    inputs = {"q": torch.randn(15, 4, 32) * 10, "k": torch.randn(15, 2, 32), "v": torch.randn(15, 2, 32)}
    gradients_agree(inputs, *pair(kernel, pack, softcap=20.0, causal=True, window_size=window))


def test_c30_sinks(kernel):
    for pack in (Pack("sinks", (4, 5)), Pack("empty segment and tail", (4, 0, 3), padding=2)):
        inputs = {
            "q": torch.randn(9, 4, 16), "k": torch.randn(9, 2, 16), "v": torch.randn(9, 2, 16), "s_aux": torch.randn(4)
        }  # fmt: skip
        results = gradients_agree(inputs, *pair(kernel, pack, causal=True, window_size=(2, 0)))
        assert float(results["ds_aux"].abs().min()) > 0
    # Empty segments and tail add nothing: only the live tokens, to the bit.
    live = {name: value[:7] if name != "s_aux" else value for name, value in inputs.items()}
    ours, _ = pair(kernel, Pack("live", (4, 3)), causal=True, window_size=(2, 0))
    weights = properties.cotangents({"out": torch.empty(9, 4, 16)})
    alone = properties.run_with_gradients(ours, live, {"out": weights["out"][:7]})
    assert_same_bits("ds_aux", results["ds_aux"], alone["ds_aux"])


@pytest.mark.parametrize("dims", [(dim, dim) for dim in (1, 40, 72, 80, 96, 192, 256, 512)] + [(192, 128)], ids=str)
def test_c31_head_dims(kernel, dims, tier):
    case = Case("head dim", heads=(2, 1), dims=dims)
    properties.check_against_reference(op_under_test(case), Pack("head dim", (3, 5)), torch.float32)


def test_c31_unsupported_head_dim(kernel):
    q, k, v = torch.randn(8, 2, 520), torch.randn(8, 1, 520), torch.randn(8, 1, 520)
    with pytest.raises(ValueError, match=r"head_dim of q and k must lie in 1 \.\. 512, got 520"):
        kernel.flash_attn_varlen_func(q, k, v, [0, 3, 8], causal=True)


@pytest.mark.parametrize("longest", [7, None, torch.tensor(7)], ids=["int", "none", "tensor"])
def test_c36_compiles_to_one_graph(kernel, longest):
    def step(q, k, v, offsets):
        out = kernel.flash_attn_varlen_func(
            q, k, v, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
        return out.square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.randn(10, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    expected = torch.autograd.grad(step(q, k, v, offsets), (q, k, v))
    for left, right in zip(torch.autograd.grad(compiled(q, k, v, offsets), (q, k, v)), expected):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_boundary_dtypes_agree(kernel):
    q, k, v = (torch.randn(10, 2, 16) for _ in range(3))
    expected = kernel.flash_attn_varlen_func(q, k, v, torch.tensor([0, 3, 10], dtype=torch.int32))
    assert_same_bits("int64", kernel.flash_attn_varlen_func(q, k, v, torch.tensor([0, 3, 10])), expected)
    assert_same_bits("list", kernel.flash_attn_varlen_func(q, k, v, [0, 3, 10]), expected)
    trailing = torch.tensor([0, 3] + [10] * 9)
    assert_same_bits("trailing empty", kernel.flash_attn_varlen_func(q, k, v, trailing), expected)


def test_c49_paged_cache(kernel):
    k_cache, v_cache = torch.randn(4, 16, 2, 16), torch.randn(4, 16, 2, 16)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    table = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    filled = torch.tensor([17, 0], dtype=torch.int32)
    out = kernel.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=filled, block_table=table, causal=True
    )
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        expected = old.clone()
        expected[2, 1], expected[1, 0] = new[0, 0], new[1, 0]
        assert_same_bits("cache", cache, expected)
    for row, pages, length in ((0, [0, 2], 18), (1, [1], 1)):
        keys = k_cache[pages].flatten(0, 1)[:length]
        values = v_cache[pages].flatten(0, 1)[:length]
        expected, _ = kernel.flash_attn_varlen.flash_attn_varlen_reference(
            q[row], keys, values, torch.tensor([0, 1]), torch.tensor([0, length]), causal=True
        )
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)


def test_contiguous_cache_continues_a_sequence(kernel):
    """Prefill and steps through a cache give the same as the whole sequence at once; rows by cache_batch_idx."""
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    settings = dict(causal=True, window_size=(4, 0), softcap=9.0)
    whole, lse, _ = kernel.flash_attn_func(q, k, v, **settings, return_attn_probs=True)
    k_cache, v_cache = torch.zeros(3, 12, 2, 16), torch.zeros(3, 12, 2, 16)
    rows = torch.tensor([2, 0])
    for begin, end in ((0, 5), (5, 6), (6, 9)):
        out, part = kernel.flash_attn_with_kvcache(
            q[:, begin:end], k_cache, v_cache, k[:, begin:end], v[:, begin:end], cache_seqlens=begin,
            cache_batch_idx=rows, **settings, return_softmax_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out, whole[:, begin:end], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part, lse[:, :, begin:end], rtol=1e-5, atol=1e-5)
    assert_same_bits("written rows", k_cache[[2, 0], :9], k)
    assert bool((k_cache[1] == 0).all()) and bool((k_cache[:, 9:] == 0).all())


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(cache_seqlens=torch.tensor([8, 0])), ValueError, r"cache_seqlens must lie in 0 \.\. 7, got 8"),
        (dict(cache_seqlens=torch.tensor([1.0, 0])), TypeError, "cache_seqlens must be an int32 or int64 tensor"),
        (dict(cache_batch_idx=torch.tensor([0, 3])), ValueError, r"cache_batch_idx must lie in 0 \.\. 2, got 3"),
        (dict(block_table=torch.tensor([[3], [0]])), ValueError, r"block_table must name pages 0 \.\. 2 where used"),
        (dict(v=None), ValueError, "k and v must come together, got only k"),
        (dict(rotary_cos=torch.ones(4, 4)), NotImplementedError, "rotary_cos is not supported"),
        (dict(cache_leftpad=torch.zeros(2)), NotImplementedError, "cache_leftpad is not supported"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_kvcache_rejects(kernel, change, error, text):
    arguments = dict(
        q=torch.randn(2, 1, 4, 16), k_cache=torch.zeros(3, 8, 2, 16), v_cache=torch.zeros(3, 8, 2, 16),
        k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16), cache_seqlens=torch.tensor([1, 0]),
    )  # fmt: skip
    arguments.update(change)
    with pytest.raises(error, match=text):
        kernel.flash_attn_with_kvcache(**arguments)
    assert bool((arguments["k_cache"] == 0).all()), "nothing may be written before the arguments are checked"


MEMORY_PROBE = """
    import resource, sys, time
    import torch
    sys.path.insert(0, {root!r})
    import os
    os.environ.pop("PACKFREE_DEBUG", None)
    os.environ["LOCAL_KERNELS"] = {local!r}
    os.environ["HF_HUB_OFFLINE"] = "1"
    from kernels import get_kernel

    kernel = get_kernel("org/packfree-kernels", version=1)
    lengths = [512] * 32
    q, k, v = (torch.randn(16384, 2, 64, requires_grad=True) for _ in range(3))
    packed = torch.arange(0, 16385, 512, dtype=torch.int32)

    def step(offsets, bos=0, eos=16384):
        x = [t[bos:eos] for t in (q, k, v)]
        out = kernel.flash_attn_varlen_func(*x, offsets, causal=True)
        return torch.autograd.grad(out.sum(), x)

    def fastest(call, runs):
        times = []
        for _ in range(runs):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    alone = torch.tensor([0, 512], dtype=torch.int32)
    step(alone, 0, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(packed)
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    def one_by_one():
        for n in range(32):
            step(alone, n * 512, (n + 1) * 512)

    times = [fastest(lambda: step(packed), 5), fastest(one_by_one, 3)]
    times.append(fastest(lambda: step(torch.tensor([0, 16384], dtype=torch.int32)), 1))
    print(extra, *times)
"""


def test_c59_memory_and_time_follow_the_segments():
    """Forward and backward of 32 segments of 512: under 100 MB, no slower than apart, far below one long segment."""
    from tests.conftest import BUILD, REPO_ID

    probe = textwrap.dedent(MEMORY_PROBE).format(root=str(ROOT), local=f"{REPO_ID}={BUILD}")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extra, packed, apart, whole = (float(x) for x in done.stdout.split())
    assert extra < 100, f"{extra:.0f} MB"
    assert packed <= 1.3 * apart, f"packed {packed:.3f} s, apart {apart:.3f} s"
    assert whole >= 8 * packed, f"one segment {whole:.3f} s, packed {packed:.3f} s"
