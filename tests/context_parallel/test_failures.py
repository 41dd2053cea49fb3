"""Ranks that disagree or fail: every rank gets an error, and none hangs."""

import time

import pytest

from tests.context_parallel import faults
from tests.harness.packings import Pack

DISAGREEMENTS = {
    "another sample": ([[0, 3, 8]] * 3 + [[0, 4, 8]], [[2] * 4] * 4),
    "another number of samples": ([[0, 8], [0, 3, 8], [0, 8], [0, 8]], [[2] * 4] * 4),
    "another cut": ([[0, 8]] * 4, [[2] * 4, [2] * 4, [1, 3, 2, 2], [2] * 4]),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_raise_the_same_error(ranks, what):
    answers = ranks.outcomes(faults.build, *DISAGREEMENTS[what])
    texts = {text.splitlines()[0] for _, text in answers}
    assert len(texts) == 1 and not any(well for well, _ in answers)
    wrong = "ValueError: ContextParallel: cu_seqlens must be the same on every rank, as must lengths and attention, got"
    assert wrong in texts.pop()
    ranks.run(faults.survives, Pack("afterwards", (9,)))


MALFORMED = {
    "offsets that fall": ([[0, 8]] * 2 + [[0, 5, 3, 8]] + [[0, 8]], [[2] * 4] * 4, "cu_seqlens must never decrease"),
    "more tokens than the shards": ([[0, 8]] * 2 + [[0, 9]] + [[0, 8]], [[2] * 4] * 4, "cu_seqlens must end at"),
    "not enough lengths": ([[0, 8]] * 4, [[2] * 4] * 2 + [[4, 4]] + [[2] * 4], "lengths must hold 0 or more"),
    "lengths of another kind": ([[0, 8]] * 4, [[2] * 4] * 2 + ["2222"] + [[2] * 4], "lengths must be a list of ints"),
    "no equal cut": ([[0, 8]] * 2 + [[0, 7]] + [[0, 8]], [None] * 4, "cu_seqlens must end at a multiple of the 4"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_boundaries_of_one_rank_are_an_error_on_all(ranks, what):
    *believed, message = MALFORMED[what]
    answers = ranks.outcomes(faults.build, *believed)
    for rank, (well, text) in enumerate(answers):
        assert not well
        expected = message if rank == 2 else "must be the same on every rank, got malformed ones on rank 2"
        assert expected in text.splitlines()[0], text
    ranks.run(faults.survives, Pack("afterwards", (9,)))


@pytest.mark.parametrize("name", ("causal_conv1d_fn", "chunk_gated_delta_rule", "flash_attn_varlen_func"))
def test_a_rank_that_fails_takes_the_others_down(ranks, name):
    begun = time.monotonic()
    answers = ranks.outcomes(faults.one_fails, name, 4)
    assert time.monotonic() - begun < 40
    assert "this rank fails" in answers[1][1]
    waiting = [2] if name == "causal_conv1d_fn" else [2, 3]  # who gets nothing from rank 1 goes on
    for rank in waiting:
        well, text = answers[rank]
        assert not well and text.startswith(("RuntimeError", "DistBackendError")), text


def test_calls_that_do_not_fit_are_refused_before_any_message(ranks):
    expected = {
        "no context": "TypeError: causal_conv1d_fn: cp_context must be a ContextParallel, or an object with group",
        "rows": "ValueError: causal_conv1d_fn: cp_context must come with a batch of one packed row",
        "tokens": "ValueError: causal_conv1d_fn: cp_context must come with the 2 tokens of rank",
        "labels": "ValueError: causal_conv1d_fn: seq_idx must be None beside cp_context",
        "offsets": "ValueError: causal_conv1d_fn: cu_seqlens must be cp_context's of this rank",
        "states": "ValueError: causal_conv1d_fn: initial_states must have shape [N, D, W - 1]",
        "group": "ValueError: causal_conv1d_fn: cp_context must have a group, got None",
        "dropout": "ValueError: flash_attn_varlen_func: dropout_p must be 0 with cp_context",
    }
    for rank, found in enumerate(ranks.run(faults.wrong_calls)):
        for why, text in expected.items():
            assert text in found[why], (rank, why, found[why])
