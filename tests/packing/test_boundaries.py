"""Malformed and contradictory boundaries: one table of faults, tried on every public function that takes boundaries.

Each fault must raise the listed exception, naming the function and the argument, before anything is computed. What
whole models refuse is in test_boundaries_models.py; how well-formed boundaries are read, in test_packing.py.
"""

import inspect

import pytest
import torch

from tests.harness.kernel import load_kernel
from tests.harness.ops import (
    causal_conv1d,
    flash_attn_varlen,
    gated_delta_rule,
    kda,
    mamba1_inner,
    mamba1_scan,
    mamba2_fused,
    mamba2_scan,
)
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits, run_with_gradients

TOKENS = 10
ROW = Pack("row", (TOKENS,))

# Functions that take all three spellings: name -> how the harness calls them, without states.
FUNCTIONS = {
    "causal_conv1d_fn": causal_conv1d.op_under_test(causal_conv1d.Case("", initial=False)),
    "chunk_gated_delta_rule": gated_delta_rule.op_under_test(gated_delta_rule.Case("", initial=False)),
    "fused_recurrent_gated_delta_rule": gated_delta_rule.op_under_test(
        gated_delta_rule.Case("", initial=False), "fused_recurrent_gated_delta_rule"
    ),
    "chunk_kda": kda.op_under_test(kda.Case("", initial=False)),
    "fused_recurrent_kda": kda.op_under_test(kda.Case("", initial=False), "fused_recurrent_kda"),
    "selective_scan_fn": mamba1_scan.op_under_test(mamba1_scan.Case("", initial=False)),
    "mamba_inner_fn": mamba1_inner.op_under_test(norms=False),
    "mamba_chunk_scan_combined": mamba2_scan.op_under_test(mamba2_scan.Case("", initial=False)),
    "mamba_split_conv1d_scan_combined": mamba2_fused.Layer(initial=False).op(),
}


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def labels(*values, dtype=torch.int32):
    return torch.tensor([values], dtype=dtype)


GOOD = offsets(0, 3, 10)


# Fault -> (offsets over ten tokens, exception). The same for cu_seqlens, cu_seqlens_q and cu_seqlens_k.
OFFSET_FAULTS = {
    "decreases": (offsets(0, 6, 4, 10), ValueError),
    "decreases at the end": (offsets(0, 6, 5), ValueError),
    "negative inside": (offsets(0, -1, 10), ValueError),
    "starts above 0": (offsets(2, 10), ValueError),
    "starts below 0": (offsets(-1, 10), ValueError),
    "ends past T": (offsets(0, 3, 11), ValueError),
    "ends past T by more than 32 bits": ([0, 2**32 + 10], ValueError),
    "lengths instead of offsets": (offsets(3, 7), ValueError),
    "no entry": (offsets(), ValueError),
    "two axes": (torch.zeros(2, 2, dtype=torch.int32), ValueError),
    "no axis": (torch.tensor(10), ValueError),
    "float": (offsets(0, 10, dtype=torch.float32), TypeError),
    "float64 list": ([0, 2.5, 10], TypeError),
    "bool": (offsets(0, 1, dtype=torch.bool), TypeError),
    "int16": (offsets(0, 10, dtype=torch.int16), TypeError),
    "uint8": (offsets(0, 10, dtype=torch.uint8), TypeError),
    "bool list": ([False, True], TypeError),
    "an int": (10, TypeError),
    "a string": ("0,10", TypeError),
    "a set": ({0, 10}, TypeError),
    "without values": (offsets(0, 10).to("meta"), ValueError),
}

LABEL_FAULTS = {
    "decreases": (labels(0, 0, 1, 1, 1, 0, 0, 0, 0, 0), ValueError),
    "position-like": (labels(0, 1, 2, 0, 1, 2, 3, 4, 5, 6), ValueError),
    "negative first": (labels(-1, -1, 0, 0, 0, 0, 0, 0, 0, 0), ValueError),
    "negative inside": (labels(0, 0, 0, 0, -1, 1, 1, 1, 1, 1), ValueError),
    "too short": (labels(*[0] * 9), ValueError),
    "too long": (labels(*[0] * 11), ValueError),
    "one axis": (labels(*[0] * 10)[0], ValueError),
    "three axes": (labels(*[0] * 10)[None], ValueError),
    "two rows": (labels(*[0] * 10).expand(2, -1), ValueError),
    "float": (labels(*[0] * 10, dtype=torch.float32), TypeError),
    "bool": (labels(*[0] * 10, dtype=torch.bool), TypeError),
    "int16": (labels(*[0] * 10, dtype=torch.int16), TypeError),
    "a list": ([[0] * 10], TypeError),
    "an activation": ("silu", TypeError),
    "without values": (labels(*[0] * 10).to("meta"), ValueError),
}

