"""What the processes of ranks share, because they are forked from the one that imports this."""

import torch

from tests.harness.kernel import load_kernel
from tests.models import tiny_models

# Threads would not live on in a forked process.
torch.set_num_threads(1)
load_kernel()
tiny_models.load("llama")
