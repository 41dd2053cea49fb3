"""Whole models on shards of a row: logits, losses and gradients of one process, or an error by name on every rank."""

import time

import pytest
import torch

from tests.context_parallel import models

# Every function of the table, and attention; then windows, sinks, softcap, values of another width, both directions,
# positions in a table, two mixers in a layer, one block in two places.
FAMILIES = ["llama", "qwen3_5_text", "kimi_linear", "bamba", "mamba2", "mamba", "jamba", "lfm2"]
OTHERS = ["gpt_oss", "gemma2", "deepseek_v3", "modernbert", "gpt2", "falcon_h1", "zamba"]
SAMPLES = (5, 9, 17, 3, 1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_over_two_and_four_ranks_with_checkpointing(ranks, model_type):
    ranks.run(models.compare, model_type, SAMPLES, [20, 15], "seq_idx", False, ranks=2)
    for reentrant in (None, False, True):
        ranks.run(models.compare, model_type, SAMPLES, [8, 14, 1, 12], "position_ids", reentrant)


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_kinds_of_layers(ranks, model_type):
    ranks.run(models.compare, model_type, SAMPLES, [20, 15], ranks=2)


@pytest.mark.parametrize("model_type", ("llama", "gpt_oss", "qwen3_5_text", "bamba", "jamba"))
def test_attention_by_heads(ranks, model_type):
    """Two key heads, which four ranks share; boundaries by positions, and offsets of the whole row."""
    for reentrant in (None, False, True):
        ranks.run(models.compare, model_type, SAMPLES, [8, 14, 1, 12], "position_ids", reentrant, None, "heads")
    change = models.told_by_offsets
    ranks.run(models.compare, model_type, SAMPLES, [20, 15], "cu_seq_lens", None, change, "heads", ranks=2)
    ranks.run(models.compare, model_type, (12,), [5, 7], "position_ids", None, None, "heads", ranks=2)


@pytest.mark.parametrize("count", (1, 2, 3, 4))
@pytest.mark.parametrize("model_type", ("qwen3_5_text", "bamba"))
def test_random_rows_and_cuts(ranks, model_type, count):
    ranks.run(models.random_rows, model_type, range(10 * count, 10 * count + 4), ranks=count)


@pytest.mark.parametrize("how", models.CHANGES)
@pytest.mark.parametrize("model_type", ("llama", "bamba"))
def test_ways_to_tell_boundaries_and_labels(ranks, model_type, how):
    ranks.run(models.told, model_type, how)


def test_a_row_without_boundaries_is_one_sample(ranks):
    ranks.run(models.one_document, "qwen3_5_text")


@pytest.mark.parametrize("model_type", ("llama", "bamba"))
def test_a_checkpoint_wrapper_from_elsewhere(ranks, model_type):
    ranks.run(models.checkpointed_by_hand, model_type)


def test_models_that_are_refused(ranks):
    expected = {
        "sdpa": "LlamaForCausalLM (model type 'llama') cannot run on shards of a row (sequence_parallel): noth",
        "sdpa beside scans": "its attention is 'sdpa', which sees this rank's tokens only",
        "mixes tokens": "its recurrent block carries one state through the row",
        "a head": "it gives one result for each sample, and samples may end on other ranks",
        "rotary tables": "its rotary tables of rope type 'dynamic' depend on the length of a sample",
        "balancing loss": "its balancing loss is a product of means over the whole row",
        "compiled": "sequence_parallel must be left out under torch.compile",
    }
    for found in ranks.run(models.refused_models, ranks=2):
        for why, text in expected.items():
            assert text in found[why], (why, found[why])


def test_calls_that_are_refused(ranks):
    other = "LlamaForCausalLM: its shard must be one that every rank can take, got an error on rank 1"
    expected = {
        "rows": "input_ids must hold one row [1, t] of tokens",
        "cache": "use_cache must be left out or off on a shard of a row, got True",
        "mask": "attention_mask must be left out or mask nothing on a shard",
        "unknown": "pixel_values must be left out on a shard",
        "foreign": "cu_seqlens must be left out",
        "ranks tell differently": "the arguments of the call must be the same on every rank that shares a row",
        "offsets of this rank": "cu_seq_lens_q must be the offsets of the whole row, which end at the 8 tokens of all",
        "other offsets": "cu_seq_lens_q must be the offsets of the whole row, the same on every rank, got others",
        "positions beside offsets": "position_ids must begin samples where cu_seq_lens_q does, got one at token 2",
        "no tokens": "input_ids must hold a token or more on every rank that shares a row, got [0, 4]",
        "images' positions": "position_ids must hold a row of text positions on a shard",
    }
    answers = ranks.run(models.refused_calls, ranks=2)
    for found in answers:
        for why, text in expected.items():
            assert text in found[why], (why, found[why])
    assert other in answers[0]["one rank is malformed"]
    assert "position_ids must be an integer tensor" in answers[1]["one rank is malformed"]


def test_batches_that_are_refused(ranks):
    expected = {
        "rows": "shard_batch: input_ids must hold one row [1, T], got (2, 8)",
        "no mapping": "shard_batch: batch must be a mapping of a forward's keywords, got Tensor",
        "group": "TypeError: sequence_parallel: group must be a process group, a DeviceMesh of one dimension or None",
        "attention": "ValueError: sequence_parallel: attention must be 'keys' or 'heads', got 'states'",
        "lengths": "shard_batch: lengths must hold 0 or more of the 8 tokens for each of the 2 ranks",
        "kind of lengths": "shard_batch: lengths must be a list of ints",
        "another tensor": "shard_batch: weights must have one entry for each of the 8 tokens",
        "disagree": "shard_batch: seq_idx must cut the row where cu_seqlens does",
    }
    for found in ranks.run(models.refused_batches, ranks=2):
        for why, text in expected.items():
            assert text in found[why], (why, found[why])


def test_a_switch_without_a_group_is_refused(kernel):
    with pytest.raises(RuntimeError, match="sequence_parallel: torch.distributed must be initialized"):
        with kernel.sequence_parallel():
            pass


def test_a_rank_that_fails_inside_a_model_takes_the_others_down(ranks):
    begun = time.monotonic()
    answers = ranks.outcomes(models.one_fails)
    assert time.monotonic() - begun < 40
    assert not any(well for well, _ in answers[:3])


def test_a_batch_is_cut_into_its_shards(ranks):
    """Joined, the shards are the batch; labels are shifted across the cut; offsets are told where positions lack."""
    ids, positions = torch.arange(10)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 1]])
    batch = dict(input_ids=ids, labels=ids, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 4, 7, 8, 10]))
    shards = ranks.run(models.shards_of, batch)
    assert [shard["input_ids"].shape[1] for shard in shards] == [3, 3, 2, 2]
    joined = {name: torch.cat([shard[name] for shard in shards], 1) for name in shards[0]}
    assert joined["shift_labels"].tolist() == [[*range(1, 10), -100]]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(joined[name], batch[name])
    through = dict(input_ids=ids, position_ids=ids, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, -1, -1]]))
    for shard in ranks.run(models.shards_of, through, [1, 6, 2, 1]):
        assert shard["cu_seq_lens_q"].tolist() == [0, 3, 7, 8, 10] and "seq_idx" not in shard
