"""One long packed row, cut over two processes: FSDP2 shards the parameters, sequence_parallel the row.

    .venv/bin/python examples/sequence_parallel.py                       # a tiny hybrid model, some seconds on a CPU
    .venv/bin/python examples/sequence_parallel.py --model OWNER/NAME    # or the folder of a saved model
    .venv/bin/python examples/sequence_parallel.py --attn sdpa           # stock attention is refused by name

Each line is a loss as the two processes have it together, and the same of one process with the whole row.
"""

from shared import SCRATCH, arguments, finish, same, samples

# isort: split
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from kernels import get_kernel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

RANKS, STEPS, RATE = 2, 3, 1e-2
RESULTS = Path(SCRATCH.name, "losses.json")


def load(given):
    return AutoModelForCausalLM.from_pretrained(
        given.model, attn_implementation=given.attn, allow_all_kernels=True, dtype="float32"
    ).train()


def row(given):
    """Every process has the whole row; its token ids are small even where the row is long."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return collator(samples(given.model), return_tensors="pt")


def one_process(given):
    """The loss of each step, of the whole row in one process."""
    model, batch = load(given), row(given)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank, given):
    """One of the processes; under torchrun this is the whole script, and init_process_group needs no arguments."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{SCRATCH.name}/ranks", rank=rank, world_size=RANKS)
    packfree = get_kernel(given.kernel, version=1, trust_remote_code=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = load(given)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    # A group of its own: exchanges of layers and FSDP's collectives do not meet.
    group = dist.new_group(list(range(RANKS)))
    shard, losses = packfree.shard_batch(row(given), group), []
    for _ in range(STEPS):
        with packfree.sequence_parallel(group):
            loss = model(**shard).loss  # this rank's summand of the row's loss
        (loss * RANKS).backward()  # FSDP averages gradients over the ranks, and theirs add up
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    if rank == 0:
        RESULTS.write_text(json.dumps(losses))
    dist.destroy_process_group()


def main():
    given = arguments(__doc__)
    print(f"{given.attn}, {row(given)['input_ids'].shape[1]} tokens over {RANKS} processes")
    print(f"{'loss':<50}{'shards':>10}{'one process':>12}")
    try:
        torch.multiprocessing.start_processes(work, args=(given,), nprocs=RANKS, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        sys.exit(str(error).strip().splitlines()[-1])
    for step, (together, alone) in enumerate(zip(json.loads(RESULTS.read_text()), one_process(given))):
        same(f"step {step + 1}", together, alone)
    finish()


if __name__ == "__main__":
    main()
