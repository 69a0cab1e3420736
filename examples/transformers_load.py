"""Loads a model of Hugging Face transformers through Thruway, and checks it against a plain load.

    python examples/transformers_load.py [DIRECTORY] [--device cuda:0]

Without a directory it makes a small random Llama. Needs transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from thruway.transformers import from_pretrained
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def make(directory: Path) -> None:
    """Saves a random Llama of 10 MB, in shards, whose output layer is its embedding."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="4MB")


def compare(directory: Path, device: str) -> None:
    """Loads the model of a directory both ways, and compares what they say."""
    ours = from_pretrained(AutoModelForCausalLM, directory, device=device, receipt=print)
    theirs = AutoModelForCausalLM.from_pretrained(directory).to(device)
    tokens = torch.arange(16, device=device)[None]
    with torch.inference_mode():
        if not torch.equal(ours(tokens).logits, theirs(tokens).logits):
            raise SystemExit("the logits differ")
    print(f"{type(ours).__name__} on {ours.device}: the same logits as after a plain load")


def main() -> None:
    parser = argparse.ArgumentParser(description="Loads a transformers model through Thruway and checks it.")
    parser.add_argument("directory", nargs="?", type=Path, help="what save_pretrained wrote")
    parser.add_argument("--device", default="cpu", help='such as "cuda:0" (default: cpu)')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if arguments.directory is None:
            make(Path(made))
        compare(arguments.directory or Path(made), arguments.device)


if __name__ == "__main__":
    main()
