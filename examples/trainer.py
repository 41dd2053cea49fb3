"""Trainer on packed batches: the losses that it reports are those of the samples run one by one.

    .venv/bin/python examples/trainer.py                            # a tiny model, some seconds on a CPU
    .venv/bin/python examples/trainer.py --model OWNER/NAME         # or the folder of a saved model
    .venv/bin/python examples/trainer.py --attn sdpa --positions    # stock transformers: exits with 1, samples mix

Each line is a loss as Trainer has it from packed rows, and the same of the samples alone.
"""

from shared import SCRATCH, alone_loss, arguments, finish, positions_only, same, samples

# isort: split
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

given = arguments(__doc__)
# The one string, and a collator that puts the samples of a batch into one row: nothing else is needed.
model = AutoModelForCausalLM.from_pretrained(
    given.model, attn_implementation=given.attn, allow_all_kernels=True, dtype="float32"
)
collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
if given.positions:
    collator = positions_only(collator)

data = samples(given.model)
train, held_out = data[:8], data[8:]
settings = TrainingArguments(
    output_dir=SCRATCH.name,
    per_device_train_batch_size=len(train),  # samples in a row
    per_device_eval_batch_size=2,
    max_steps=5,
    learning_rate=1e-3,
    logging_steps=1,
    use_cpu=True,  # leave it out on a GPU
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, settings, train_dataset=train, eval_dataset=held_out, data_collator=collator)
trainer.remove_callback(PrinterCallback)

print(f"{model.config.model_type}, {given.attn}\n{'loss':<50}{'packed':>10}{'alone':>12}")
first = alone_loss(model, [collator(train, return_tensors="pt")])
same("evaluation before training", trainer.evaluate()["eval_loss"], alone_loss(model, trainer.get_eval_dataloader()))
trainer.train()
same("first training step", next(row["loss"] for row in trainer.state.log_history if "loss" in row), first)
same("evaluation after training", trainer.evaluate()["eval_loss"], alone_loss(model, trainer.get_eval_dataloader()))
finish()
