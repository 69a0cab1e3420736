"""Generates with vLLM from weights that were loaded through Thruway, and checks it against vLLM's own loader.

    python examples/vllm_load_format.py [MODEL]

Without a model it makes a small random Llama. Needs vllm and a GPU; `thruway` is found by vLLM as it is installed.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams


def make(directory: str) -> None:
    """Saves a random Llama of 5 MB, of a shape that attention kernels take."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def generate(model: str, load_format: str) -> list[int]:
    """What the model says after some tokens, which take no tokenizer."""
    engine = LLM(
        model=model,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        gpu_memory_utilization=0.4,
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": list(range(3, 19))}], sampling)
    return list(answer.outputs[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates with vLLM from weights loaded through Thruway.")
    parser.add_argument("model", nargs="?", help="a directory, or a model of the Hub")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as made:
        if model is None:
            make(made)
        ours, theirs = (generate(model or made, load_format) for load_format in ("thruway", "auto"))
    if ours != theirs:
        raise SystemExit(f"the tokens differ: {ours} and {theirs}")
    print(f"the same tokens as with vLLM's own loader: {ours}")


if __name__ == "__main__":
    main()
