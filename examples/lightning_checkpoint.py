"""Checkpoints of Lightning through Thruway: a plug-in, and nothing else changes.

    python examples/lightning_checkpoint.py

It trains a small network, once in one go and once with a break, and compares the weights bit by bit. Needs lightning.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import thruway.torch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO


class ThruwayIO(CheckpointIO):
    """Writes checkpoints as safetensors files, complete and on the drive or not there. No pickle is written or read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves what Lightning gives."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        thruway.torch.save(checkpoint, path)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, **options: Any) -> dict[str, Any]:
        """Loads it. Lightning's `map_location` may be a function that leaves everything on the CPU."""
        state: dict[str, Any] = thruway.torch.load(path, "cpu" if callable(map_location) else map_location)
        return state

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint that is not to be kept any more."""
        Path(path).unlink(missing_ok=True)


class Network(lightning.LightningModule):
    """A small network that learns what another one does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, wanted = batch
        return (self.layers(inputs) - wanted).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(directory: Path, epochs: int, resume: Path | None = None) -> Network:
    """Trains for so many epochs, from a checkpoint on if there is one."""
    lightning.seed_everything(1, verbose=False)
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin())
    network = Network()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        plugins=[ThruwayIO()],
        callbacks=[ModelCheckpoint(directory, every_n_epochs=1, save_top_k=-1, filename="{epoch}")],
        accelerator="auto",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(network, torch.utils.data.DataLoader(data, batch_size=16), ckpt_path=resume)
    return network


def main() -> None:
    """Trains with and without a break, and compares."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = train(Path(scratch) / "whole", 6)
        train(Path(scratch) / "broken", 3)
        resumed = train(Path(scratch) / "broken", 6, Path(scratch) / "broken/epoch=2.ckpt")
        one, other = whole.state_dict(), resumed.state_dict()
        if any(not torch.equal(one[name], other[name]) for name in one):
            raise SystemExit("the weights differ")
        print(f"resumed after 3 epochs, and all {len(one)} tensors are the same, bit by bit")


if __name__ == "__main__":
    main()
