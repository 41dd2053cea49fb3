"""flash_attn_varlen on CUDA tensors: which kernel serves a call, and what is put right around PyTorch's.

CUDA tensors here have no values, so whoever reads one is caught; PyTorch's kernels are stood in for by the reference.
"""

import dataclasses
import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.harness import properties
from tests.harness.fake_cuda import fake, fake_cuda
from tests.harness.ops.flash_attn_varlen import CASES, op_under_test
from tests.harness.packings import Pack
from tests.harness.triton import served_by_triton

SMALL = Pack("small", (3, 0, 17, 1), padding=2)


def module(kernel, name):
    return importlib.import_module(f"{kernel.__name__}.{name}")


@pytest.fixture(autouse=True)
def _mode():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def call_on_fake_cuda(kernel, dtype=torch.bfloat16, heads=(4, 2), dims=(64, 64), tokens=300, sequences=5, **changes):
    """Forward and backward of the op for a kind of GPU, through fake tensors; returns their results."""
    cuda = module(kernel, "flash_attn_varlen.cuda")
    q, k, v = (
        torch.empty(tokens, heads[0], dims[0]),
        torch.empty(tokens, heads[1], dims[0]),
        torch.empty(tokens, heads[1], dims[1]),
    )
    q, k, v = (fake(x.to(dtype)) for x in (q, k, v))
    offsets = fake(torch.empty(sequences + 1, dtype=torch.int32))
    settings = dict(
        s_aux=None, seed=None, dropout_p=0.0, softmax_scale=0.1, window_left=-1, window_right=0, softcap=0.0
    )
    lse_gradient = changes.pop("lse_gradient", False)
    settings.update(changes)
    out, lse = cuda.flash_attn_varlen_fwd(q, k, v, offsets, offsets, **settings)
    dlse = torch.empty_like(lse) if lse_gradient else None
    return out, lse, *cuda.flash_attn_varlen_bwd(out, dlse, q, k, v, out, lse, offsets, offsets, **settings)


@pytest.mark.parametrize("name", ["SM80", "SM90", "SM100", "GFX942"])
def test_no_value_is_read(kernel, name):
    """Every launch is made of shapes alone; results have the shapes of the op's."""
    launcher = module(kernel, "_triton.launch")
    target = getattr(launcher, name)
    for dtype in (torch.float32, torch.bfloat16):
        with fake_cuda(), launcher.recorded(target) as launches:
            sinks = dict(s_aux=fake(torch.empty(4)), softcap=3.0, window_left=7)
            dropout = dict(seed=fake(torch.empty(1, dtype=torch.int64)), dropout_p=0.1)
            for changes in (sinks, dropout):
                out, lse, dq, dk, dv, ds_aux = call_on_fake_cuda(kernel, dtype, dims=(72, 40), **changes)
                assert out.shape == (300, 4, 40) and lse.shape == (4, 300) and dq.shape == (300, 4, 72)
                assert dk.shape == (300, 2, 72) and dv.shape == (300, 2, 40)
                assert ds_aux.shape == ((4,) if "s_aux" in changes else (0,)) and ds_aux.dtype == torch.float32
        names = [launch.kernel.fn.__name__ for launch in launches]
        assert {"_forward", "_backward_queries", "_backward_keys"} <= set(names)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Which of PyTorch's attention ops were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention" in func.name():
            self.names.add(func.name().split("_")[-1])
        return func(*args, **(kwargs or {}))


BOTH, FORWARD, NEITHER = {"forward", "backward"}, {"forward"}, set()
CHOICES = [
    ("half precision", {}, BOTH),
    ("fp16", dict(dtype=torch.float16), BOTH),
    ("fp32", dict(dtype=torch.float32), NEITHER),
    ("wide heads", dict(dims=(256, 256)), BOTH),
    ("a dim that is no multiple of 8", dict(dims=(36, 36)), NEITHER),
    ("another value dim", dict(dims=(64, 32)), NEITHER),
    ("window", dict(window_left=5, window_right=3), BOTH),
    ("softcap", dict(softcap=3.0), NEITHER),
    ("negative scale", dict(softmax_scale=-0.1), NEITHER),
    ("gradient of lse", dict(lse_gradient=True), FORWARD),
    ("seed", dict(seed=torch.zeros(1, dtype=torch.int64)), NEITHER),
    ("sinks", dict(s_aux=torch.zeros(4)), NEITHER),
    ("static form", dict(sequences=300), NEITHER),
    ("no tokens", dict(tokens=0), NEITHER),
]


