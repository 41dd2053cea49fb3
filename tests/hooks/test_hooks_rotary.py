"""Rotary tables that depend on a length: a packed sample gets those of its own, whatever lies beside it."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.integrations.hub_kernels import allow_all_hub_kernels
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.tiny_models import (
    MODELS,
    NAME,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    check_packed_equals_alone,
    config,
    load,
    pack,
    run,
    samples,
)
from tests.models.tiny_ropes import (
    KINDS,
    LENGTHS,
    ORIGINAL,
    ROPES,
    build_rope,
    changes,
    each_alone,
    reference,
    rope_changes,
)

pytestmark = pytest.mark.usefixtures("kernel")


def load_rope(name):
    with allow_all_hub_kernels():
        return build_rope(name, NAME)


def tables(model, batch):
    """Cosines and sines ``[T, 2 * K]`` that the model's layers get, one entry a type of layer."""
    module = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))
    found = []
    handle = module.register_forward_hook(lambda module, inputs, output: found.append(torch.cat(output, -1)[0]))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return found


def packed_alone(length, index):
    """Sample ``index`` of LENGTHS alone, told by position_ids."""
    ids = torch.tensor([samples(LENGTHS)[index]["input_ids"]])
    return dict(input_ids=ids, position_ids=torch.arange(length)[None], use_cache=False)


