"""Four processes of gloo, started once, in which tests run functions."""

import multiprocessing
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS = 4
TIMEOUT = 20  # seconds after which a message that does not come is an error


class Ranks:
    """``run(function, *arguments, ranks=n)`` calls ``function(group, *arguments)`` on the first n of four processes."""

    def __init__(self, folder):
        # Four processes that are forked from one which has imported everything once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.context_parallel.preload"])
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(folder), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(300), "a process did not start"
            assert pipe.recv() == "ready"

    def outcomes(self, function, *arguments, ranks=RANKS):
        """What each rank returned, or the text of its error."""
        for pipe in self.pipes[:ranks]:
            pipe.send((function, arguments, ranks))
        answers = []
        for pipe in self.pipes[:ranks]:
            assert pipe.poll(10 * TIMEOUT), "a rank hangs"
            answers.append(pipe.recv())
        return answers

    def run(self, function, *arguments, ranks=RANKS):
        answers = self.outcomes(function, *arguments, ranks=ranks)
        failed = [f"rank {rank}:\n{text}" for rank, (well, text) in enumerate(answers) if not well]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)


def _serve(rank, folder, pipe):
    torch.set_num_threads(1)
    from tests.harness.kernel import load_kernel

    load_kernel()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    groups = {}
    for count in range(1, RANKS + 1):
        groups[count] = dist.new_group(list(range(count)), timeout=timedelta(seconds=TIMEOUT))
    pipe.send("ready")
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, arguments, count = task
        try:
            pipe.send((True, function(groups[count], *arguments)))
        except BaseException as error:  # noqa: B036  the test's process shows it
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    sys.stdout.flush()
    os._exit(0)  # groups whose other ranks have failed would wait at their end
