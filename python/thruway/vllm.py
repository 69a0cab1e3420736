"""vLLM: the load format "thruway", which reads the weights of a safetensors checkpoint through Thruway.

`vllm serve MODEL --load-format thruway`: vLLM finds `register` as an entry point and calls it in each of its processes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from thruway._errors import InvalidInputError, UnsupportedError

# What `--model-loader-extra-config` may hold: arguments of `thruway.torch.stream`.
_OPTIONS = {"device_budget_bytes": int, "path": str}

# vLLM shows what loggers below its own say.
_logger = logging.getLogger("vllm.thruway")


@functools.cache
def register() -> None:
    """Makes the load format known to vLLM, once in a process. vllm is imported now, and not with this module."""
    try:
        from vllm.model_executor.model_loader import register_model_loader  # type: ignore[import-not-found]

        loader = _loader()
    except ImportError as error:
        # A vLLM that is too old or too new must go on serving those who ask for another load format.
        _logger.warning("there is no load format thruway, which needs vLLM 0.10.1 or newer: %s", error)
    else:
        register_model_loader("thruway")(loader)


def _options(given: Any) -> dict[str, Any]:
    """The options, if they are such."""
    if not isinstance(given, dict):
        raise InvalidInputError(f"the options of the load format thruway are a JSON object, not {given!r}")
    if unknown := sorted(given.keys() - _OPTIONS.keys()):
        hint = f"it has {' and '.join(_OPTIONS)}"
        raise InvalidInputError(f"the load format thruway has no option {', '.join(unknown)}", hint=hint)
    for name, value in given.items():
        if type(value) is not _OPTIONS[name]:
            raise InvalidInputError(f"the option {name} of the load format thruway cannot be {value!r}")
    return given


def _loader() -> type:
    """The class of loaders, which needs vllm for its base."""
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    from thruway.torch import stream

    class ThruwayModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's own loader, which finds and downloads files, picks weights and checks that none is missing, but reads
        the files in another way.

        Raises:
            InvalidInputError: an option that does not exist, at once; one with a value that makes no sense, in
                `load_weights`.
            UnsupportedError: in `load_weights`, a checkpoint that is not of safetensors files, or whose tensors mean
                nothing without metadata beside them.
        """

        # When the first weight was asked for: the base tells how long loading took.
        counter_before_loading_weights: float

        def __init__(self, load_config: Any) -> None:
            self._options = _options(load_config.model_loader_extra_config)
            # The base knows neither the format nor its options; it looks for the files as for this one.
            plain = {"load_format": "safetensors", "model_loader_extra_config": {}}
            super().__init__(dataclasses.replace(load_config, **plain))

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            # "lazy" is the default of older versions. "torchao" is set by the base, by what the checkpoint is.
            strategy = getattr(self.load_config, "safetensors_load_strategy", None)
            if strategy not in (None, "lazy"):
                raise UnsupportedError(f"the load format thruway has no safetensors_load_strategy {strategy!r}")
            files = self._safetensors(source)
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            weights = stream(
                files,
                self.load_config.device or ("cuda" if current_platform.is_cuda() else "cpu"),
                names=self._wanted(source),
                receipt=lambda told: _logger.info("%s", told),
                **self._options,
            )
            return ((source.prefix + name, tensor) for name, tensor in weights)

        def _safetensors(self, source: Any) -> list[str]:
            """The files of a source, downloaded if need be."""
            # Older versions have no subfolders.
            subfolder = {"subfolder": source.subfolder} if hasattr(source, "subfolder") else {}
            try:
                files: list[str] = self._prepare_weights(
                    model_name_or_path=source.model_or_path,
                    revision=source.revision,
                    fall_back_to_pt=False,
                    allow_patterns_overrides=source.allow_patterns_overrides,
                    **subfolder,
                )[1]
            except RuntimeError as error:
                raise UnsupportedError(f"there are no safetensors files that can be read: {error}") from error
            if others := [file for file in files if not file.endswith(".safetensors")]:
                raise UnsupportedError(f"these are not safetensors files: {', '.join(others[:5])}")
            return files

        def _wanted(self, source: Any) -> Callable[[str], bool]:
            """Which of a source's tensors this process needs. Older versions need all."""
            unused = getattr(source, "is_unused_weight", None) or (lambda name: False)
            experts = getattr(self, "local_expert_ids", None)
            if experts is None:
                return lambda name: not unused(name)
            from vllm.model_executor.model_loader import ep_weight_filter

            return lambda name: not (unused(name) or ep_weight_filter.should_skip_weight(name, experts))

    return ThruwayModelLoader
