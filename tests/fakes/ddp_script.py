"""A DDP script as people write them for torchrun, made resumable by ftslurm's three lines.

script.py STEPS STEP_S

A step takes STEP_S until the script has been started three times, and no time from then on.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftslurm

RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def save(state, model, optimizer, step):
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(saved, state.with_suffix(".new"))
    state.with_suffix(".new").replace(state)
    print(f"saved {step}", flush=True)


def main(steps, step_s):
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method="env://")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = ftslurm.resume_dir(default=".") / "state.pt"
    step = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print(f"rank {dist.get_rank()} begins at {step}", flush=True)
    stops = torch.zeros(1)
    while step < steps and not stops.item():
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        step += 1
        time.sleep(step_s if RESTARTS < 2 else 0)
        stops.fill_(ftslurm.should_stop())
        dist.all_reduce(stops, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0 and step % 5 == 0:
            save(state, model, optimizer, step)
    if dist.get_rank() == 0:
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"parameters {hashlib.sha256(values).hexdigest()} at {step}", flush=True)
        save(state, model, optimizer, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
