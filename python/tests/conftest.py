"""What tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def write_file(tmp_path: Path):
    """Writes a safetensors file by hand, without any library: name to (dtype, shape, bytes)."""

    def write(tensors: dict[str, tuple[str, list[int], bytes]], name: str = "model.safetensors", pad: str = "") -> Path:
        header, data = {}, b""
        for key, (dtype, shape, content) in tensors.items():
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = (json.dumps(header) + pad).encode()
        path = tmp_path / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    return write
