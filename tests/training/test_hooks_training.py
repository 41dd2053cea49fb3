"""Packed training as users run it: Trainer, accumulation, checkpointing, mixed precision."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from tests.models.tiny_models import (
    SETTINGS,
    alone,
    assert_gradients_equal,
    assert_logits_equal,
    build,
    load,
    pack,
    run,
    samples,
)

pytestmark = pytest.mark.usefixtures("kernel")


class Stream(torch.utils.data.IterableDataset):
    """Samples of which nobody knows the number; Trainer's loader reads them in one process and dispatches them."""

    def __init__(self, features):
        self.features = features

    def __iter__(self):
        yield from self.features


def train(model, directory, lengths, steps, setting="seq_idx", dataset=list, **arguments):
    """Train ``model`` by Trainer on packs of ``lengths`` with plain SGD; returns it with the gradients of each step."""
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=steps, optim="sgd", learning_rate=1e-2, lr_scheduler_type="constant",
        max_grad_norm=0.0, report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
        seed=3, data_seed=3, dataloader_drop_last=False, **arguments,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=dataset(samples(lengths)),
        eval_dataset=samples(lengths, seed=2),
        data_collator=DataCollatorWithFlattening(**SETTINGS[setting]),
    )
    trainer.add_callback(recorder := GradientRecorder())
    trainer.train()
    return trainer, recorder.gradients


class GradientRecorder(TrainerCallback):
    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, *_, model=None, **__):
        self.gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def padded_batch(lengths):
    rows = [torch.tensor(sample["input_ids"]) for sample in samples(lengths)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "lfm2"])
def test_loss_and_gradients_equal_the_padded_batch_c41(model_type, tmp_path):
    """C41: two accumulated packs; the loss is the sum over 3 + 4 targets divided by 7, and so are the gradients."""
    stock = build(model_type, "eager").train()
    batch = padded_batch([4, 5])
    loss = torch.nn.functional.cross_entropy(
        stock(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    ) / 7  # fmt: skip
    loss.backward()

    one_pack = load(model_type).train()
    collated = DataCollatorWithFlattening()(samples([4, 5]), return_tensors="pt")
    packed_loss = one_pack(**collated).loss
    assert abs(packed_loss.item() - loss.item()) < 1e-5 * loss.item()

    trainer, gradients = train(
        load(model_type), tmp_path, [4, 5], 1, per_device_train_batch_size=1, gradient_accumulation_steps=2
    )
    assert abs(losses(trainer)[0] - loss.item()) < 1e-4 * loss.item()  # logged with four digits
    assert_gradients_equal(gradients[0], {name: parameter.grad for name, parameter in stock.named_parameters()})


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "lfm2", "bamba", "falcon_mamba"])
def test_trainer_with_checkpointing(model_type, tmp_path):
    """Trainer's three ways of checkpointing give the same gradients in each step, with evaluation in between."""
    results = {}
    for use_reentrant in (None, False, True):
        checkpointing = {}
        if use_reentrant is not None:
            checkpointing["gradient_checkpointing"] = True
            checkpointing["gradient_checkpointing_kwargs"] = {"use_reentrant": use_reentrant}
        _, results[use_reentrant] = train(
            load(model_type), tmp_path, [5, 9, 17, 3, 8, 2], 3, per_device_train_batch_size=3,
            eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2, **checkpointing,
        )  # fmt: skip
        assert len(results[use_reentrant]) == 3
    for use_reentrant in (False, True):
        for got, expected in zip(results[use_reentrant], results[None]):
            assert_gradients_equal(got, expected)


@pytest.mark.parametrize("model_type", ["llama", "lfm2", "mamba"])
def test_dispatched_batches(model_type, tmp_path):
    """accelerate cuts each tensor of a dispatched batch to its first rows: cu_seq_lens_q arrives as [0] and tells
    nothing; the positions or labels beside it are whole."""
    lengths = [5, 9, 17, 3, 4, 1, 8, 2]
    stock = build(model_type, "eager").train()
    targets = sum(lengths[:4]) - 4
    for sample in alone(lengths)[:4]:
        logits, ids = stock(**sample).logits[0, :-1], sample["input_ids"][0, 1:]
        (torch.nn.functional.cross_entropy(logits, ids, reduction="sum") / targets).backward()
    expected = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for setting in SETTINGS:
        _, gradients = train(load(model_type), tmp_path, lengths, 2, setting, Stream, per_device_train_batch_size=4)
        assert len(gradients) == 2
        assert_gradients_equal(gradients[0], expected)


def test_offsets_that_a_loader_cut_name_the_way_out(tmp_path):
    """Without positions and labels nothing says where samples end."""

    def collate(features):
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)(features)
        return {name: value for name, value in batch.items() if name != "labels"} | {"labels": batch["input_ids"]}

    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = Trainer(load("llama"), arguments, train_dataset=Stream(samples([5, 9])), data_collator=collate)
    with pytest.raises(ValueError, match="cu_seq_lens_q must .*dispatch_batches"):
        trainer.train()


def test_bfloat16_autocast():
    """Mixed precision: float32 weights, bfloat16 activations, float32 decay; close to the samples alone."""
    for model_type in ("llama", "qwen3_5_text", "lfm2"):
        model, stock = load(model_type).train(), build(model_type, "eager").train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, gradients = run(model, [pack(model_type, "seq_idx")])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, expected_gradients = run(stock, alone())
        exact, exact_gradients = run(build(model_type, "eager").train(), alone())
        # Both round; ours may be as far from the float32 run as twice what stock is.
        assert (logits - exact).norm() <= 2 * (expected - exact).norm()
        for name, gradient in exact_gradients.items():
            ours, theirs = (gradients[name] - gradient).norm(), (expected_gradients[name] - gradient).norm()
            assert ours <= 2 * theirs + 1e-2 * gradient.norm(), name


def test_context_is_left_after_an_error():
    """A forward that raises must not leave its boundaries behind for the next one."""
    model = load("lfm2").eval()
    with pytest.raises(IndexError):
        model(**{**pack(), "input_ids": torch.full((1, 35), 10_000)})
    with torch.no_grad():
        batch = alone()[2]
        assert_logits_equal(model(**batch).logits, build("lfm2", "eager").eval()(**batch).logits)
