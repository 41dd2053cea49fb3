"""What is made of boundaries is kept for the next call, as long as it is true, and no longer than it is of use."""

import copy
import gc
import importlib
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.harness.fake_cuda import fake, fake_cuda
from tools.maintainers.launches import as_on_a_gpu

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def packing(kernel):
    return importlib.import_module(f"{kernel.__name__}.packing")


@pytest.fixture(scope="module")
def sharing(kernel):
    return importlib.import_module(f"{kernel.__name__}._sharing")


@pytest.fixture(params=["cpu", "gpu"])
def device(request, kernel):
    """Where values are looked at, and where they are not."""
    if request.param == "cpu":
        yield "cpu"
    else:
        with as_on_a_gpu(kernel):
            yield "gpu"


def check(packing, offsets, tokens=10):
    return packing.check_cu_seqlens("op", offsets, tokens, CPU)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_converted_once(packing, device, dtype):
    given = torch.tensor([0, 4, 10], dtype=dtype)
    made = check(packing, given)
    assert made.tolist() == [0, 4, 10] and made.dtype == torch.int32
    assert check(packing, given) is made and check(packing, made) is made
    assert check(packing, made, tokens=12) is made  # inside a longer row as well


def test_offsets_are_checked_for_each_row(packing):
    given = torch.tensor([0, 4, 10])
    for offsets in (given, check(packing, given)):
        with pytest.raises(ValueError, match="must end at the number of tokens .9. or before, got 10"):
            check(packing, offsets, tokens=9)
    assert check(packing, given).tolist() == [0, 4, 10]


@pytest.mark.parametrize("spelling", ["seq_idx", "position_ids"])
def test_labels_and_positions_are_converted_once(packing, device, spelling):
    row = {"seq_idx": [[0, 0, 1, 1, 1]], "position_ids": [[0, 1, 0, 1, 2]]}[spelling]
    given = torch.tensor(row)
    first, again = (packing.resolve_packing("op", 1, 5, CPU, **{spelling: given}) for _ in range(2))
    assert again.cu_seqlens is first.cu_seqlens
    given[0] = torch.tensor([0, 1, 2, 3, 4]) if spelling == "position_ids" else torch.zeros(5)
    after = packing.resolve_packing("op", 1, 5, CPU, **{spelling: given})
    assert torch.unique_consecutive(after.cu_seqlens).tolist() == [0, 5]


def test_states_ask_for_other_offsets(packing, kernel):
    """Where states tell the number of sequences, offsets made for a call without any are not theirs."""
    labels = torch.tensor([[0, 0, 1, 1, 1]])
    with as_on_a_gpu(kernel):
        without = packing.resolve_packing("op", 1, 5, CPU, seq_idx=labels)
        packed = packing.resolve_packing("op", 1, 5, CPU, seq_idx=labels, has_states=True)
    assert without.num_sequences == 5 and packed.num_sequences == 2


# ---- what is written into a caller's offsets ----


def test_changed_offsets_are_read_again(packing, device):
    given = torch.tensor([0, 4, 10])
    made = check(packing, given)
    given[1] = 7
    assert check(packing, given).tolist() == [0, 7, 10] and made.tolist() == [0, 4, 10]


def test_changed_memory_is_read_again(packing):
    """An array shares the memory of a tensor, and PyTorch counts nothing that is written there."""
    array = np.array([0, 4, 10])
    given = torch.from_numpy(array)
    check(packing, given)
    array[1] = 7
    assert check(packing, given).tolist() == [0, 7, 10]
    array[1] = 12
    with pytest.raises(ValueError, match="must never decrease, got 10 after 12"):
        check(packing, given)


def test_malformed_offsets_stay_inside_the_row(packing, kernel):
    """On a GPU, whatever they say and whatever they said before."""
    given = torch.tensor([0, 4, 10])
    with as_on_a_gpu(kernel):
        check(packing, given)
        given.copy_(torch.tensor([3, 99, -5]))
        made = check(packing, given)
        assert made.tolist() == [0, 10, 10] and check(packing, given) is made


def test_changed_own_offsets_are_checked_again(packing):
    made = check(packing, torch.tensor([0, 4, 10]))
    made[1] = 12
    with pytest.raises(ValueError, match="must never decrease"):
        check(packing, made)


# ---- lists of work ----


@pytest.fixture
def work(kernel):
    return importlib.import_module(f"{kernel.__name__}._triton.work")


def test_lists_are_made_once_of_own_offsets(packing, work):
    own = check(packing, torch.tensor([0, 4, 10]))
    assert work.cut_into_blocks(own, 10, 4) is work.cut_into_blocks(own, 10, 4)
    assert work.cut_into_blocks(own, 10, 4) is not work.cut_into_blocks(own, 10, 4, padding=True)
    assert work.cut_into_blocks(own, 10, 4).items is not work.cut_into_blocks(own, 10, 8).items
    assert work.longest_first(own)[0] is work.longest_first(own)[0]


def test_lists_of_other_offsets_are_made_each_time(work):
    """Others may be written to where nothing counts it, by a compiled graph, say, which uses its memory again."""
    given = torch.tensor([0, 4, 10], dtype=torch.int32)
    assert work.cut_into_blocks(given, 10, 4) is not work.cut_into_blocks(given, 10, 4)
    given.data.copy_(torch.tensor([0, 9, 10]))
    assert work.longest_first(given)[0].tolist() == [0, 1]


