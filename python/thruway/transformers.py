"""Hugging Face transformers: `from_pretrained`, with the weights read through Thruway."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from thruway import _progress
from thruway._errors import InvalidInputError, NotFoundError, UnsupportedError
from thruway._thruway import Receipt
from thruway.torch import load_file, stream

# What says where weights come from or where they go, which is decided here.
_DECIDED = {
    "device_map", "device_mesh", "distributed_config", "gguf_file", "max_memory", "offload_buffers", "offload_folder",
    "output_loading_info", "quantization_config", "state_dict", "subfolder", "torch_dtype", "tp_plan", "tp_size",
    "use_safetensors", "variant",
}  # fmt: skip


def from_pretrained(
    model_class: Any,
    directory: str | PathLike[str],
    *,
    device: str | int | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    config: PretrainedConfig | None = None,
    strict: bool = True,
    path: str = "auto",
    receipt: Callable[[Receipt], object] | None = None,
    progress: _progress.Progress = None,
    **kwargs: Any,
) -> Any:
    """Makes the model that `model_class.from_pretrained(directory)` makes, on one device.

    transformers itself puts the model together, from a mapping of the files that is not read: it renames, converts,
    ties and casts weights, and computes the buffers that no file holds. The weights that it took as they are, which
    are all of them for most models, are then read straight to `device`, into memory of their own. Those that it
    converted or cast are read through the mapping, in host memory, as they are without Thruway.

    Args:
        model_class: a class of models, or an Auto class.
        directory: what `save_pretrained` wrote, or a snapshot of a model of the Hub: `config.json`, and
            `model.safetensors` or `model.safetensors.index.json` with its shards.
        device: where to.
        dtype: what weights are cast to; "auto" is the configuration's, or else the file's.
        config: the configuration, if it is not the directory's.
        strict: weights of the model that the files lack are an error, and not initialized at random with a warning.
        path: which way the bytes go: "auto", "staged" or "cached".
        receipt: called with what the load of the weights that were taken as they are did.
        progress: called now and then with the bytes of it moved so far.
        kwargs: passed on, such as `attn_implementation`. A change of the configuration goes through `config`, and code
            from the directory is not run.

    Returns:
        The model, in evaluation mode. Generation settings are those of `generation_config.json`, if it is there; old
        ones inside `config.json` are not taken.

    Raises:
        NotFoundError: there is no such directory.
        InvalidInputError: the files lack weights; or an argument asks for what is decided here.
        UnsupportedError: there are no safetensors files, or there is more to the checkpoint: it is quantized, has an
            adapter or names its own weight files.
    """
    directory = Path(directory)
    if decided := sorted(_DECIDED.intersection(kwargs)):
        raise InvalidInputError(
            f"{', '.join(decided)}: not an argument of thruway's from_pretrained", hint="see its `device` and `dtype`"
        )
    checkpoint = _checkpoint(directory)
    config = _supported(config or AutoConfig.from_pretrained(directory))
    if not issubclass(model_class, PreTrainedModel):
        # A model that takes no memory tells which class an Auto class stands for.
        with torch.device("meta"):
            made = model_class.from_config(config)
        model_class, config = type(made), made.config

    mapped = load_file(checkpoint)
    # The default device may be another, to which transformers would move all of it now.
    with torch.device("cpu"):
        model, told = model_class.from_pretrained(
            None, config=config, state_dict=dict(mapped), dtype=dtype, output_loading_info=True, **kwargs
        )
    if strict and (missing := sorted(told["missing_keys"])):
        raise InvalidInputError(
            f"{directory} lacks {len(missing)} weights of {model_class.__name__}: {', '.join(missing[:5])}",
            hint="with strict=False they are initialized at random",
        )
    names = {_place(tensor): name for name, tensor in mapped.items() if tensor.numel()}
    taken = {
        names[place]: tensor
        for tensor in itertools.chain(model.parameters(), model.buffers())
        if (place := _place(tensor)) in names
    }
    for name, tensor in stream(checkpoint, device, names=taken, path=path, receipt=receipt, progress=progress):
        taken[name].data = tensor
    model.name_or_path = model.config.name_or_path = str(directory)
    if model.can_generate() and "generation_config" not in kwargs and (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.to(device)


def _checkpoint(directory: Path) -> Path:
    """The file that transformers would load, or the index of the files."""
    if not directory.is_dir():
        hint = "huggingface_hub.snapshot_download brings a model of the Hub into a directory"
        raise NotFoundError(f"{directory} is not a directory", hint=hint)
    if (directory / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{directory} has an adapter, which is not loaded", hint="load the model, then the adapter"
        )
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (directory / name).is_file():
            return directory / name
    raise UnsupportedError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")


def _supported(config: PretrainedConfig) -> PretrainedConfig:
    """The same, if the weights that it tells of are those of `_checkpoint`, and are what they seem."""
    if any(getattr(one, "quantization_config", None) for one in (config, config.get_text_config())):
        raise UnsupportedError(
            "the checkpoint is quantized, which takes more than its tensors", hint="use transformers alone"
        )
    if getattr(config, "transformers_weights", None) or getattr(config, "extra_files", None):
        raise UnsupportedError("the configuration names weight files of its own", hint="use transformers alone")
    return config


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same view of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
