#!/usr/bin/env python3
"""Makes models to measure with, fast and without any package.

    gen_model.py DIR SHARDS LAYERS [--width W]   Llama-shaped bf16 shards with an index (20 layers are 8.72 GB)
    gen_model.py DIR many [--scale X]            20,000 bf16 tensors of 64 KiB in one file
    gen_model.py DIR small [--scale X]           38 tensors, 90 MB, in one file
    gen_model.py DIR odd                         lengths that meet every corner of alignment, in one file

The files are laid out as the format's reference writer lays them out: sorted by name, the data at whatever multiple of
8 the header ends at. The bytes are pseudo-random and the same every time, and no two chunks of a file are alike, so
that a chunk in the wrong place cannot pass for the right one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# A prime, so that the distance between two equal bytes is a multiple of no chunk size.
POOL_BYTES = 67_108_859
POOL_BYTES_SMALL = 1_048_573
DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

Tensor = tuple[str, str, list[int]]


def byte_count(tensor: Tensor) -> int:
    count = DTYPE_BYTES[tensor[1]]
    for dimension in tensor[2]:
        count *= dimension
    return count


def write_file(path: Path, tensors: list[Tensor], pool: memoryview, seed: int) -> None:
    header, cursor = {}, 0
    for name, dtype, shape in tensors:
        end = cursor + byte_count((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        at, left = seed * 7_654_321 % len(pool), cursor
        while left:
            written = file.write(pool[at : at + min(left, 32 << 20)])
            at, left = (at + written) % len(pool), left - written
        # What is not on the drive yet cannot be dropped from the page cache, and would disturb what is measured next.
        os.fsync(file.fileno())


def llama_layer(number: int, width: int) -> list[Tensor]:
    prefix, inner, narrow = f"model.layers.{number}.", width * 7 // 2, width // 4
    shapes = {
        "input_layernorm": [width],
        "mlp.down_proj": [width, inner],
        "mlp.gate_proj": [inner, width],
        "mlp.up_proj": [inner, width],
        "post_attention_layernorm": [width],
        "self_attn.k_proj": [narrow, width],
        "self_attn.o_proj": [width, width],
        "self_attn.q_proj": [width, width],
        "self_attn.v_proj": [narrow, width],
    }
    return [(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def llama(directory: Path, shards: int, layers: int, width: int, pool: memoryview) -> None:
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    contents: list[list[Tensor]] = [[] for _ in names]
    for layer in range(layers):
        contents[layer * shards // layers] += llama_layer(layer, width)
    with ThreadPoolExecutor(min(shards, 8)) as threads:
        jobs = [
            threads.submit(write_file, directory / name, sorted(tensors), pool, number)
            for number, (name, tensors) in enumerate(zip(names, contents, strict=True))
        ]
        for job in jobs:
            job.result()
    weight_map = {tensor[0]: name for name, tensors in zip(names, contents, strict=True) for tensor in tensors}
    total = sum(byte_count(tensor) for tensors in contents for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def many(scale: float) -> list[Tensor]:
    count = max(40, round(20_000 * scale))
    return sorted((f"model.layers.{i // 20}.m{i % 20}.weight", "BF16", [256, 128]) for i in range(count))


def small(scale: float) -> list[Tensor]:
    rows = max(1, round(384 * scale))
    return sorted((f"encoder.layer.{i}.dense.weight", "F32", [rows, 1536]) for i in range(38))


def odd() -> list[Tensor]:
    lengths = [
        0,
        1,
        7,
        511,
        512,
        513,
        4095,
        4096,
        4097,
        65_535,
        1 << 20,
        (1 << 20) + 1,
        (4 << 20) - 1,
        4 << 20,
        9_999_999,
    ]
    tensors: list[Tensor] = [(f"odd.{number:02}.{length}", "U8", [length]) for number, length in enumerate(lengths)]
    tensors += [(f"tiny.{number:03}", "U8", [1 + number * 37 % 700]) for number in range(500)]
    return tensors


def make(directory: Path, kind: str, layers: int = 0, width: int = 4096, scale: float = 1.0) -> int:
    """Makes a model in `directory`, which is created. Gives the bytes of its files."""
    directory.mkdir(parents=True, exist_ok=True)
    is_llama = kind.isdigit()
    pool_bytes = POOL_BYTES if is_llama and width > 1024 else POOL_BYTES_SMALL
    pool = memoryview(random.Random(directory.name).randbytes(pool_bytes))
    if is_llama:
        llama(directory, int(kind), layers, width, pool)
    else:
        tensors = {"many": lambda: many(scale), "small": lambda: small(scale), "odd": odd}[kind]()
        write_file(directory / "model.safetensors", tensors, pool, 1)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("kind", help="number of shards, or many, small or odd")
    parser.add_argument("layers", type=int, nargs="?", default=0)
    parser.add_argument("--width", type=int, default=4096, help="of a Llama-shaped model")
    parser.add_argument("--scale", type=float, default=1.0, help="of many and small")
    args = parser.parse_args()
    if not args.kind.isdigit() and args.kind not in ("many", "small", "odd"):
        parser.error(f"'{args.kind}' is neither a number of shards nor many, small or odd")
    if args.kind.isdigit() and not 1 <= int(args.kind) <= args.layers:
        parser.error("a model needs one layer for each shard at least")
    size = make(args.directory, args.kind, args.layers, args.width, args.scale)
    print(f"{args.directory}: {size / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