@pytest.mark.parametrize("changes, chosen", [choice[1:] for choice in CHOICES], ids=[choice[0] for choice in CHOICES])
def test_choice_of_kernel(kernel, monkeypatch, changes, chosen):
    launcher = module(kernel, "_triton.launch")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for target, expected in ((launcher.SM80, chosen), (launcher.SM90, chosen), (launcher.GFX942, NEITHER)):
        with fake_cuda(), launcher.recorded(target) as launches, Calls() as calls:
            call_on_fake_cuda(kernel, **{name: fake(value) for name, value in changes.items()})
        ours = {launch.kernel.fn.__name__ for launch in launches} & {"_forward", "_backward_keys"}
        assert calls.names == expected
        assert changes.get("tokens") == 0 or ours == {
            {"forward": "_forward", "backward": "_backward_keys"}[name] for name in BOTH - expected
        }


@pytest.mark.parametrize("arch, pytorchs", [(80, True), (86, False), (89, False), (90, True), (100, False)])
def test_dims_that_pytorchs_backward_refuses(kernel, monkeypatch, arch, pytorchs):
    """200 to 224 on GPUs that have less shared memory than an A100 or H100, or that it does not know."""
    launcher = module(kernel, "_triton.launch")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    gpu = launcher.Target("cuda", arch, 100, 99 * 1024)
    for dim in (192, 200, 224, 232):
        with fake_cuda(), launcher.recorded(gpu), Calls() as calls:
            call_on_fake_cuda(kernel, dims=(dim, dim))
        assert calls.names == (BOTH if pytorchs or not 192 < dim <= 224 else NEITHER)


def test_deterministic_mode_chooses_ours(kernel, monkeypatch):
    launcher = module(kernel, "_triton.launch")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        with fake_cuda(), launcher.recorded(launcher.SM90), Calls() as calls:
            call_on_fake_cuda(kernel)
        assert calls.names == (NEITHER if deterministic else BOTH)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_argument_reaches_the_choice(kernel, monkeypatch, deterministic):
    cuda = module(kernel, "flash_attn_varlen.cuda")
    seeds = []

    def served_by(q, k, v, cu_seqlens_q, s_aux, seed, *rest):
        seeds.append(seed)
        return cuda.TRITON

    monkeypatch.setattr(cuda, "served_by", served_by)
    q = torch.randn(5, 2, 16, requires_grad=True)
    with served_by_triton(kernel):
        kernel.flash_attn_varlen_func(q, q, q, [0, 5], deterministic=deterministic).sum().backward()
        kernel.flash_attn_func(q[None], q[None], q[None], deterministic=deterministic).sum().backward()
    assert [seed is not None for seed in seeds] == [deterministic] * 4


