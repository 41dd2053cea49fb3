"""Where does a packed row leak from sample to sample? The report of a model as transformers has it, and hooked.

    .venv/bin/python examples/leak_report.py                        # a tiny model, some seconds on a CPU
    .venv/bin/python examples/leak_report.py --model OWNER/NAME     # or the folder of a saved model

Exits with 1 where the hooked model leaks. Without a line of code: python build/VARIANT/leak_report MODEL
"""

import sys

from shared import arguments, samples

# isort: split
from kernels import get_kernel
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

given = arguments(__doc__)
packfree = get_kernel(given.kernel, version=1, trust_remote_code=True)
# The positions alone, as many data pipelines have it: the hardest setting for what is not hooked.
batch = DataCollatorWithFlattening()(samples(given.model), return_tensors="pt")

packfree.remove_hooks()
stock = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation="sdpa", dtype="float32")
print(packfree.leak_report(stock, batch), end="\n\n")

packfree.install_hooks()
hooked = AutoModelForCausalLM.from_pretrained(
    given.model, attn_implementation=given.attn, allow_all_kernels=True, dtype="float32"
)
report = packfree.leak_report(hooked, batch)
print(report)
# report.save("report.png") draws it: one bar a layer.
if not report.packed_equals_alone:
    sys.exit(report.sentence)
