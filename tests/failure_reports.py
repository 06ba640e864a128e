"""How the ends of runs that people have reported are judged: through the reader of logs, together
with the echoes of other ranks and srun's word.

`python -m failure_reports` in this folder prints how many are told rightly.
"""

from __future__ import annotations

import failure_clues as texts
from reported_failures import REPORTS, Report

from ftslurm.diagnosis.classify import classify
from ftslurm.diagnosis.finding import Clue, Finding
from ftslurm.diagnosis.tails import Tail, log_clues

BEFORE = [f"step {step} loss {3.0 - step / 100:.2f} tokens/s 1200" for step in range(1, 41)]

# Of what training goes on after: no cause of an end.
HARMLESS = [
    ("epfLLM/Megatron-LLM#33",
     " iteration     3383/    8000 | consumed samples:       216512 | elapsed time per iteration "
     "(ms): 7613.1 | learning rate: 6.680E-06 | global batch size:    64 | lm loss: 7.334521E-01 | "
     "loss scale: 1.0 | grad norm: 0.752 | number of skipped iterations:   0 | number of nan "
     "iterations:   0 |"),
    ("bigscience-workshop/Megatron-DeepSpeed#396",
     " iteration     5426/  250000 | consumed samples:        43408 | loss scale: 1.0 | grad norm: "
     "nan | actual seqlen:  2048 | number of skipped iterations:   0 | number of nan iterations:   "
     "0 | samples per second: 1.886 |"),
    ("epfLLM/Megatron-LLM#34", "***WARNING*** Bad grad_norm detected (grad_norm=nan)"),
    ("AnswerDotAI/ModernBERT#233",
     "{'loss': 0.2051, 'grad_norm': nan, 'learning_rate': 9.774074342405685e-06, 'epoch': 0.53}"),
    ("InternLM/xtuner#187",
     "10/30 22:19:57 - mmengine - INFO - Epoch(train) [1][240/735]  lr: 1.9813e-04  memory: 10762  "
     "loss: 2.5128  grad_norm: nan"),
    ("facebookresearch/fairseq#4755",
     "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 4.0"),
    ("LEEYOONHYUNG/BVAE-TTS#3",
     "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"),
    ("NVIDIA/nccl#1618",
     "n2:398:398 [1] misc/socket.cc:551 NCCL INFO socketPollConnect: connect returned Connection "
     "timed out, retrying (1/34) after sleep for 100 msec"),
    ("Oneflow-Inc/oneflow#3586",
     "n2:101:194 [0] NCCL INFO Call to connect returned Connection timed out, retrying"),
    ("wandb/wandb#5550", "wandb: Network error (ConnectTimeout), entering retry loop."),
    ("AUTOMATIC1111/stable-diffusion-webui#17165",
     "WARNING:huggingface_hub.utils._http:Retrying in 1s [Retry 1/5]."),
    ("google/nccl-fastsocket#4", "n2:402:404 [0] net_fastsocket.cc:765 NCCL WARN Cannot get "
     "incoming CPU."),
]  # fmt: skip


def clues_of(log: str) -> list[Clue]:
    tail = Tail(log.splitlines(), 1, texts.AT)
    return log_clues(tail, rank=3, node="n2", file="rank-3.log")


def judged(report: Report) -> Finding:
    """Together with the others' echoes, and srun's word on the rank."""
    if report.by_launcher:
        lines = enumerate(report.text.splitlines(), 1)
        told = [texts.launcher(text, number, rank_in(text)) for number, text in lines]
    else:
        told = clues_of("\n".join([*BEFORE, report.text]))
        told.append(texts.launcher("srun: error: n2: task 3: Exited with exit code 1", 2, 3))
    return classify([*texts.ECHOES, *told], texts.FACTS)


def rank_in(text: str) -> int | None:
    return 3 if "task 3" in text else None


def main() -> None:
    wrong = [(report, judged(report)) for report in REPORTS]
    wrong = [(report, found) for report, found in wrong if found.cause != report.cause]
    for report, found in wrong:
        print(f"{report.source}: {found.cause}, expected {report.cause}: {found.sentence[:140]}")
    print(f"{len(REPORTS) - len(wrong)} of {len(REPORTS)} reports are told rightly")
    told = [source for source, line in HARMLESS if clues_of("\n".join([*BEFORE, line]))]
    print(f"{len(told)} of {len(HARMLESS)} harmless lines are taken for a sign: {', '.join(told)}")


if __name__ == "__main__":
    main()
