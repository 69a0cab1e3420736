"""transformers: `from_pretrained` makes the model that transformers makes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import thruway
import torch
import transformers
from thruway.transformers import from_pretrained

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    # Embeddings that are the output's too: one tensor in the file for two of the model.
    "llama": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    # A rotary embedding with other frequencies than the usual, which no file holds.
    "scaled": transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    # The file has a tensor for each expert, the model one for all of a layer.
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    # Buffers in the file, and integers among them.
    "resnet": transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3),
}
CLASSES = {"resnet": transformers.ResNetForImageClassification}


def saved(directory: Path, name: str = "llama", **options: Any) -> type:
    """Saves a random model; gives its class."""
    torch.manual_seed(0)
    made = CLASSES.get(name, transformers.AutoModelForCausalLM)
    model = made(CONFIGS[name]) if name in CLASSES else made.from_config(CONFIGS[name])
    for tensor in model.buffers():
        tensor.fill_(3)
    model.save_pretrained(directory, **options)
    return type(model)


def same(one: Any, other: Any) -> bool:
    """Whether all parameters and buffers, also those that no file holds, have the same bits."""
    tensors = [dict([*model.named_parameters(), *model.named_buffers()]) for model in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(
        tensor.dtype == tensors[1][name].dtype and torch.equal(tensor, tensors[1][name])
        for name, tensor in tensors[0].items()
    )


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_the_one_that_transformers_makes(name: str, dtype: Any, tmp_path: Path) -> None:
    model_class = saved(tmp_path, name, max_shard_size="20KB")
    theirs = model_class.from_pretrained(tmp_path, dtype=dtype)
    ours = from_pretrained(model_class, tmp_path, dtype=dtype)
    assert type(ours) is model_class and not ours.training and same(ours, theirs)
    assert ours.config.to_dict() == theirs.config.to_dict() and ours.name_or_path == theirs.name_or_path
    shape = (1, 3, 32, 32) if name == "resnet" else (1, 12)
    given = torch.ones(shape, dtype=ours.dtype) if name == "resnet" else torch.arange(12)[None]
    assert given.shape == shape and torch.equal(ours(given).logits, theirs(given).logits)


@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("THRUWAY_REQUIRE_GPU") != "1", reason="there is no GPU"
)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_on_a_gpu_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    model_class = saved(tmp_path, name)
    ours = from_pretrained(model_class, tmp_path, device="cuda")
    assert all(tensor.is_cuda for tensor in [*ours.parameters(), *ours.buffers()])
    assert same(ours.cpu(), model_class.from_pretrained(tmp_path))


def test_embeddings_that_are_tied_are_one_tensor(tmp_path: Path) -> None:
    ours = from_pretrained(saved(tmp_path), tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_weights_lie_in_memory_of_their_own_and_each_byte_is_read_once(tmp_path: Path) -> None:
    model_class, receipts = saved(tmp_path), []
    ours = from_pretrained(model_class, tmp_path, receipt=receipts.append)
    assert sum(receipt.bytes for receipt in receipts) == sum(tensor.nbytes for tensor in ours.parameters())
    before = ours.model.norm.weight.clone()
    # A mapped file would show through.
    (file := tmp_path / "model.safetensors").write_bytes(bytes(file.stat().st_size))
    assert torch.equal(ours.model.norm.weight, before) and before.any()


def test_an_auto_class_stands_for_the_class_of_the_configuration(tmp_path: Path) -> None:
    model_class = saved(tmp_path)
    ours = from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    assert type(ours) is model_class and same(ours, model_class.from_pretrained(tmp_path))
    assert type(from_pretrained(transformers.AutoModel, tmp_path)) is transformers.LlamaModel


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    model_class = saved(tmp_path)
    with torch.device("meta"):
        ours = from_pretrained(model_class, tmp_path)
    assert same(ours, model_class.from_pretrained(tmp_path))


def test_it_generates_as_the_directory_says(tmp_path: Path) -> None:
    model_class = saved(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_length": 9, "eos_token_id": None}))
    ours, theirs = from_pretrained(model_class, tmp_path), model_class.from_pretrained(tmp_path)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.generation_config.max_length == 9
    other = transformers.GenerationConfig(max_length=11)
    assert from_pretrained(model_class, tmp_path, generation_config=other).generation_config.max_length == 11


def test_weights_that_the_files_lack_are_an_error_unless_they_may_be_random(tmp_path: Path) -> None:
    saved(tmp_path)
    model_class = transformers.LlamaForSequenceClassification
    with pytest.raises(thruway.InvalidInputError, match=r"lacks 1 weights of LlamaForSeq\w*: score.weight\nhint: with"):
        from_pretrained(model_class, tmp_path)
    ours = from_pretrained(model_class, tmp_path, strict=False)
    assert ours.score.weight.any()
    assert torch.equal(ours.model.norm.weight, from_pretrained(transformers.LlamaModel, tmp_path).norm.weight)


def test_arguments_go_on_to_transformers_but_for_those_that_are_decided_here(tmp_path: Path) -> None:
    model_class = saved(tmp_path)
    ours = from_pretrained(model_class, tmp_path, attn_implementation="eager")
    assert ours.config._attn_implementation == "eager"
    for name in ("device_map", "state_dict", "subfolder", "quantization_config", "output_loading_info"):
        with pytest.raises(ValueError, match=name):
            from_pretrained(model_class, tmp_path, **{name: "auto"})


def test_what_would_give_other_weights_is_refused(tmp_path: Path) -> None:
    model_class = saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"transformers_weights": "other.safetensors"}, "weight files of its own"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(thruway.UnsupportedError, match=message):
            from_pretrained(model_class, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(thruway.UnsupportedError, match="adapter"):
        from_pretrained(model_class, tmp_path)


def test_a_directory_without_safetensors_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path / "organisation/model")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(thruway.UnsupportedError, match="has neither"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)
