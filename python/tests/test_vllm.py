"""vLLM's load format, against a stand-in for the part of vLLM that it meets, in the shapes of 0.10.1 and 0.33.0."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import thruway
import thruway.torch
import torch
from thruway.vllm import register


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "auto"
    device: str | None = None
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)
    safetensors_load_strategy: str | None = None


class BaseModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    """What the plug-in builds on. Newer versions have subfolders, filters, and four things that preparing gives."""

    counter_before_loading_weights: float = 0.0

    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None = None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None
        is_unused_weight: Callable[[str], bool] | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.local_expert_ids: set[int] | None = None
        if unknown := load_config.model_loader_extra_config.keys() - {"enable_multithread_load", "num_threads"}:
            raise ValueError(f"Unexpected extra config keys: {unknown}")

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool, str]:
        if self.load_config.load_format != "safetensors":
            raise ValueError(f"Unknown load_format: {self.load_config.load_format}")
        patterns = allow_patterns_overrides or ["*.safetensors", *(["*.pt"] if fall_back_to_pt else [])]
        folder = Path(model_name_or_path, subfolder or "")
        files = next((found for pattern in patterns if (found := sorted(map(str, folder.glob(pattern))))), [])
        if not files:
            raise RuntimeError(f"Cannot find any model weights with `{model_name_or_path}`")
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            kept = {str(folder / file) for file in json.loads(index.read_text())["weight_map"].values()}
            files = [file for file in files if file in kept]
        return str(folder), files, True, index.name

    def get_all_weights(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for source in model.sources:
            yield from self._get_weights_iterator(source)

    def load_weights(self, model: Any, model_config: Any) -> None:
        if model_config.quantization == "torchao":
            self.load_config.safetensors_load_strategy = "torchao"
        model.load_weights(self.get_all_weights(model))
        assert self.counter_before_loading_weights > 0


class OldModelLoader(DefaultModelLoader):
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        del self.local_expert_ids

    def _prepare_weights(  # type: ignore[override]
        self,
        model_name_or_path: str,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool]:
        return super()._prepare_weights(model_name_or_path, None, revision, fall_back_to_pt, allow_patterns_overrides)[
            :3
        ]


class Model:
    """Takes all that it is given."""

    def __init__(self, *sources: Any) -> None:
        self.sources, self.weights = sources, {}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = dict(weights)


def install(monkeypatch: pytest.MonkeyPatch, default: type) -> dict[str, type]:
    """Puts the stand-in in vllm's place, and registers; gives the registry."""
    registry: dict[str, type] = {"safetensors": default}

    def register_model_loader(load_format: str) -> Callable[[type], type]:
        def wrapper(loader: type) -> type:
            assert issubclass(loader, BaseModelLoader) and load_format not in registry
            registry[load_format] = loader
            return loader

        return wrapper

    def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
        if local_expert_ids is None or not weight_name.startswith("experts."):
            return False
        return int(weight_name.split(".")[1]) not in local_expert_ids

    parts = {
        "": {},
        ".platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: False)},
        ".model_executor": {},
        ".model_executor.model_loader": {"register_model_loader": register_model_loader},
        ".model_executor.model_loader.default_loader": {"DefaultModelLoader": default},
        ".model_executor.model_loader.ep_weight_filter": {"should_skip_weight": should_skip_weight},
    }
    for name, attributes in parts.items():
        module = ModuleType(f"vllm{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    register()
    return registry


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Each test is a process to which `register` is new."""
    register.cache_clear()
    yield
    register.cache_clear()


@pytest.fixture(params=[DefaultModelLoader, OldModelLoader])
def default(request: pytest.FixtureRequest) -> type:
    """vLLM's own loader, of a newer and an older version."""
    return request.param


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, default: type) -> Callable[..., Any]:
    """Makes the registered loader, as vLLM does."""
    registry = install(monkeypatch, default)
    return lambda **options: registry["thruway"](LoadConfig("thruway", **options))


PLAIN = SimpleNamespace(quantization=None)


def test_the_entry_point_is_found_and_needs_no_vllm() -> None:
    (found,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "thruway")
    assert found.load() is register
    script = "import sys, thruway.vllm; print({'vllm', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


def test_registering_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = install(monkeypatch, DefaultModelLoader)
    loader = registry["thruway"]
    register()
    assert registry["thruway"] is loader and issubclass(loader, DefaultModelLoader)


def test_a_vllm_without_a_registry_goes_on_without_the_format(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, DefaultModelLoader)
    monkeypatch.delattr(sys.modules["vllm.model_executor.model_loader"], "register_model_loader")
    register.cache_clear()
    register()
    assert "there is no load format thruway, which needs vLLM 0.10.1 or newer: " in caplog.text


