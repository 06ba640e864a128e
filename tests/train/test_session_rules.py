"""The decisions of a rank, without ranks: when to stop and save, what an error means, the parts."""

import math
import signal
import socket
from pathlib import Path

import pytest

from ftslurm.errors import CheckpointError, DataError, RunError, SpecError, UsageError
from ftslurm.run.attempts import read_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ModelSpec

pytestmark = pytest.mark.torch


class Landed:
    def __init__(self, values: list[int]) -> None:
        self._values = values

    def result(self) -> list[int]:
        return self._values


def boundaries(words: list[list[tuple[int, bool]]]) -> list[list[tuple[int, bool]]]:
    """What each rank is told at each boundary, when rank r says words[boundary][r]."""
    from ftslurm.train.stop import Agreement, Word, encode

    reductions = [[max(column) for column in zip(*map(encode, said))]
                  for said in ([Word(*word) for word in row] for row in words)]  # fmt: skip
    at = iter([])
    told = []
    ranks = []
    for _ in words[0]:
        at = iter(reductions)
        ranks.append(Agreement(lambda _, at=at: Landed(next(at))))
    for row in words:
        heard = [rank.at_boundary(Word(*word)) for rank, word in zip(ranks, row)]
        told.append([(word.stop_signal, word.save_due) for word in heard])
    return told


def test_all_ranks_stop_at_the_boundary_after_the_one_that_carried_the_flag() -> None:
    quiet, usr1 = (0, False), (signal.SIGUSR1, False)
    told = boundaries([[quiet, quiet], [quiet, usr1], [quiet, usr1]])
    assert told == [[quiet, quiet], [quiet, quiet], [usr1, usr1]]


def test_term_on_one_rank_and_usr1_on_another_are_one_stop() -> None:
    told = boundaries([[(signal.SIGUSR1, False), (signal.SIGTERM, False)], [(0, False)] * 2])
    assert told[1] == [(signal.SIGTERM, False)] * 2


def test_the_clock_of_rank_0_makes_all_ranks_save() -> None:
    told = boundaries([[(0, True), (0, False)], [(0, False)] * 2])
    assert told[1] == [(0, True)] * 2


@pytest.mark.parametrize(
    ("step", "interval_steps", "asked", "saved_step", "due"),
    [
        (10, 5, False, None, True),
        (11, 5, False, None, False),
        (11, 5, True, None, True),
        (10, 0, False, None, False),
        (11, 5, True, 9, True),
        (11, 5, True, 10, False),
        (10, 5, True, 9, True),
    ],
)
def test_a_save_is_due_by_steps_or_by_the_clock_but_not_by_a_word_said_before_the_last(
    step: int, interval_steps: int, asked: bool, saved_step: int | None, due: bool
) -> None:
    from ftslurm.train.stop import save_is_due

    answer = save_is_due(step, interval_steps=interval_steps, asked=asked, saved_step=saved_step)
    assert answer is due


def test_the_longest_wait_of_any_rank_since_the_signal_is_agreed_on() -> None:
    from ftslurm.train.stop import Word, decode, encode

    said = [Word(signal.SIGUSR1, waited_ms=1500), Word(), Word(signal.SIGTERM, waited_ms=200)]
    agreed = decode([max(column) for column in zip(*map(encode, said))])
    assert agreed == Word(signal.SIGTERM, save_due=False, waited_ms=1500)


def test_a_rank_says_how_long_ago_its_signal_came() -> None:
    from ftslurm.run.rank import StopFlag
    from ftslurm.train.stop import Speaker, Word

    flag = StopFlag()
    clock = [50.0]
    speaker = Speaker(
        flag, is_first=False, interval_s=lambda: 1, stop_at=0.0, clock=lambda: clock[0]
    )
    assert speaker.word() == Word()
    flag.signalled_at, flag.signal_number = 50.0, signal.SIGUSR1
    clock[0] = 57.25
    assert speaker.word() == Word(signal.SIGUSR1, save_due=False, waited_ms=7250)


def test_rank_0_stops_by_the_clock_when_no_warning_came() -> None:
    from ftslurm.run.rank import StopFlag
    from ftslurm.train.stop import Speaker, Word

    now = [999.5]
    first, other = (
        Speaker(
            StopFlag(), is_first=is_first, interval_s=lambda: 0, stop_at=1000.0, now=lambda: now[0]
        )
        for is_first in (True, False)
    )
    assert first.word() == Word()
    now[0] = 1002.0
    assert first.word() == Word(signal.SIGALRM, waited_ms=2000)
    assert other.word() == Word()


