"""The example that is killed and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/train_resume.py"


def test_training_that_is_killed_ends_with_the_very_same_weights() -> None:
    command = [sys.executable, str(EXAMPLE), "--device", "cpu", "--steps", "60", "--kills", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "all 9 tensors are the same, bit by bit" in done.stdout
