"""What a model counts along the row is counted along each sample: shares, places, statistics of experts."""

import pytest
import torch

from tests.models.tiny_models import (
    LENGTHS,
    MODELS,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    check_packed_equals_alone,
    load,
    pack,
    run,
    samples,
)

pytestmark = pytest.mark.usefixtures("kernel")

# The first sample holds one masked token in five, the others none.
_MASK = samples(LENGTHS)[0]["input_ids"][1]
ESM = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=128,
    pad_token_id=1,
    mask_token_id=_MASK,
    token_dropout=True,
    position_embedding_type="rotary",
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
FLOOR = dict(log_scaling_n_floor=4, log_scaling_alpha=0.5)


def stock_reference(model_type, **changes):
    return run(build(model_type, "eager", **changes).train(), alone())


def test_share_of_masked_tokens():
    """ESM scales embeddings by the share of masked tokens; another sample's masks do not reach it."""
    assert sum(_MASK in sample["input_ids"] for sample in samples(LENGTHS)) < len(LENGTHS)
    check_packed_equals_alone("esm", stock_reference("esm", **ESM), **ESM)


def test_share_of_masked_tokens_compiled():
    torch._dynamo.reset()
    model = load("esm", **ESM).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, expected = run(compiled, [pack()]), run(model, [pack()])
    assert_logits_equal(got[0], expected[0])
    assert_gradients_equal({name.replace("_orig_mod.", ""): value for name, value in got[1].items()}, expected[1])


def test_share_of_masked_tokens_without_a_pack(kernel):
    """A padded batch is stock ESM's, which counts along rows."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples(LENGTHS)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    batch = dict(input_ids=ids, attention_mask=(ids != 1).long())
    model = build("esm", "sdpa", **ESM).eval()
    with torch.no_grad():
        got = model(**batch).logits
        kernel.remove_hooks()
        try:
            assert torch.equal(model(**batch).logits, got)
        finally:
            kernel.install_hooks()


def test_place_of_a_token_in_its_sample():
    """Inkling scales the scores of tokens beyond a floor by their place, of which a sample has its own."""
    check_packed_equals_alone("inkling_text", stock_reference("inkling_text", **FLOOR), "eager", **FLOOR)


@pytest.mark.parametrize("model_type", ["jamba", "qwen3_next"])
def test_balance_of_experts_is_that_of_the_batch(model_type):
    """The balancing loss is a mean over all tokens: a pack's is that of the padded batch of the same samples."""
    assert model_type in MODELS
    rows = [torch.tensor(sample["input_ids"]) for sample in samples(LENGTHS)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padded = dict(input_ids=ids, attention_mask=(ids != 0).long(), output_router_logits=True)
    with torch.no_grad():
        expected = build(model_type, "eager", num_experts=4, num_experts_per_tok=2).train()(**padded).aux_loss
        model = load(model_type, num_experts=4, num_experts_per_tok=2).train()
        got = model(**pack(), output_router_logits=True).aux_loss
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