def test_the_clock_of_rank_0_counts_from_the_last_save() -> None:
    from ftslurm.run.rank import StopFlag
    from ftslurm.train.stop import Speaker

    clock = [0.0]
    speaker = Speaker(
        StopFlag(), is_first=True, interval_s=lambda: 10, stop_at=None, clock=lambda: clock[0]
    )
    clock[0] = 9.0
    assert not speaker.word().save_due
    clock[0] = 10.0
    assert speaker.word().save_due
    speaker.saved()
    assert not speaker.word().save_due


@pytest.mark.parametrize(
    ("error", "is_restoring", "has_trained", "hopeless"),
    [
        (SpecError("x"), False, False, True),
        (UsageError("x"), False, True, True),
        (DataError("another snapshot"), False, False, True),
        (DataError("cannot read, at step 90000"), False, True, False),
        (CheckpointError("nothing restorable"), True, False, True),
        (CheckpointError("three saves failed"), False, True, False),
        (RunError("the file system failed"), True, False, False),
        (RuntimeError("CUDA error"), True, False, False),
        (OSError(5, "Input/output error"), False, False, False),
    ],
)
def test_only_an_error_that_would_come_again_forbids_a_retry(
    error: BaseException, is_restoring: bool, has_trained: bool, hopeless: bool
) -> None:
    from ftslurm.train.entry import is_hopeless

    assert is_hopeless(error, is_restoring=is_restoring, has_trained=has_trained) is hopeless


def test_the_echo_of_a_dead_peer_is_named_so_and_keeps_its_cause() -> None:
    from ftslurm.train.entry import PeerLost, named

    gloo = RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]")
    echo = named(gloo, rank=3)
    assert isinstance(echo, PeerLost) and echo.__cause__ is gloo
    own = RuntimeError("shape mismatch")
    assert named(own, rank=3) is own


@pytest.mark.parametrize("dotted", ["no.such.module:train", "ftslurm.faults:no_such_function"])
def test_an_entry_that_is_not_there_is_a_configuration_error(dotted: str) -> None:
    from ftslurm.train.entry import load_entry

    with pytest.raises(SpecError, match="cannot be loaded"):
        load_entry(dotted)


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error() -> None:
    from ftslurm.train.distributed import choose_backend

    assert choose_backend("auto", asked_for_gpus=False, has_cuda=True) == "gloo"
    assert choose_backend("auto", asked_for_gpus=True, has_cuda=True) == "nccl"
    assert choose_backend("gloo", asked_for_gpus=True, has_cuda=False) == "gloo"
    for asked, asked_for_gpus in (("auto", True), ("nccl", False)):
        with pytest.raises(SpecError, match="need a GPU"):
            choose_backend(asked, asked_for_gpus=asked_for_gpus, has_cuda=False)


def test_a_gpu_asked_for_by_an_option_of_sbatch_is_no_reason_to_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ftslurm.run.spec import ClusterSpec, RunSpec
    from ftslurm.train.distributed import open_groups

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = RunSpec(cluster=ClusterSpec(sbatch=["--exclusive", "--gres=gpu:h100:4"]))
    with pytest.raises(SpecError, match="GPUs asked for need a GPU"):
        open_groups(None, spec, run_id="run")  # type: ignore[arg-type]


def test_a_rank_waits_for_the_others_saves_as_long_as_a_save_may_take() -> None:
    from ftslurm.run.spec import RunSpec
    from ftslurm.train.distributed import longest_s

    spec = RunSpec()
    spec.recovery.phase_limit_s.update(saving=7200.0, restoring=60.0)
    assert longest_s(spec, "saving") == longest_s(spec, "restoring", "saving") == 7200.0
    assert longest_s(spec, "restoring") == 1800.0
    spec.recovery.phase_limit_s.update(saving=0.0)
    assert longest_s(spec, "restoring", "saving") > 86400.0


def test_rank_0_waits_for_a_port_that_is_still_in_use_and_then_says_so() -> None:
    from ftslurm.train.distributed import listen, retry_bind

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        slept: list[float] = []

        def bind() -> socket.socket:
            return listen("127.0.0.1", port)

        with pytest.raises(OSError, match="in use"):
            retry_bind(bind, patience_s=1.0, now=lambda: 0.4 * len(slept), sleep=slept.append)
        assert len(slept) == 3
    retry_bind(bind, patience_s=1.0).close()


def test_rank_0_listens_on_the_address_it_was_given_and_on_all_for_a_name() -> None:
    from ftslurm.train.distributed import listen

    with listen("127.0.0.1", 0) as one, listen("localhost", 0) as every:
        assert one.getsockname()[0] == "127.0.0.1"
        assert every.getsockname()[0] in ("::", "0.0.0.0")
        port = every.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", one.getsockname()[1]), timeout=5)


def test_the_interface_that_leads_to_this_host_is_the_loopback() -> None:
    from ftslurm.train.interface import interface_towards

    assert interface_towards("127.0.0.1", 9) == ("lo", "127.0.0.1")
    with pytest.raises(RunError, match="GLOO_SOCKET_IFNAME"):
        interface_towards("no-such-host.invalid", 9)


