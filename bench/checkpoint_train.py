"""A training run that saves every few steps, in turns with the same run without saves.

The model is a stack of square layers with residuals, in bf16 by autocast over fp32 weights; its optimizer is AdamW. So
a state is three fp32 values a parameter. A step goes over so many small batches that it takes about the time asked for:
their gradients add up, as in a training whose batch does not fit at once. Every step reads its loss, which leaves the
GPU idle until the next one's first kernel: all that a save takes on the CPU counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH = 4096
ROWS = 2048
# fp32: the parameter and AdamW's two moments of it.
STATE_BYTES = 12
# Turns of either kind, and saves in each turn.
TURNS = 3
SAVES = 2
WARM_SECONDS = 3.0
CALIBRATIONS = 4
# Of the last save, which is compared with what was there when it was asked for.
STEPS_AFTER = 3


class Training:
    """A model, its optimizer, and batches that are as large as the steps are to be long."""

    def __init__(self, size: int, device: str) -> None:
        import torch

        torch.manual_seed(0)
        # Small ones, to try this, have eight layers or so.
        self.width = min(WIDTH, max(64, int((size / STATE_BYTES / 8) ** 0.5) // 64 * 64))
        layers = max(1, round(size / STATE_BYTES / self.width**2))
        self.model = torch.nn.ModuleList(
            [torch.nn.Linear(self.width, self.width, bias=False, device=device) for _ in range(layers)]
        )
        fused = {"fused": True} if device != "cpu" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        rows = ROWS if self.width == WIDTH else 64
        self.inputs, self.targets = (torch.randn(rows, self.width, device=device) for _ in range(2))
        self.device = torch.device(device).type
        self.batches = 1

    def step(self) -> float:
        import torch

        total = torch.zeros((), device=self.inputs.device)
        for _ in range(self.batches):
            with torch.autocast(self.device, dtype=torch.bfloat16):
                hidden = self.inputs
                for layer in self.model:
                    hidden = hidden + torch.nn.functional.silu(layer(hidden))
            loss = torch.nn.functional.mse_loss(hidden.float(), self.targets) / self.batches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def bytes(self) -> int:
        """Of the tensors of a state; after the first step, which makes the optimizer's."""
        return sum(tensor.nbytes for tensor in tensors_in(self.state()))

    def calibrate(self, seconds: float) -> None:
        """As many batches as make a step take so long. More than once: the first steps are slower, or on a cool GPU."""
        for _ in range(CALIBRATIONS):
            self.batches = max(1, round(self.batches * seconds / (self.timed(2) / 2)))

    def timed(self, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - begun


def tensors_in(value: Any) -> list[Any]:
    """All tensors of a nest, in its order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in tensors_in(one)]


class Saves:
    """What saves of a training, and how each went."""

    def __init__(self, training: Training, directory: Path, device: str) -> None:
        from thruway.torch import Checkpointer

        self.training = training
        begun = time.perf_counter()
        self.checkpoints = Checkpointer(directory, keep=2, pool_bytes=training.bytes(), device=device)
        self.prepare_seconds = time.perf_counter() - begun
        self.steps, self.told, self.last = 0, [], None

    def save(self) -> None:
        late = self.last is not None and not self.last.done()
        self.steps += 1
        begun = time.perf_counter()
        self.last = self.checkpoints.save_async(self.steps, self.training.state(), guard=self.training.optimizer)
        self.told.append({"blocked_seconds": time.perf_counter() - begun, "late": late})

    def train_on(self) -> None:
        """Steps that nobody counts, until nothing is written any more: a GPU that rests is a faster one after it."""
        while self.last is not None and not self.last.done():
            self.training.step()
        self.checkpoints.wait()

    def compare(self, device: str) -> None:
        """The last save is bit by bit what was there when it was asked for, whatever was trained since."""
        import torch

        before = [tensor.clone() for tensor in tensors_in(self.training.state())]
        self.save()
        self.training.timed(STEPS_AFTER)
        self.last.wait()
        trained = tensors_in(self.training.state())
        if all(torch.equal(one, other) for one, other in zip(before, trained, strict=True)):
            raise RuntimeError("the training changes nothing: a torn save would not be seen")
        restored = tensors_in(self.checkpoints.restore(self.steps))
        for number, (one, other) in enumerate(zip(before, restored, strict=True)):
            # Bytes, as a NaN is equal to nothing.
            if not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
                raise RuntimeError(f"tensor {number} of the state came back with other bytes")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds of a step, in turns without saves and with them."""
    training = Training(args.bytes, args.device)
    training.step()
    training.calibrate(args.step_seconds)
    directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.directory))
    try:
        saves = Saves(training, directory / "run", args.device)
        # The first of all is nobody's: it makes what later ones find.
        saves.save()
        begun = time.perf_counter()
        while time.perf_counter() - begun < WARM_SECONDS:
            training.step()
        saves.train_on()
        saves.told.clear()
        steps, plain, saving = SAVES * args.every, [], []
        for _ in range(TURNS):
            plain.append(training.timed(steps))
            begun = time.perf_counter()
            for number in range(steps):
                # At the beginning, so that the turn has all of a save's copies in it.
                if number % args.every == 0:
                    saves.save()
                training.step()
            saving.append(time.perf_counter() - begun)
            saves.train_on()
        told = saves.told[:]
        saves.compare(args.device)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "name": "train",
        "version": importlib.metadata.version("thruway"),
        "bytes": training.bytes(),
        "parameters": sum(one.numel() for one in training.model.parameters()),
        "batches": training.batches,
        "every": args.every,
        "prepare_seconds": saves.prepare_seconds,
        "plain_step_seconds": [seconds / steps for seconds in plain],
        "saving_step_seconds": [seconds / steps for seconds in saving],
        "saves": told,
        "compared": True,
    }
