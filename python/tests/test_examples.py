"""The examples of checkpoints: each trains once in one go and once with a break, and compares the weights itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_training_that_is_killed_ends_with_the_very_same_weights() -> None:
    assert "all 9 tensors are the same" in run("train_resume.py", "--device", "cpu", "--steps", "60", "--kills", "2")


def test_a_trainer_of_transformers_goes_on_from_what_was_saved() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert "tensors are the same" in run("trainer_checkpoint.py", "--device", "cpu")


def test_lightning_goes_on_from_what_was_saved() -> None:
    pytest.importorskip("lightning")
    assert "tensors are the same" in run("lightning_checkpoint.py")
