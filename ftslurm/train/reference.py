"""The reference loop: a small GPT on a token store, for DDP and FSDP2, gloo and NCCL alike.

Gradients are those of the mean loss over all tokens of the global batch, however it is cut into
ranks and micro-batches. Evaluation reads sequences that are never trained on and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from ftslurm.errors import SpecError
from ftslurm.replay.trace import read_trace
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import OptimSpec
from ftslurm.train.cursor import plan_batch
from ftslurm.train.gpt import GPT
from ftslurm.train.loader import MicroBatch, cut_micro_batches
from ftslurm.train.parallel import clip_gradients, gradient_sync, unwrap
from ftslurm.train.schedule import scaled, warm_up_cosine
from ftslurm.train.session import Session
from ftslurm.train.token_store import TokenStore

SCALE = "scale"
"""recovery.elastic_lr: the rate follows the number of ranks."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Parts:
    """What the loop works with."""

    store: TokenStore
    held_out: int
    """Sequences at the store's end kept for evaluation."""
    model: torch.nn.Module
    optimizer: torch.optim.AdamW
    scheduler: LambdaLR
    scaler: ShardedGradScaler
    batches: Iterator[list[MicroBatch]]


@dataclass(frozen=True)
class Update:
    """What one optimizer step showed, the same on every rank."""

    loss: float
    """Mean over the tokens of the global batch."""
    tokens: int
    grad_norm: float
    """Before clipping."""


def train(session: Session) -> float | None:
    """`spec.entry`'s default. Its value is the evaluation where the run ends with one, else the
    loss of the last step."""
    parts = assemble(session)
    session.restore(warm_up=lambda: _warm_up(session, parts))
    spec = session.spec
    value: float | None = None
    if spec.recovery.elastic_lr == SCALE:
        use_rate_of_this_size(parts.scheduler)
    for step in session.steps():
        lr = float(parts.scheduler.get_last_lr()[0])
        update = apply_update(session, parts, next(parts.batches))
        values: dict[str, float] = {"lr": lr, "grad_norm": update.grad_norm}
        if parts.scaler.is_enabled():
            values["loss_scale"] = parts.scaler.get_scale()
        if spec.eval_interval_steps and (step + 1) % spec.eval_interval_steps == 0:
            with session.evaluating():
                values["eval_loss"] = evaluate(session, parts)
        value = values.get("eval_loss", update.loss)
        session.end_step(loss=update.loss, tokens=update.tokens, values=values)
    return _value_again(session, parts) if value is None else value


def _value_again(session: Session, parts: Parts) -> float | None:
    """For an attempt that has restored the last step and has none left to train. Collective."""
    every = session.spec.eval_interval_steps
    if every and session.step and session.step % every == 0:
        with session.evaluating():
            return evaluate(session, parts)
    last = read_trace(RunLayout(session.run_dir)).get(session.step)
    return None if last is None else last.loss


def assemble(session: Session) -> Parts:
    """Build everything from the spec and register it."""
    spec = session.spec
    if session.data_path is None:
        raise SpecError("data.path is not set; name a token store made by `ftslurm data build`")
    store = TokenStore(session.data_path, spec.model.context)
    held_out = spec.eval_batches * spec.optim.global_batch_size if spec.eval_interval_steps else 0
    model = session.wrap(GPT(spec.model, vocab_size=store.vocab_size))
    optimizer = _build_optimizer(model, spec.optim)
    factor = warm_up_cosine(
        warmup_steps=spec.optim.warmup_steps, steps=spec.steps, min_ratio=spec.optim.min_lr_ratio
    )
    if spec.recovery.elastic_lr == SCALE:
        factor = scaled(factor, by=session.world_size / spec.world_size)
    scheduler = LambdaLR(optimizer, factor)
    # Not GradScaler: it looks at a rank's own shards only, and one rank would skip a step that
    # the others take.
    scaler = ShardedGradScaler(session.device.type, enabled=spec.optim.precision == "fp16")
    session.register(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler if scaler.is_enabled() else None,
    )
    batches = session.batches(store, held_out=held_out)
    return Parts(store, held_out, model, optimizer, scheduler, scaler, batches)


def use_rate_of_this_size(scheduler: LambdaLR) -> None:
    """The restored rate is that of the attempt that saved, which may have had more ranks or fewer;
    the factors of a LambdaLR are no part of its state."""
    groups = scheduler.optimizer.param_groups
    for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas):
        group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in groups]


def apply_update(session: Session, parts: Parts, micro_batches: Sequence[MicroBatch]) -> Update:
    """One optimizer step over the global batch. Collective."""
    spec = session.spec.optim
    (tokens,) = session.sum(float(sum(batch.weights.sum() for batch in micro_batches)))
    loss_sum = torch.zeros((), dtype=torch.float64, device=session.device)
    for number, batch in enumerate(micro_batches, start=1):
        with gradient_sync(parts.model, wanted=number == len(micro_batches)):
            loss = weighted_loss(session, parts.model, batch)
            # DDP and FSDP2 average over ranks; the world size makes a sum of it.
            scaled = parts.scaler.scale(loss * (session.world_size / tokens))
            scaled.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach()
    parts.scaler.unscale_(parts.optimizer)
    grad_norm = clip_gradients(parts.model, spec.clip_norm)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.optimizer.zero_grad(set_to_none=True)
    parts.scheduler.step()
    (total,) = session.sum(float(loss_sum))
    return Update(loss=total / tokens, tokens=int(tokens), grad_norm=grad_norm)


def weighted_loss(session: Session, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Sum over tokens of weight times cross entropy, in fp32."""
    device = session.device
    with _autocast(session):
        logits = model(batch.inputs.to(device))
    each = functional.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.to(device).flatten(), reduction="none"
    )
    return (each * batch.weights.to(device).flatten()).sum()


@torch.no_grad()
def evaluate(session: Session, parts: Parts) -> float:
    """Mean loss over the held-out sequences. Collective; draws no random number."""
    spec = session.spec
    optim = spec.optim
    plan = plan_batch(
        optim.global_batch_size, session.rank, session.world_size, optim.micro_batch_size
    )
    model = unwrap(parts.model)
    model.eval()
    loss_sum = weight_sum = 0.0
    first = len(parts.store) - parts.held_out
    for start in range(first, len(parts.store), optim.global_batch_size):
        rows = parts.store.read(range(start + plan.start, start + plan.stop))
        for batch in cut_micro_batches(rows, plan):
            loss_sum += float(weighted_loss(session, model, batch))
            weight_sum += float(batch.weights.sum())
    model.train()
    loss_sum, weight_sum = session.sum(loss_sum, weight_sum)
    return loss_sum / weight_sum


def _warm_up(session: Session, parts: Parts) -> None:
    ids = torch.zeros(1, session.spec.model.context, dtype=torch.int64)
    batch = MicroBatch(ids, ids, torch.ones(ids.shape))
    weighted_loss(session, parts.model, batch).backward()  # type: ignore[no-untyped-call]


def _build_optimizer(model: torch.nn.Module, spec: OptimSpec) -> torch.optim.AdamW:
    """Weight decay on matrices; not on biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2))


def _autocast(session: Session) -> contextlib.AbstractContextManager[object]:
    precision = session.spec.optim.precision
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(session.device.type, dtype=_DTYPES[precision])