# ---- lifetime ----


def test_nothing_outlives_the_offsets(packing, work, sharing):
    gc.collect()
    before = len(sharing._kept)
    given = torch.tensor([0, 4, 10])
    own = check(packing, given)
    items = weakref.ref(work.cut_into_blocks(own, 10, 4).items)
    labels = packing.seq_idx_from_cu_seqlens(own, 10)
    packing.tell_labels(labels, own)
    assert len(sharing._kept) == before + 3 and items() is not None
    del given, own, labels
    assert len(sharing._kept) == before and items() is None


def test_an_alias_has_lists_of_its_own(packing, work, sharing):
    """What a forward makes ends with it, also where the caller keeps the batch."""
    own = check(packing, torch.tensor([0, 4, 10]))
    alias = sharing.alias(own)
    assert check(packing, alias) is alias and alias.data_ptr() == own.data_ptr()
    items = weakref.ref(work.cut_into_blocks(alias, 10, 4).items)
    del alias
    assert items() is None


def test_a_callers_tensor_is_as_it_was(packing):
    """It is saved, copied and sent as before."""
    given = torch.tensor([0, 4, 10])
    size = len(pickle.dumps(given))
    check(packing, given)
    assert not vars(given) and len(pickle.dumps(given)) == size
    assert copy.deepcopy(given).tolist() == [0, 4, 10]


# ---- where nothing may be kept ----


def test_nothing_is_kept_of_tensors_without_values(packing, sharing):
    before = len(sharing._kept)
    with fake_cuda():
        given = fake(torch.tensor([0, 4, 10]))
        made = packing.check_cu_seqlens("op", given, 10, given.device)
        assert packing.check_cu_seqlens("op", given, 10, given.device) is not made
        assert len(sharing._kept) == before


def test_a_trace_is_good_for_other_offsets(kernel, packing):
    """The trace has the conversion, and not what it made of the offsets it was traced with."""
    with torch.no_grad(), as_on_a_gpu(kernel):
        given = torch.tensor([0, 4, 10])
        check(packing, given)
        traced = make_fx(lambda offsets: check(packing, offsets) + 0)(given)
    assert traced(torch.tensor([0, 7, 10])).tolist() == [0, 7, 10]


def test_nothing_of_a_transform_is_left_behind(packing):
    """What is made inside torch.func belongs to its level, which ends."""
    given = torch.tensor([0, 4, 10])

    def scaled(x):
        return (x * check(packing, given).sum()).sum()

    assert torch.func.grad(scaled)(torch.ones(2)).tolist() == [14, 14]
    assert check(packing, given).tolist() == [0, 4, 10]


def test_a_training_call_takes_nothing_of_inference(kernel):
    """A tensor made in inference mode cannot be saved for a backward pass."""
    x, weight = torch.randn(1, 3, 10, requires_grad=True), torch.randn(3, 4)
    labels, offsets = torch.tensor([[0] * 4 + [1] * 6]), torch.tensor([0, 4, 10])
    for cuts in (dict(seq_idx=labels), dict(cu_seqlens=offsets)):
        with torch.inference_mode():
            expected = kernel.causal_conv1d_fn(x.detach(), weight, **cuts)
        out = kernel.causal_conv1d_fn(x, weight, **cuts)
        out.sum().backward()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "change, is_shared",
    [({}, True), (dict(stream=7), False), (dict(captured=True), False), (dict(inference=True), False)],
    ids=["same", "another stream", "into a capture", "inference"],
)
def test_nothing_passes_to_another_place(kernel, packing, work, sharing, monkeypatch, change, is_shared):
    """Memory of one stream may not be written yet for another, and a graph's is written by its replays alone."""
    given = torch.tensor([0, 4, 10])
    here = sharing._Place(0, False, False)
    with as_on_a_gpu(kernel):
        monkeypatch.setattr(sharing, "_place", lambda tensor: here)
        own = check(packing, given)
        blocks = work.cut_into_blocks(own, 10, 4)
        monkeypatch.setattr(sharing, "_place", lambda tensor: here._replace(**change))
        assert (check(packing, given) is own) == is_shared
        assert (check(packing, own) is own) == is_shared
        assert (work.cut_into_blocks(own, 10, 4) is blocks) == is_shared


def test_a_capture_converts_a_callers_offsets_each_time(kernel, packing, work, sharing, monkeypatch):
    """The graph is replayed on what has been copied into them. What it makes itself is shared inside it."""
    given = torch.tensor([0, 4, 10])
    monkeypatch.setattr(sharing, "_place", lambda tensor: sharing._Place(7, True, False))
    with as_on_a_gpu(kernel):
        own = check(packing, given)
        assert check(packing, given) is not own and check(packing, own) is own
        assert work.cut_into_blocks(own, 10, 4) is work.cut_into_blocks(own, 10, 4)
        monkeypatch.setattr(sharing, "_place", lambda tensor: sharing._Place(7, False, False))
        assert check(packing, own) is not own


def test_threads_share(packing, device):
    """Replicas of a model run side by side on one batch."""
    given, made = torch.tensor([0, 4, 10]), []
    threads = [threading.Thread(target=lambda: made.append(check(packing, given).tolist())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [[0, 4, 10]] * 8