class Seeds(torch.utils._python_dispatch.TorchDispatchMode):
    """The seeds that our attention ops are given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [argument.name for argument in function._schema.arguments]
        if "seed" in names and "flash_attn_varlen" in function._schema.name:
            self.given.append(args[names.index("seed")])
        return function(*args, **(kwargs or {}))


def test_dropout_takes_nothing_from_the_host(kernel):
    """A seed of the CPU would be copied in every call, and frozen in a CUDA graph."""
    with fake_cuda(), Seeds() as seeds:
        q, offsets = torch.empty(8, 2, 16, device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        kernel.flash_attn_varlen_func(q, q, q, offsets, dropout_p=0.1)
    assert [seed.device.type for seed in seeds.given] == ["cuda"]


class PyTorchKernels:
    """The two aten ops as CUDA has them: bounds that only size a grid, NaN in rows they leave unwritten, lse +infinity
    for rows that see no key."""

    def __init__(self, kernel):
        self.reference = kernel.flash_attn_varlen.flash_attn_varlen_reference
        self.calls = []

    def forward(self, q, k, v, cu_q, cu_k, longest_q, longest_k, dropout_p, causal, debug, **options):
        self._check("forward", (q, k, v), cu_q, cu_k, longest_q, longest_k, causal, options)
        assert options.pop("num_splits", 1) == 1 and dropout_p == 0 and not debug
        out, lse = self._reference(q, k, v, cu_q, cu_k, options)
        out[int(cu_q[-1]) :], lse[:, int(cu_q[-1]) :] = float("nan"), float("nan")
        return out, lse.float().masked_fill(lse == float("-inf"), float("inf")), None, None, None

    def backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, dropout_p, causal, state, unused, **options
    ):
        self._check("backward", (dout, q, k, v, out), cu_q, cu_k, longest_q, longest_k, causal, options)
        assert dropout_p == 0 and bool((lse > float("-inf")).all())

        def differentiated():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(self._reference(*leaves, cu_q, cu_k, options)[0], leaves, dout)

        # Autograd is off where an op's kernel runs, and on in another thread.
        with ThreadPoolExecutor(1) as other:
            gradients = other.submit(differentiated).result()
        for gradient, offsets in zip(gradients, (cu_q, cu_k, cu_k)):
            gradient[int(offsets[-1]) :] = float("nan")
        return gradients

    def _check(self, name, rows, cu_q, cu_k, longest_q, longest_k, causal, options):
        self.calls.append(name)
        assert longest_q > 1 and longest_q >= int(torch.diff(cu_q).max()) and longest_k >= int(torch.diff(cu_k).max())
        assert causal == (options["window_size_left"] < 0 and options["window_size_right"] == 0)
        for x in rows:
            assert x.stride(-1) == 1 and all(n % 8 == 0 for n in (*x.stride()[:2], x.storage_offset()))

    def _reference(self, q, k, v, cu_q, cu_k, options):
        window = (options["window_size_left"], options["window_size_right"])
        return self.reference(q, k, v, cu_q, cu_k, options["scale"], window_size=window)


@pytest.fixture()
def pytorch_kernels(kernel, monkeypatch):
    cuda = module(kernel, "flash_attn_varlen.cuda")
    stand_in = PyTorchKernels(kernel)
    monkeypatch.setattr(cuda, "_forward", stand_in.forward)
    monkeypatch.setattr(cuda, "_backward", stand_in.backward)
    monkeypatch.setattr(cuda, "served_by", lambda *arguments: cuda.PYTORCH)
    with served_by_triton(kernel):
        yield stand_in


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5]], ids=str)
def test_around_pytorch_kernels(kernel, pytorch_kernels, case):
    """Padding, rows without keys and the layouts that PyTorch's kernels cannot load come out as ours do."""
    op = op_under_test(case)

    def without_lse(call):
        return lambda *arguments, **boundaries: {"out": call(*arguments, **boundaries)["out"]}

    op = dataclasses.replace(op, run=without_lse(op.run), reference=without_lse(op.reference))
    properties.check_against_reference(op, SMALL, torch.float16)
    properties.check_memory_forms(op, SMALL, torch.float16)
    assert set(pytorch_kernels.calls) == BOTH


def test_rows_without_keys_through_pytorch_kernels(kernel, pytorch_kernels):
    q, k, v = (torch.randn(7, 2, 8, requires_grad=True) for _ in range(3))
    out, lse, _ = kernel.flash_attn_varlen_func(q, k, v, [0, 4, 6], [0, 2, 5], causal=True, return_attn_probs=True)
    assert bool((lse[:, :2] == float("-inf")).all()) and bool((lse[:, 6] == 0).all()) and bool((out[6] == 0).all())
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert bool((dq[6] == 0).all()) and bool((dk[5:] == 0).all()) and bool((dv[5:] == 0).all())


@pytest.mark.parametrize(
    "places",
    [
        dict(cache_batch_idx=torch.tensor([2, 0]), cache_seqlens=3),
        dict(block_table=torch.tensor([[0, 2], [1, 0]]), cache_seqlens=torch.tensor([3, 4])),
    ],
    ids=["rows", "pages"],
)
def test_cache_offsets_lie_where_the_queries_do(kernel, monkeypatch, places):
    """Also if lengths and places are on the CPU; the meta device stands for a GPU."""
    kvcache = module(kernel, "flash_attn_varlen.kvcache")
    devices = []

    def attend(op, *arguments, visible_keys):
        tensors = [value for value in (*arguments, visible_keys) if isinstance(value, torch.Tensor)]
        devices.extend(tensor.device.type for tensor in tensors)
        return tensors[0], tensors[0].new_empty(4, 2)

    monkeypatch.setattr(kvcache, "_attend", attend)
    q, new, cache = (torch.empty(shape, device="meta") for shape in ((2, 1, 4, 16), (2, 1, 2, 16), (3, 12, 2, 16)))
    kernel.flash_attn_with_kvcache(q, cache, cache, new, new, **places)
    assert devices == ["meta"] * 6
