"""TRL's SFTTrainer, which packs by itself: the losses that it reports are those of the samples run one by one.

    .venv/bin/python examples/trl_sft.py                            # a tiny model, some seconds on a CPU
    .venv/bin/python examples/trl_sft.py --model OWNER/NAME         # or the folder of a saved model
    .venv/bin/python examples/trl_sft.py --attn sdpa --positions    # stock transformers: exits with 1, samples mix

Three ways to pack: rows filled with whole samples (bfd), filled to the end with samples cut in pieces (bfd_split; a
piece is a sample of its own), and each batch as one row (padding_free). "wrapped" tells no boundaries: do not use it.
"""

from shared import SCRATCH, TEXTS, alone_loss, arguments, finish, positions_only, same

# isort: split
from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

WAYS = {
    "bfd": dict(packing=True, max_length=24),
    "bfd_split": dict(packing=True, packing_strategy="bfd_split", max_length=12),
    "padding_free": dict(padding_free=True, max_length=None),
}

given = arguments(__doc__)
disable_progress_bars()
train = Dataset.from_list([{"text": text} for text in TEXTS[:8]])
held_out = Dataset.from_list([{"text": text} for text in TEXTS[8:]])
print(f"{given.attn}\n{'loss':<50}{'packed':>10}{'alone':>12}")
for way, options in WAYS.items():
    settings = SFTConfig(
        output_dir=SCRATCH.name,
        model_init_kwargs=dict(attn_implementation=given.attn, allow_all_kernels=True, dtype="float32"),
        per_device_train_batch_size=64,  # rows; here all of them in each step
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,  # leave it and bf16 out on a GPU
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = SFTTrainer(given.model, args=settings, train_dataset=train, eval_dataset=held_out)
    trainer.remove_callback(PrinterCallback)
    if given.positions:
        trainer.data_collator = positions_only(trainer.data_collator)
    model = trainer.model
    first = alone_loss(model, trainer.get_train_dataloader())
    trainer.train()
    same(f"{way}: first step", next(row["loss"] for row in trainer.state.log_history if "loss" in row), first)
    alone = alone_loss(model, trainer.get_eval_dataloader())
    same(f"{way}: evaluation after training", trainer.evaluate()["eval_loss"], alone)
finish()
