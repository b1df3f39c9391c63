"""What torch takes for the training that `train_gpt` does by default: a transformer of 875,264
parameters, AdamW. By pipelining in four stages, one process each, 1F1B; or with THREADS in one
process, whose microbatches follow each other. Prints tokens per second.

    python torch_pipeline.py [STEPS [THREADS]]
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

STAGES, BLOCKS, WIDTH, HEADS, TIME, BYTES = 4, 4, 128, 4, 128, 256
BATCH, MICROBATCHES = 2, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)


class Part(nn.Module):
    """The blocks of one of `stages` stages, with the embedding in the first, and the head in the
    last."""

    def __init__(self, stage, stages):
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS // stages)])
        if self.is_first:
            self.bytes, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(TIME, WIDTH)
        if self.is_last:
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, x):
        if self.is_first:
            x = self.bytes(x) + self.positions(torch.arange(x.shape[1]))
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(logits, targets):
    return functional.cross_entropy(logits.reshape(-1, BYTES), targets.reshape(-1))


def train(rank, steps, store):
    # As in `train_gpt`, where a device of the job is one thread.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=STAGES)
    torch.manual_seed(rank)

    part = Part(rank, STAGES)
    parameters = torch.tensor(sum(parameter.numel() for parameter in part.parameters()))
    dist.all_reduce(parameters)
    assert parameters == 875_264, "another model than that of train_gpt"
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)

    rows = BATCH * MICROBATCHES
    seconds = 0.0
    for step in range(steps + 1):
        data = torch.randint(BYTES, (rows, TIME + 1))
        begin = time.monotonic()
        if rank == 0:
            schedule.step(data[:, :-1])
        elif rank == STAGES - 1:
            schedule.step(target=data[:, 1:].contiguous(), losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        # The first step finds out the shapes of the activations.
        seconds += (time.monotonic() - begin) if step else 0.0

    dist.barrier()
    if rank == 0:
        show(steps, seconds)
    dist.destroy_process_group()


def train_alone(steps, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Part(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    seconds = 0.0
    for step in range(steps + 1):
        data = torch.randint(BYTES, (MICROBATCHES, BATCH, TIME + 1))
        begin = time.monotonic()
        for rows in data:
            loss = loss_of(model(rows[:, :-1]), rows[:, 1:].contiguous())
            (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += (time.monotonic() - begin) if step else 0.0
    show(steps, seconds)


def show(steps, seconds):
    rate = steps * BATCH * MICROBATCHES * TIME / seconds
    print(f"{steps} steps in {seconds:.1f} s: {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    if len(sys.argv) > 2:
        train_alone(steps, int(sys.argv[2]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (steps, os.path.join(folder, "store")), nprocs=STAGES)