POSITION_FAULTS = {
    "float": (torch.arange(10.0), TypeError),
    "bool": (torch.ones(1, 10, dtype=torch.bool), TypeError),
    "a list": (list(range(10)), TypeError),
    "too short": (torch.arange(9), ValueError),
    "too long": (torch.arange(11)[None], ValueError),
    "no axis": (torch.tensor(0), ValueError),
    "two rows": (torch.arange(10).expand(2, 10), ValueError),
    "two rows of rotary positions": (torch.arange(10).expand(2, 1, 10), ValueError),
    "five rows of rotary positions": (torch.arange(10).expand(5, 1, 10), ValueError),
    "three rows joined": (torch.arange(30).expand(3, 1, 30), ValueError),
    "four axes": (torch.arange(10).expand(1, 3, 1, 10), ValueError),
    "without values": (torch.arange(10)[None].to("meta"), ValueError),
}

# Spellings that are well-formed and disagree -> the argument that is named.
CONTRADICTIONS = {
    "cut elsewhere": (dict(cu_seqlens=offsets(0, 4, 10), seq_idx=labels(*[0] * 5 + [1] * 5)), "seq_idx"),
    "one cuts, one does not": (dict(cu_seqlens=offsets(0, 10), seq_idx=labels(*[0] * 5 + [1] * 5)), "seq_idx"),
    "the other way round": (dict(cu_seqlens=offsets(0, 5, 10), seq_idx=labels(*[0] * 10)), "seq_idx"),
    "padding in one": (dict(cu_seqlens=offsets(0, 8), seq_idx=labels(*[0] * 10)), "seq_idx"),
    "padding in the other": (dict(cu_seqlens=offsets(0, 10), seq_idx=labels(*[0] * 8 + [-1] * 2)), "seq_idx"),
}


def refused(name, argument, error):
    return pytest.raises(error, match=f"^{name}: {argument} must ")


def in_rows(op, rows):
    """The op's inputs with every row the same."""
    inputs = op.make(ROW, torch.float32)
    return {name: torch.cat([x] * rows) if op.kind(name) == "tokens" else x for name, x in inputs.items()}


def faults_of(spelling):
    return {"cu_seqlens": OFFSET_FAULTS, "seq_idx": LABEL_FAULTS, "position_ids": POSITION_FAULTS}[spelling]


