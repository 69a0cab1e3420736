"""Trains a small network with AdamW, is killed at some moment, resumes, and ends with the very same weights.

    python examples/train_resume.py [--device cuda:0] [--steps 300] [--kills 3]

It starts itself as processes: one that trains without a break, and some that are killed (`kill -9`) and go on from the
last checkpoint. Their weights are compared bit by bit. Needs torch alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from thruway.torch import Checkpointer, load_file

SAVE_EVERY = 10


def train(directory: Path, device: str, steps: int) -> None:
    """Trains from the newest checkpoint on, or from the start, and saves as it goes."""
    # Sums on a GPU are the same again only so.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.BatchNorm1d(256),
        torch.nn.Linear(256, 8),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    teacher = torch.randn(64, 8, device=device)
    directory.mkdir(exist_ok=True)
    run = Checkpointer(directory, keep=2, device=device)
    first = 0
    if run.steps():
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": None}
        first, found = run.restore_into(objects)
        torch.set_rng_state(found["rng"]["cpu"])
        if "cuda" in found["rng"]:
            torch.cuda.set_rng_state(found["rng"]["cuda"], device)
        print(f"resumed at step {first}", flush=True)
    for step in range(first, steps):
        inputs = torch.randn(32, 64, device=device)
        loss = (model(inputs) - inputs @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            rng = {"cpu": torch.get_rng_state()}
            if device != "cpu":
                rng["cuda"] = torch.cuda.get_rng_state(device)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": rng,
            }
            run.save_async(step + 1, state, guard=optimizer)
            print(f"step {step + 1}: loss {loss.item():.5f}", flush=True)
    run.wait()


def start(directory: Path, device: str, steps: int) -> subprocess.Popen[bytes]:
    """Trains in a process of its own."""
    options = ["--directory", str(directory), "--device", device, "--steps", str(steps)]
    return subprocess.Popen([sys.executable, __file__, "--train", *options], stdout=subprocess.DEVNULL)


def weights(directory: Path, steps: int) -> dict[str, torch.Tensor]:
    """The model of the last checkpoint, as any program would open it."""
    return load_file(directory / f"step-{steps:08}")


def main() -> None:
    """Trains with and without breaks, and compares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.directory, given.device, given.steps)
        return
    moments = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        if start(whole, given.device, given.steps).wait():
            raise SystemExit("the training failed")
        kills = 0
        while True:
            process = start(broken, given.device, given.steps)
            if kills < given.kills:
                # A moment after it has begun to save, whenever that is.
                begun = set(broken.glob("step-*"))
                while process.poll() is None and set(broken.glob("step-*")) <= begun:
                    time.sleep(0.001)
                time.sleep(moments.uniform(0, 0.05))
                if process.poll() is None:
                    process.kill()
                    kills += 1
                process.wait()
                found = Checkpointer(broken, device="cpu").steps()
                print(f"killed; the newest checkpoint is of step {found[-1] if found else 'none'}")
                continue
            if process.wait():
                raise SystemExit("the training failed to go on")
            break
        one, other = weights(whole, given.steps), weights(broken, given.steps)
        if any(not torch.equal(one[name], other[name]) for name in one):
            raise SystemExit("the weights differ")
        print(f"{kills} kills, and all {len(one)} tensors are the same, bit by bit")


if __name__ == "__main__":
    main()
