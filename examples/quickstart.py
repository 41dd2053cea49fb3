"""One packed batch beside its samples alone, on a tiny model: the first block of README.md, which a test compares."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen3_5ForCausalLM, Qwen3_5TextConfig

# A tiny hybrid model (gated delta rule and attention) with random weights, saved as any model is.
path = tempfile.mkdtemp()
layer_types = ["linear_attention", "full_attention"]
config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, layer_types=layer_types)
Qwen3_5ForCausalLM(config).save_pretrained(path)

model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="org/packfree-kernels", allow_all_kernels=True)
collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)

samples = [{"input_ids": torch.randint(64, (length,)).tolist()} for length in (9, 4, 13)]
batch = collator(samples, return_tensors="pt")
packed = model(**batch).logits
alone = torch.cat([model(input_ids=torch.tensor([sample["input_ids"]])).logits for sample in samples], dim=1)
print(f"{batch['input_ids'].shape[1]} tokens in one row, at most {(packed - alone).abs().max():.1e} from alone")
