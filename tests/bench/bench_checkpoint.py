"""Stall, persist+commit and restore of one rank's state, against torch.save, dcp.save and
dcp.async_save: same process, same tensors, same disk, all made durable by fsync."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from pairs import Comparison, run_in_turn
from torch import nn

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.run.attempts import AdoptedStep
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec
from ftslurm.train.checkpointer import Checkpointer
from ftslurm.train.distributed import Groups
from ftslurm.train.save_facts import SaveFacts
from ftslurm.train.state import TrainState

# The comparison is with one process on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

NUM_PARAMETERS = 16
DEADLINE_S = 600.0
POSITION = {"epoch": 0, "samples": 0, "tokens": 0}


class Weights(nn.Module):
    """Parameters of which weights and AdamW's two moments make up the state."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        numel = size_bytes // (3 * 4 * NUM_PARAMETERS)
        self.tensors = nn.ParameterList(torch.randn(numel) for _ in range(NUM_PARAMETERS))


class Bench:
    """One state, saved and restored by each variant in turn."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self.model = Weights(size_bytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.layout = RunLayout(folder / "ours")
        self.layout.steps.mkdir(parents=True)
        self.step = 0
        self.attempt = 1
        self.saver = self._checkpointer()
        self._train()

    def variants(self) -> dict[str, Callable[[], dict[str, float]]]:
        return {
            "ftslurm": self.ours,
            "torch.save": self.torch_save,
            "dcp.save": self.dcp_save,
            "dcp.async_save": self.dcp_async_save,
        }

    def ours(self) -> dict[str, float]:
        self._train()
        began = time.perf_counter()
        self.saver.save(self.step, POSITION)
        stall_s = time.perf_counter() - began
        while self.saver.committed_step != self.step:
            time.sleep(0.001)
            self.saver.poll()
        save_s = time.perf_counter() - began
        self.saver.close(timeout_s=DEADLINE_S)
        return {"stall": stall_s, "save": save_s, "restore": self._timed_cold(self._restore)}

    def torch_save(self) -> dict[str, float]:
        self._train()
        path = self._fresh("torch") / "state.pt"
        began = time.perf_counter()
        torch.save(self._state(), path)
        for place in (path, path.parent):
            descriptor = os.open(place, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        save_s = time.perf_counter() - began

        def restore() -> None:
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

        return {"stall": save_s, "save": save_s, "restore": self._timed_cold(restore)}

    def dcp_save(self) -> dict[str, float]:
        self._train()
        path = self._fresh("dcp")
        began = time.perf_counter()
        dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        save_s = time.perf_counter() - began
        return {"stall": save_s, "save": save_s, "restore": self._dcp_restore(path)}

    def dcp_async_save(self) -> dict[str, float]:
        self._train()
        path = self._fresh("dcp-async")
        began = time.perf_counter()
        saved = dcp.async_save(self._state(), storage_writer=dcp.FileSystemWriter(path))
        stall_s = time.perf_counter() - began
        getattr(saved, "upload_completion", saved).result()
        save_s = time.perf_counter() - began
        return {"stall": stall_s, "save": save_s, "restore": self._dcp_restore(path)}

    def _dcp_restore(self, path: Path) -> float:
        def restore() -> None:
            state = self._state()
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
            self.optimizer.load_state_dict(state["optimizer"])

        return self._timed_cold(restore)

    def _restore(self) -> None:
        self.attempt += 1
        newest = CheckpointStore(self.layout).published()[0]
        restored = self._checkpointer().restore([AdoptedStep(newest.step, newest.committed_digest)])
        assert restored is not None and restored.step == self.step

    def _checkpointer(self) -> Checkpointer:
        return Checkpointer(
            layout=self.layout,
            spec=CheckpointSpec(keep_last=1),
            facts=SaveFacts("bench", 1, {"dp": 1}, 1, 0, torch.__version__, *[None] * 5),
            groups=Groups(0, 1, 0, torch.device("cpu"), None, None, None),  # type: ignore[arg-type]
            state=TrainState(self.model, self.optimizer),
            attempt=self.attempt,
            on_event=_fail_loudly,
        )

    def _train(self) -> None:
        """A step that changes every byte of the state."""
        self.step += 1
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3 * self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _fresh(self, name: str) -> Path:
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    @staticmethod
    def _timed_cold(restore: Callable[[], None]) -> float:
        """Seconds to read it all back, from the disk where we may empty the page cache."""
        os.sync()
        if os.geteuid() == 0:
            Path("/proc/sys/vm/drop_caches").write_text("3")
        began = time.perf_counter()
        restore()
        return time.perf_counter() - began


def _fail_loudly(kind: str, facts: dict[str, object]) -> None:
    assert kind not in ("save_failed", "save_abandoned", "rejected"), (kind, facts)


def measure(
    folder: Path, *, size_bytes: int, rounds: int, progress: Callable[[str], None]
) -> list[Comparison]:
    """The table's lines. The first save of each variant (arena, page faults) is not counted."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )  # async_save asks for a CPU backend
    try:
        bench = Bench(folder, size_bytes)
        run_in_turn(bench.variants(), rounds=1, progress=lambda _: progress("warming up"))
        found = run_in_turn(bench.variants(), rounds=rounds, progress=progress)
    finally:
        torch.distributed.destroy_process_group()
    named = {"stall": "stall of the step", "save": "persist + commit", "restore": "restore"}
    return [
        Comparison(words, theirs, found["ftslurm"][figure], found[theirs][figure])
        for figure, words in named.items()
        for theirs in ("torch.save", "dcp.save", "dcp.async_save")
        if not (figure == "restore" and theirs == "dcp.async_save")
    ]