def test_a_model_gets_all_weights_of_all_its_sources(tmp_path: Path, make: Any, default: Any) -> None:
    first = {f"layers.{n}.weight": torch.randn(3, n + 1) for n in range(5)}
    second = {"tower.weight": torch.randn(2, 2, dtype=torch.bfloat16)}
    thruway.torch.save_file(first, tmp_path / "first", max_shard_bytes=40)
    # Beside the shards, as some models have it: all weights again, which no index names.
    thruway.torch.save_file(first, tmp_path / "first/consolidated.safetensors")
    thruway.torch.save_file(second, tmp_path / "model.safetensors")
    model = Model(default.Source(str(tmp_path / "first")), default.Source(str(tmp_path), prefix="vision."))
    make().load_weights(model, PLAIN)
    expected = {**first, "vision.tower.weight": second["tower.weight"]}
    assert model.weights.keys() == expected.keys()
    assert all(torch.equal(model.weights[name], tensor) for name, tensor in expected.items())


def test_options_and_the_device_reach_the_stream_and_the_receipt_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stream, given = thruway.torch.stream, []

    def seen(files: list[str], device: str, **options: Any) -> Any:
        given.append((files, device, options))
        return stream(files, device, **options)

    monkeypatch.setattr(thruway.torch, "stream", seen)
    registry = install(monkeypatch, default)
    thruway.torch.save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    options = {"path": "cached", "device_budget_bytes": 1 << 20}
    loader = registry["thruway"](LoadConfig("thruway", "cpu", options))
    with caplog.at_level(logging.INFO, "vllm.thruway"):
        loader.load_weights(Model(default.Source(str(tmp_path))), PLAIN)
    ((files, device, passed),) = given
    assert (files, device) == ([str(tmp_path / "model.safetensors")], "cpu")
    assert {name: passed[name] for name in options} == options
    assert [record.getMessage() for record in caplog.records if "12 B" in record.getMessage()]


def test_weights_that_a_process_does_not_need_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["draft.weight", "norm.weight", *(f"experts.{n}.weight" for n in range(4))]
    thruway.torch.save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    loader = install(monkeypatch, DefaultModelLoader)["thruway"](LoadConfig("thruway"))
    loader.local_expert_ids = {1, 2}
    unused = lambda name: name.startswith("draft.")  # noqa: E731
    model = Model(DefaultModelLoader.Source(str(tmp_path), is_unused_weight=unused, prefix="model."))
    loader.load_weights(model, PLAIN)
    assert sorted(model.weights) == ["model.experts.1.weight", "model.experts.2.weight", "model.norm.weight"]


def test_a_wrong_option_is_an_error_before_anything_is_loaded(make: Any) -> None:
    for options, message in (
        ({"pth": "cached"}, "has no option pth\nhint: it has device_budget_bytes and path"),
        ({"num_threads": 4}, "has no option num_threads"),
        ({"device_budget_bytes": "1 GiB"}, "option device_budget_bytes of the load format thruway cannot be '1 GiB'"),
        ({"device_budget_bytes": True}, "cannot be True"),
        ({"path": 3}, "option path of the load format thruway cannot be 3"),
        (["path"], "a JSON object"),
    ):
        with pytest.raises(ValueError, match=message):
            make(model_loader_extra_config=options)


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path, make: Any, default: Any) -> None:
    thruway.torch.save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tape"):
        make(model_loader_extra_config={"path": "tape"}).load_weights(Model(default.Source(str(tmp_path))), PLAIN)


def test_what_is_not_of_safetensors_files_is_refused(tmp_path: Path, make: Any, default: Any) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(thruway.UnsupportedError, match=r"no safetensors files .* Cannot find any"):
        make().load_weights(Model(default.Source(str(tmp_path))), PLAIN)
    with pytest.raises(thruway.UnsupportedError, match=r"these are not safetensors files: .*model\.pt"):
        make().load_weights(Model(default.Source(str(tmp_path), allow_patterns_overrides=["*.pt"])), PLAIN)


def test_ways_of_reading_that_it_does_not_have_are_refused(tmp_path: Path, make: Any, default: Any) -> None:
    thruway.torch.save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    model = Model(default.Source(str(tmp_path)))
    make(safetensors_load_strategy="lazy").load_weights(model, PLAIN)
    with pytest.raises(thruway.UnsupportedError, match="safetensors_load_strategy 'eager'"):
        make(safetensors_load_strategy="eager").load_weights(model, PLAIN)
    with pytest.raises(thruway.UnsupportedError, match="safetensors_load_strategy 'torchao'"):
        make().load_weights(model, SimpleNamespace(quantization="torchao"))