@pytest.mark.parametrize("name", ROPES)
def test_packed_equals_alone_c61(name):
    """C61: samples on both sides of the original length, in training, recomputed and in evaluation, however told."""
    check_packed_equals_alone(ROPES[name][0], reference(name), NAME, LENGTHS, **changes(name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", [name for name in MODELS if rope_changes(config(name), "linear")])
def test_every_type_with_every_kind_of_table(model_type, kind):
    """All types of the matrix of models that rotate, whether or not the kind of their tables depends on a length."""
    more = rope_changes(config(model_type), kind)
    with torch.no_grad():
        got = load(model_type, **more).train()(**pack(lengths=LENGTHS)).logits[0]
    assert_logits_equal(got, each_alone(build(model_type, "eager", **more).train()))


@pytest.mark.parametrize("name", ROPES)
def test_tables_have_the_bits_of_alone(name):
    """Cosines and sines are those that stock transformers makes of the sample alone, bit for bit."""
    packed = tables(load_rope(name).train(), pack(lengths=LENGTHS))
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for index, (length, end) in enumerate(zip(LENGTHS, ends)):
        batch = dict(input_ids=torch.tensor([samples(LENGTHS)[index]["input_ids"]]))
        stock = tables(build_rope(name, "eager"), batch)
        again = tables(load_rope(name).train(), packed_alone(length, index))
        assert len(packed) == len(stock) == len(again)
        for ours, theirs, single in zip(packed, stock, again):
            assert torch.equal(ours[end - length : end], theirs), length
            assert torch.equal(single, theirs), length


@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope", "gemma3_text of two kinds"])
def test_nothing_is_kept_from_call_to_call(name):
    """A long sample before a pack does not reach it, and a pack leaves the module's buffers as they were."""
    model = load_rope(name).eval()
    long, short = alone([20])[0], alone([5])[0]
    logits, _ = reference(name)
    with torch.no_grad():
        expected = model(**short).logits
        model(**long)
        module = next(part for part in model.modules() if hasattr(part, "max_seq_len_cached"))
        before = {key: buffer.clone() for key, buffer in module.named_buffers()}
        cached = {key: value for key, value in vars(module).items() if key.endswith("max_seq_len_cached")}
        assert_logits_equal(model(**pack(lengths=LENGTHS), use_cache=False).logits[0], logits)
        assert before.keys() == dict(module.named_buffers()).keys()
        for key, buffer in module.named_buffers():
            assert torch.equal(buffer, before[key]), key
        assert cached == {key: value for key, value in vars(module).items() if key.endswith("max_seq_len_cached")}
        assert torch.equal(model(**short).logits, expected)


@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope"])
def test_no_pack_is_left_to_transformers(kernel, name):
    """Unpacked calls one after another compute, and keep, what they do without the hooks."""
    rows = [dict(row, use_cache=False) for row in alone([20, 9, 5, 20])]
    hooked, stock = build_rope(name, "sdpa").eval(), build_rope(name, "sdpa").eval()
    with torch.no_grad():
        got = [hooked(**row).logits for row in rows]
        kernel.remove_hooks()
        try:
            expected = [stock(**row).logits for row in rows]
        finally:
            kernel.install_hooks()
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)
    for (key, ours), (_, theirs) in zip(hooked.named_buffers(), stock.named_buffers()):
        assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope", "phimoe longrope", "minicpm3 longrope"])
def test_one_graph_for_any_lengths(name):
    """Compiled, no length is read: packs on both sides of the original length share their graphs."""
    torch._dynamo.reset()
    model = load_rope(name).train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for lengths in (LENGTHS, [7, 8, 5, 6, 8, 8, 8], [42, 8], [9, 9, 9, 9, 9, 5]):
        batch = pack(lengths=lengths)
        logits, gradients = run(compiled, [batch])
        expected = run(model, [batch])
        assert_logits_equal(logits, expected[0])
        assert_gradients_equal({key.replace("_orig_mod.", ""): value for key, value in gradients.items()}, expected[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope"])
def test_several_rows_and_tail_padding(name):
    """Each row of a batch is cut for itself, and rows after the last boundary choose nothing."""
    model = load_rope(name).train()
    expected = reference(name, [5, 20, 8, 9, 8])[0]
    row = pack(lengths=[5, 20, 8, 9, 8])["input_ids"]
    rows = dict(
        input_ids=row.view(2, 25),
        position_ids=torch.cat([torch.arange(n) for n in (5, 20, 8, 9, 8)]).view(2, 25),
        seq_idx=torch.tensor([[0] * 5 + [1] * 20, [0] * 8 + [1] * 9 + [2] * 8], dtype=torch.int32),
    )
    assert_logits_equal(model(**rows).logits.flatten(0, 1), expected)
    padded = torch.cat([row, row[:, :7]], 1)
    ends = torch.tensor([0, 5, 25, 33, 42, 50], dtype=torch.int32)
    positions = torch.cat([rows["position_ids"].view(1, 50), torch.arange(40, 47)[None]], 1)
    logits = model(input_ids=padded, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    assert_logits_equal(logits[0, :50], expected)


def test_largest_of_three_position_rows():
    """An image moves a sample's height and width past its text; the largest of the three rows is its length."""
    name = "qwen3_5_text dynamic"
    parts = []
    for length, image in ((6, 15), (7, 0)):
        rows = torch.arange(length).repeat(4, 1)
        rows[2:, 3:] += image
        parts.append(rows[:, None])
    ids = [torch.tensor([sample["input_ids"]]) for sample in samples([6, 7])]
    with torch.no_grad():
        expected = [
            build_rope(name, "eager")(input_ids=row, position_ids=part).logits[0] for row, part in zip(ids, parts)
        ]
        batch = dict(input_ids=torch.cat(ids, 1), position_ids=torch.cat(parts, -1), use_cache=False)
        assert_logits_equal(load_rope(name).eval()(**batch).logits[0], torch.cat(expected))


def test_unknown_rope_that_depends_on_the_length_is_refused(monkeypatch):
    """transformers updates every rope type with "dynamic" in its name; ours knows one of them."""
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "my_dynamic", ROPE_INIT_FUNCTIONS["dynamic"])
    monkeypatch.setitem(ROPES, "mine", copy.deepcopy(ROPES["llama dynamic"]))
    ROPES["mine"][1]["rope_parameters"]["rope_type"] = "my_dynamic"
    model = load_rope("mine").train()
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be trained on packed samples: .*'my_dynamic'"):
        model(**pack(lengths=LENGTHS))
    model(**alone([ORIGINAL + 1])[0])


def test_leak_report_compares_with_fresh_tables(kernel):
    """The samples alone, one after another, are not compared with tables that a longer one left behind."""
    model = load_rope("llama dynamic").eval()
    report = kernel.leak_report(model, pack(lengths=LENGTHS))
    assert not report.leaks
    assert report.verdict == "apart"
