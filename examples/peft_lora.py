"""LoRA on attention, linear attention and state space layers, trained packed: packed, alone and merged are the same.

    .venv/bin/python examples/peft_lora.py                          # a tiny model, some seconds on a CPU
    .venv/bin/python examples/peft_lora.py --model OWNER/NAME       # or the folder of a saved model
    .venv/bin/python examples/peft_lora.py --attn sdpa --positions    # stock transformers: exits with 1, samples mix

Losses are those that Trainer reports and those of the samples run one by one.
"""

from shared import SCRATCH, alone_loss, arguments, cut, finish, positions_only, same, samples, small

# isort: split
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

# Attention; gated delta rule; Mamba and short convolutions. PEFT refuses the out_proj of Mamba.
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj", "x_proj"}

given = arguments(__doc__)
model = AutoModelForCausalLM.from_pretrained(
    given.model, attn_implementation=given.attn, allow_all_kernels=True, dtype="float32"
)
targets = sorted(PROJECTIONS & {name.rpartition(".")[2] for name, _ in model.named_modules()}) or "all-linear"
adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))

data = samples(given.model)
collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
if given.positions:
    collator = positions_only(collator)
settings = TrainingArguments(
    output_dir=SCRATCH.name, per_device_train_batch_size=len(data), max_steps=5, learning_rate=1e-2, logging_steps=1,
    use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(adapted, settings, train_dataset=data, data_collator=collator)
trainer.remove_callback(PrinterCallback)

print(f"{model.config.model_type}, {given.attn}, LoRA on {targets}\n{'':<50}{'packed':>10}{'alone':>12}")
batch = collator(data, return_tensors="pt")
first = alone_loss(adapted, [batch])
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
same("loss of the first training step", losses[0], first)

adapted.eval()
with torch.no_grad():
    packed = adapted(**batch)
    alone = torch.cat([adapted(input_ids=sample["input_ids"]).logits for sample in cut(batch)], dim=1)
    same("loss after training", float(packed.loss), alone_loss(adapted, [batch]))
    small("largest logit difference, packed from alone", packed.logits - alone)
    merged = adapted.merge_and_unload()(**batch).logits
    small("largest logit difference, merged from not merged", merged - packed.logits)
finish()