def test_the_rate_warms_up_then_falls_to_its_least() -> None:
    from ftslurm.train.schedule import warm_up_cosine

    factor = warm_up_cosine(warmup_steps=4, steps=20, min_ratio=0.1)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    falling = [factor(step) for step in range(4, 21)]
    assert falling == sorted(falling, reverse=True) and falling[0] == 1.0
    assert factor(20) == factor(99) == 0.1
    assert math.isclose(factor(12), 0.55)
    assert warm_up_cosine(warmup_steps=0, steps=5, min_ratio=0.0)(0) == 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_sees_the_past_only_and_ties_its_embeddings_if_asked(tied: bool) -> None:
    import torch

    from ftslurm.train.gpt import GPT

    spec = ModelSpec(layers=2, heads=2, width=16, context=8, dropout=0.0, tied_embeddings=tied)
    model = GPT(spec, vocab_size=11)
    ids = torch.arange(16).view(2, 8) % 11
    logits = model(ids)
    assert logits.shape == (2, 8, 11)
    changed = ids.clone()
    changed[:, 5] = 0
    assert torch.equal(model(changed)[:, :5], logits[:, :5])
    assert not torch.equal(model(changed)[:, 5:], logits[:, 5:])
    assert (model.head.weight is model.tokens.weight) is tied
    with pytest.raises(DataError, match=r"model\.context 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_a_warm_up_leaves_no_trace() -> None:
    import torch
    from torch import nn

    from ftslurm.train.parallel import warm_up

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    warm_up(model, lambda: model(torch.randn(8, 4)).sum().backward())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_warm_up_leaves_no_trace_in_buffers_that_the_forward_replaces() -> None:
    import torch
    from torch import nn

    from ftslurm.train.parallel import warm_up

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("table", torch.zeros(0, 3))
            self.register_buffer("first", None)
            self.register_buffer("shared", torch.zeros(()).expand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.table = torch.zeros(len(x), 3)
            self.first = x[0]
            self.shared[0] += 1
            return self.inner(x)

    model = Mean()
    mean, shared = model.mean, model.shared
    warm_up(model, lambda: model(torch.ones(8, 4)).sum().backward())
    assert model.mean is mean and not mean.any()
    assert model.shared is shared and not shared.any()
    assert model.table.numel() == 0 and model.first is None


def test_a_contradicting_environment_is_refused_not_overwritten() -> None:
    from ftslurm.replay.determinism import prepare_environment

    environ: dict[str, str] = {"NCCL_ALGO": "Tree"}
    with pytest.raises(SpecError, match="NCCL_ALGO is `Tree`"):
        prepare_environment(environ)
    assert environ["NCCL_ALGO"] == "Tree"
    clean: dict[str, str] = {}
    prepare_environment(clean)
    assert clean == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def test_seeds_differ_by_stream_and_repeat_by_stream() -> None:
    import random

    import numpy
    import torch

    from ftslurm.replay.determinism import seed_all

    def draw(seed: int, stream: str) -> tuple[float, float, float]:
        seed_all(seed, stream=stream)
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    assert draw(1, "a") == draw(1, "a")
    assert len({draw(1, "a"), draw(1, "b"), draw(2, "a"), draw(2, "b")}) == 4


def test_a_digest_tells_one_bit_and_one_name() -> None:
    import torch
    from torch import nn

    from ftslurm.replay.determinism import parameter_digest

    model = nn.Linear(3, 2)
    digest = parameter_digest(model)
    assert parameter_digest(model) == digest
    with torch.no_grad():
        model.weight.view(torch.int32)[0, 0] ^= 1
    assert parameter_digest(model) != digest


def test_progress_is_written_about_once_a_second(tmp_path: Path) -> None:
    from ftslurm.train.progress import Recorder

    layout = RunLayout(tmp_path)
    layout.attempt(1).root.mkdir(parents=True)
    clock = [0.0]
    recorder = Recorder(
        layout, attempt=1, steps=9, log_interval_steps=10, now=lambda: 5.0, clock=lambda: clock[0]
    )
    recorder.begin(step=2, tokens=100, restored_step=2)

    def step(number: int, at: float, tokens: int, loss: float = 1.0) -> int:
        clock[0] = at
        recorder.step(
            number, loss=loss, samples=0, tokens=tokens, values={}, committed_step=2, failed_saves=0
        )
        progress = read_progress(layout.attempt(1))
        assert progress is not None
        return progress.step

    assert step(3, 0.6, 150) == 2
    assert step(4, 2.0, 300, math.nan) == 4
    progress = read_progress(layout.attempt(1))
    assert progress is not None
    assert progress.tokens_per_s == 100.0 and progress.loss is None and progress.restored_step == 2
    assert step(5, 2.5, 400) == 4
    recorder.close()
