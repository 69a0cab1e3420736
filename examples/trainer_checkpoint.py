"""Checkpoints of Hugging Face's Trainer through Thruway: its optimizer and scheduler, most of what it saves.

    python examples/trainer_checkpoint.py [--device cpu]

It trains a small Llama, once in one go and once with a break, and compares the weights bit by bit. Needs transformers
and accelerate. The model itself is written by `save_pretrained`, which makes safetensors of it already.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from thruway.torch import load, load_file, save
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

NAME = "training.safetensors"


class FastTrainer(Trainer):
    """A Trainer that saves its optimizer and scheduler as safetensors, complete and on the drive or not there."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.lr_scheduler.state_dict()}
            save(state, Path(output_dir) / NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = load(Path(checkpoint) / NAME, map_location="cpu")
            self.optimizer.load_state_dict(state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"])


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same every time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, 128, (64, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(directory: Path, device: str, resume: bool, **options: Any) -> None:
    """Trains up to so many steps, from the last checkpoint on if asked to."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes))
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=12,
        save_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        # Of the same shape for both trainings, whichever of them stops where.
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=6,
        use_cpu=device == "cpu",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = FastTrainer(model=model, args=arguments, train_dataset=Sentences(), **options)
    trainer.train(resume_from_checkpoint=resume)


def main() -> None:
    """Trains with and without a break, and compares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        train(whole, device, resume=False)
        train(broken, device, resume=False)
        # As if it had been killed after the second checkpoint.
        (broken / "checkpoint-12").rename(broken / "lost")
        train(broken, device, resume=True)
        one, other = (load_file(place / "checkpoint-12" / "model.safetensors") for place in (whole, broken))
        if any(not torch.equal(one[name], other[name]) for name in one):
            raise SystemExit("the weights differ")
        print(f"resumed at step 8, and all {len(one)} tensors are the same, bit by bit")


if __name__ == "__main__":
    main()