ROWS = [(spelling, fault) for spelling in ("cu_seqlens", "seq_idx", "position_ids") for fault in faults_of(spelling)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("spelling, fault", ROWS)
def test_malformed(name, spelling, fault):
    value, error = faults_of(spelling)[fault]
    op = FUNCTIONS[name]
    with refused(name, spelling, error):
        op.run(op.make(ROW, torch.float32), **{spelling: value})


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fault", CONTRADICTIONS)
def test_contradictory(name, fault):
    boundaries, argument = CONTRADICTIONS[fault]
    op = FUNCTIONS[name]
    with refused(name, argument, ValueError):
        op.run(op.make(ROW, torch.float32), **boundaries)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_offsets_beside_several_rows(name):
    op = FUNCTIONS[name]
    with refused(name, "cu_seqlens", ValueError):
        op.run(in_rows(op, 2), cu_seqlens=offsets(0, 10, 20))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_c11_forms_of_well_formed_boundaries(name):
    """int32, int64 and lists mean the same, to the bit."""
    op = FUNCTIONS[name]
    inputs = op.make(ROW, torch.float32)
    expected = op.run(inputs, cu_seqlens=GOOD)
    cut = labels(*[0] * 3 + [1] * 7)
    for given in (
        dict(cu_seqlens=GOOD.long()),
        dict(cu_seqlens=GOOD.tolist()),
        dict(cu_seqlens=tuple(GOOD.tolist())),
        dict(seq_idx=cut),
        dict(seq_idx=cut.long()),
        dict(cu_seqlens=GOOD, seq_idx=cut),
    ):
        for key, value in op.run(inputs, **given).items():
            assert_same_bits(f"{name}: {key} by {given}", value, expected[key])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_lies_on_padding_between_rows_reaches_nothing(name):
    """NaN there changes no bit of an output or of a gradient, the parameters' included; both are 0 there."""
    op = FUNCTIONS[name]
    seq_idx = torch.cat([labels(0, 0, 0, 1, 1, 1, 1, -1, -1, -1), labels(*[0] * 10)])
    clean = in_rows(op, 2)
    axes = op.token_axis
    dirty = {key: value.clone() for key, value in clean.items()}
    for key in axes.keys() & dirty.keys():
        dirty[key][0].narrow(axes[key] - 1, 7, 3).fill_(torch.nan)
    expected, found = (
        run_with_gradients(lambda leaves: op.run(leaves, seq_idx=seq_idx), inputs) for inputs in (clean, dirty)
    )
    for key, value in found.items():
        if op.kind(key) != "states":
            assert_same_bits(f"{name}: {key}", value, expected[key])
        if op.kind(key) == "tokens":
            assert not value[0].narrow(axes[op.base(key)] - 1, 7, 3).any(), key


# ---- attention ----

ATTENTION = flash_attn_varlen.op_under_test(flash_attn_varlen.Case(""))


def attend(**boundaries):
    return ATTENTION.run(ATTENTION.make(ROW, torch.float32), **boundaries)


@pytest.mark.parametrize("fault", OFFSET_FAULTS)
def test_attention_malformed(fault):
    value, error = OFFSET_FAULTS[fault]
    with refused("flash_attn_varlen_func", "cu_seqlens_q", error):
        attend(cu_seqlens_q=value)
    with refused("flash_attn_varlen_func", "cu_seqlens_q", error):
        attend(cu_seqlens_q=value, cu_seqlens_k=GOOD)
    with refused("flash_attn_varlen_func", "cu_seqlens_k", error):
        attend(cu_seqlens_q=GOOD, cu_seqlens_k=value)


LONGEST_FAULTS = {
    "too small": (6, ValueError),
    "too small, in a tensor": (torch.tensor(6), ValueError),
    "negative": (-1, ValueError),
    "several": (torch.tensor([7, 7]), ValueError),
    "float": (7.0, TypeError),
    "float tensor": (torch.tensor(7.0), TypeError),
    "bool": (True, TypeError),
    "a string": ("7", TypeError),
}


@pytest.mark.parametrize("argument", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("fault", LONGEST_FAULTS)
def test_attention_longest(argument, fault):
    value, error = LONGEST_FAULTS[fault]
    with refused("flash_attn_varlen_func", argument, error):
        attend(cu_seqlens_q=GOOD, **{argument: value})


def test_attention_numbers_of_sequences():
    for keys in (offsets(0, 10), offsets(0, 3, 5, 10)):
        with refused("flash_attn_varlen_func", "cu_seqlens_k", ValueError):
            attend(cu_seqlens_q=GOOD, cu_seqlens_k=keys)


CACHE_FAULTS = {
    "past the end": ("cache_seqlens", offsets(3, 17), ValueError),
    "past the end with the new key": ("cache_seqlens", offsets(3, 16), ValueError),
    "negative": ("cache_seqlens", offsets(3, -1), ValueError),
    "one too few": ("cache_seqlens", offsets(3), ValueError),
    "two axes": ("cache_seqlens", offsets(3, 3)[None], ValueError),
    "float": ("cache_seqlens", offsets(3, 3, dtype=torch.float32), TypeError),
    "a float": ("cache_seqlens", 2.5, TypeError),
    "without values": ("cache_seqlens", offsets(3, 3).to("meta"), ValueError),
    "row past the end": ("cache_batch_idx", offsets(0, 2), ValueError),
    "row as a float": ("cache_batch_idx", offsets(0, 1, dtype=torch.float32), TypeError),
    "row without value": ("cache_batch_idx", offsets(0, 1).to("meta"), ValueError),
    "page past the end": ("block_table", torch.tensor([[0], [2]]), ValueError),
    "page below 0": ("block_table", torch.tensor([[0], [-1]]), ValueError),
    "page as a float": ("block_table", torch.tensor([[0.0], [1.0]]), TypeError),
    "page without value": ("block_table", torch.tensor([[0], [1]]).to("meta"), ValueError),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_cache_lengths(kernel, fault):
    argument, value, error = CACHE_FAULTS[fault]
    q, cache, new = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 1, 2, 8)
    before = cache.clone()
    with refused("flash_attn_with_kvcache", argument, error):
        kernel.flash_attn_with_kvcache(q, cache, cache, new, new, **{"cache_seqlens": 3, argument: value})
    assert torch.equal(cache, before)


# ---- layers, by transformers' names ----

# The whole mixers among the layers call nothing; see layers.py.
LAYERS = [name for name in FUNCTIONS if name not in ("mamba_inner_fn", "mamba_split_conv1d_scan_combined")]


def call_layer(name, rows=1, **boundaries):
    """The layer of that name with its tokens given by position, as transformers calls it."""
    given = in_rows(FUNCTIONS[name], rows)
    named = {key: given.pop(key) for key in ("D", "z", "dt_bias", "delta_bias", "A_log") if key in given}
    layer = getattr(load_kernel().layers, name)()
    needed = {
        "mamba_chunk_scan_combined": dict(chunk_size=8),
        "fused_recurrent_kda": dict(initial_state=None, output_final_state=False),
    }
    return layer(*given.values(), **named, **needed.get(name, {}), **boundaries)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("fault", OFFSET_FAULTS)
def test_layers_malformed(name, fault):
    value, error = OFFSET_FAULTS[fault]
    with pytest.raises(error, match=f"^{name}: cu_seq(lens|_lens_q) must "):
        call_layer(name, cu_seq_lens_q=value)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_contradictory(name):
    with refused(name, "cu_seq_lens_q", ValueError):
        call_layer(name, cu_seqlens=offsets(0, 4, 10), cu_seq_lens_q=offsets(0, 5, 10))
    with refused(name, "seq_idx", ValueError):
        call_layer(name, cu_seq_lens_q=offsets(0, 4, 10), seq_idx=labels(*[0] * 5 + [1] * 5))
    with refused(name, "cu_seq_lens_q", ValueError):
        call_layer(name, rows=2, cu_seq_lens_q=offsets(0, 4, 20))
    with refused(name, "cu_seq_lens_q", ValueError):
        call_layer(name, rows=2, cu_seq_lens_q=offsets(0, 14, 10, 20))


# ---- on a GPU ----


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU and counts how often its values are looked at."""

    looks = 0
    device = property(lambda self: torch.device("cuda:0"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.looks += getattr(function, "__name__", "") in ("__bool__", "__int__", "item", "tolist", "nonzero")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("fault", ["decreases", "negative inside", "starts above 0", "ends past T"])
def test_offsets_on_a_gpu_are_read_only_when_debugging(kernel, monkeypatch, fault):
    """A look would be a sync, so PACKFREE_DEBUG=1 has to ask for it."""
    value = OFFSET_FAULTS[fault][0].as_subclass(OnGpu)
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(OnGpu, "looks", 0)
    monkeypatch.delenv("PACKFREE_DEBUG")
    assert kernel.packing.check_cu_seqlens("op", value, TOKENS, gpu) is not None
    assert OnGpu.looks == 0
    monkeypatch.setenv("PACKFREE_DEBUG", "1")
    with refused("op", "cu_seqlens", ValueError):
        kernel.packing.check_cu_seqlens("op", value, TOKENS, gpu)
    assert OnGpu.looks > 0


@pytest.mark.parametrize("fault", ["decreases", "position-like", "negative first", "negative inside"])
def test_labels_on_a_gpu_are_read_only_when_debugging(kernel, monkeypatch, fault):
    value = LABEL_FAULTS[fault][0].as_subclass(OnGpu)
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(OnGpu, "looks", 0)
    monkeypatch.delenv("PACKFREE_DEBUG")
    assert not kernel.packing.reads_values(value)
    monkeypatch.setenv("PACKFREE_DEBUG", "1")
    with refused("op", "seq_idx", ValueError):
        kernel.packing.resolve_packing("op", 1, TOKENS, gpu, seq_idx=value)
    assert OnGpu.looks > 0


def test_boundaries_from_another_device_are_checked_where_that_is_free(kernel, monkeypatch):
    """From a GPU to tokens on a CPU they are moved once, which a look then costs nothing beside."""
    monkeypatch.delenv("PACKFREE_DEBUG")

    class Moves(OnGpu):
        def to(self, *args, **kwargs):
            return self.as_subclass(torch.Tensor).to(torch.int32)

    value = OFFSET_FAULTS["decreases"][0].as_subclass(Moves)
    with refused("op", "cu_seqlens", ValueError):
        kernel.packing.check_cu_seqlens("op", value, TOKENS, torch.device("cpu"))
    good = GOOD.as_subclass(Moves)
    assert kernel.packing.check_cu_seqlens("op", good, TOKENS, torch.device("cpu")).tolist() == [0, 3, 10]


# ---- the table itself ----


def test_every_function_that_takes_boundaries_is_in_the_table(kernel):
    """A new public function with a boundary argument has to join."""
    spellings = {"cu_seqlens", "seq_idx", "position_ids", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens"}
    functions = {name: getattr(kernel, name) for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name))}
    taking = {name for name, function in functions.items() if spellings & set(inspect.signature(function).parameters)}
    # cache_seqlens of the convolution's update counts tokens seen, modulo the buffer: any number means a place.
    assert taking == {*FUNCTIONS, "flash_attn_varlen_func", "flash_attn_with_kvcache", "causal_conv1d_update"}


def test_the_row_itself_is_fine(kernel):
    """The faults are the only thing wrong with the calls above."""
    for op in FUNCTIONS.values():
        for spelling in ("cu_seqlens", "seq_idx", "position_ids"):
            op.run(op.make(ROW, torch.float32), **{spelling: getattr(ROW, spelling)})
    attend(cu_seqlens_q=GOOD, max_seqlen_q=7, max_seqlen_k=torch.tensor(7))
    for name in LAYERS:
        call_layer(name, cu_seq_lens_q=GOOD)
        call_layer(name, rows=2, cu_seq_lens_q=offsets(0, 4, 10, 20))
