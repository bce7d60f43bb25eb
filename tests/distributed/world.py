"""Run a function in N ranks over gloo on loopback, and get back what each rank returned.

Ranks are forked from a server process that has imported torch already, so a world costs tenths of a second
instead of N imports on two cores. Still, tests put many checks into one world.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.pipelining", "tests.distributed.world"]


class RankError(AssertionError):
    """A rank failed; the message holds the traceback of the first one that did."""


def run(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """Call `function(*arguments)` in each of `ranks` processes of one gloo process group.

    Args:
        ranks: number of processes.
        function: a function of an importable module; what it returns must be loadable by `torch.load`.
        arguments: whatever `torch.save` takes.
        timeout: seconds until the world is given up.

    Returns:
        what the ranks returned, by rank.

    Raises:
        RankError: a rank raised, died or took too long; the others are killed.
    """
    import torch

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.save(arguments, directory / "arguments.pt")
        processes = [
            context.Process(target=_rank, args=(rank, ranks, directory, function), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        _wait(processes, directory, timeout)
        return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _wait(processes: list[BaseProcess], directory: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    try:
        while any(process.exitcode is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.exitcode]
            if failed or time.monotonic() > deadline:
                raise RankError(_first_traceback(directory) or f"ranks {failed or 'timed out'}, no traceback")
            time.sleep(0.01)
        if any(process.exitcode for process in processes):
            raise RankError(_first_traceback(directory) or "a rank died without a traceback")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _first_traceback(directory: Path) -> str:
    time.sleep(0.2)
    errors = sorted(directory.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return errors[0].read_text() if errors else ""


def _rank(rank: int, ranks: int, directory: Path, function: Callable[..., Any]) -> None:
    """Body of a rank: join, call the function, save its result; leave without draining on an error."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        if ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks
            )
        arguments = torch.load(directory / "arguments.pt", weights_only=False)
        torch.save(function(*arguments), directory / f"{rank}.pt")
        if ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (directory / f".{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        (directory / f".{rank}").rename(directory / f"{rank}.error")
        os._exit(1)
