"""`thruway.torch` on the CPU, beside the reference package."""

from __future__ import annotations

import gc
import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch as reference
import thruway
import thruway.torch as ours
import torch
from thruway.torch import _tensors

DTYPES = sorted(_tensors.DTYPES.items())
BACKENDS = ("mmap", "pread")


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = {}
    for code, dtype in DTYPES:
        # The format counts half bytes, and torch pairs of them: a single pair is no single number.
        for shape in ((0,), (3, 0, 2), (4, 6), (1000, 333), *([()] if code != "F4" else [])):
            count = int(torch.tensor(shape).prod()) if shape else 1
            raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            if dtype == torch.bool:
                raw = raw % 2
            made[f"{code} {shape}"] = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return made


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        raw = [x.reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1) for x in (tensor, other[name])]
        assert torch.equal(*raw) if tensor.numel() else True, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, backend: str) -> None:
    saved = tensors_of_every_kind()
    ours.save_file(saved, tmp_path / "a.safetensors", {"format": "pt"})
    assert_same_bits(saved, ours.load_file(tmp_path / "a.safetensors", backend=backend))
    assert_same_bits(saved, ours.load(ours.save(saved)))


def test_the_reference_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    saved = {name: tensor for name, tensor in tensors_of_every_kind().items() if not name.startswith("F4")}
    ours.save_file(saved, tmp_path / "ours.safetensors", {"a": "b"})
    assert_same_bits(saved, reference.load_file(tmp_path / "ours.safetensors"))
    reference.save_file(saved, tmp_path / "theirs.safetensors", {"a": "b"})
    for backend in BACKENDS:
        assert_same_bits(saved, ours.load_file(tmp_path / "theirs.safetensors", backend=backend))


def test_small_files_are_the_reference_s_very_bytes(tmp_path: Path) -> None:
    saved = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(7)}
    for metadata in (None, {"format": "pt"}):
        assert ours.save(saved, metadata) == reference.save(saved, metadata)
        ours.save_file(saved, tmp_path / "ours", metadata)
        assert (tmp_path / "ours").read_bytes() == reference.save(saved, metadata)


def test_what_the_reference_refuses_to_save_is_refused(tmp_path: Path) -> None:
    whole = torch.zeros(10)
    refused = {
        "not a dictionary": ([whole], ValueError),
        "not a tensor": ({"a": [1.0]}, ValueError),
        "sparse": ({"a": torch.eye(3).to_sparse()}, ValueError),
        "not contiguous": ({"a": torch.zeros(3, 4).T}, ValueError),
        "shared": ({"a": whole, "b": whole[2:5]}, RuntimeError),
        "meta": ({"a": torch.empty(3, device="meta")}, RuntimeError),
        "unknown dtype": ({"a": torch.zeros(2, dtype=torch.complex128)}, ValueError),
        "a name that is no text": ({1: whole}, ValueError),
    }
    for what, (tensors, kind) in refused.items():
        with pytest.raises(kind) as raised:
            ours.save_file(tensors, tmp_path / "a")
        assert isinstance(raised.value, thruway.SafetensorError), what
        with pytest.raises(kind):
            ours.save(tensors)
    assert not list(tmp_path.iterdir())


def test_neighbours_in_one_storage_are_not_shared_memory(tmp_path: Path) -> None:
    whole = torch.arange(10)
    ours.save_file({"a": whole[:5], "b": whole[5:]}, tmp_path / "a")
    assert ours.load_file(tmp_path / "a")["b"].tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_outlives_its_file_and_its_siblings_and_may_be_changed(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "a.safetensors"
    ours.save_file({f"t{number}": torch.full((100_000,), number) for number in range(10)}, path)
    before = path.read_bytes()
    loaded = ours.load_file(path, backend=backend)
    kept = loaded.pop("t7")
    kept[0] = -1
    assert path.read_bytes() == before
    del loaded
    path.unlink()
    gc.collect()
    assert kept[0] == -1 and (kept[1:] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_directory_of_shards_is_one_model(tmp_path: Path, backend: str) -> None:
    saved = {f"layer.{number}": torch.randn(300, 100) for number in range(9)}
    ours.save_file(saved, tmp_path / "model", max_shard_bytes=250_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved.keys()
    for path in (tmp_path / "model", tmp_path / "model/model.safetensors.index.json"):
        assert_same_bits(saved, ours.load_file(path, backend=backend))


def test_a_receipt_tells_what_happened(tmp_path: Path) -> None:
    receipts: list[thruway.Receipt] = []
    moved: list[int] = []
    saved = {"a": torch.zeros(1 << 20)}
    ours.save_file(saved, tmp_path / "a", receipt=receipts.append)
    ours.load_file(tmp_path / "a", receipt=receipts.append, progress=moved.append)
    # What is saved has a header, here of a page.
    assert [one.bytes for one in receipts] == [(4 << 20) + 4096, 4 << 20] and moved[-1] == 4 << 20
    told = receipts[1].to_dict()
    assert json.loads(json.dumps(told)) == told
    assert sum(told["paths"].values()) == 4 << 20 and told["files"][0]["parts"][0]["reason"]
    assert "GB/s" in repr(receipts[1])


def test_data_that_begins_at_an_odd_byte_is_read_right(write_file) -> None:
    values = torch.arange(100, dtype=torch.float64)
    path = write_file({"a": ("F64", [100], values.numpy().tobytes())}, pad=" " * 3)
    for pad in range(9):
        path = write_file({"a": ("F64", [100], values.numpy().tobytes())}, pad=" " * pad)
        for backend in BACKENDS:
            assert torch.equal(ours.load_file(path, backend=backend)["a"], values)
        assert torch.equal(ours.load(path.read_bytes())["a"], values)


def test_errors_are_of_the_kinds_that_programs_catch(tmp_path: Path, write_file) -> None:
    with pytest.raises(FileNotFoundError):
        ours.load_file(tmp_path / "nothing")
    with pytest.raises(thruway.MalformedError):
        ours.load(b"\0" * 4)
    good = ours.save({"a": torch.zeros(8)})
    for cut in (4, 12, len(good) - 1):
        (tmp_path / "cut").write_bytes(good[:cut])
        with pytest.raises(thruway.SafetensorError):
            ours.load_file(tmp_path / "cut")
        with pytest.raises(thruway.SafetensorError):
            ours.load(good[:cut])
    with pytest.raises(thruway.UnsupportedError, match="F6_E2M3"):
        ours.load_file(write_file({"a": ("F6_E2M3", [4], b"abc")}))
    with pytest.raises(ValueError, match="backend"):
        ours.load_file(tmp_path / "cut", backend="bogus")
    if not thruway.device_count():
        with pytest.raises((RuntimeError, AssertionError)):
            ours.load_file(tmp_path / "cut", device="cuda:0")
    if os.geteuid():
        (tmp_path / "cut").chmod(0)
        with pytest.raises(PermissionError):
            ours.load_file(tmp_path / "cut")


def test_arguments_that_cannot_be_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard"):
        ours.save_file({"a": torch.ones(3)}, tmp_path / "a", max_shard_bytes=-1)
    with pytest.raises(ValueError, match="metadata"):
        ours.save_file({"a": torch.ones(3)}, tmp_path / "a", ["b"])
    with pytest.raises(TypeError, match="load_file"):
        ours.load(3)
    assert ours.load(bytearray(ours.save({"a": torch.ones(3)})))["a"].sum() == 3


def test_a_tensor_whose_memory_is_gone_is_refused_and_not_read(tmp_path: Path) -> None:
    for left in (0, 8):
        tensor = torch.ones(1000)
        tensor.untyped_storage().resize_(left)
        for save in (lambda one: ours.save_file(one, tmp_path / "a"), ours.save):
            with pytest.raises(ValueError, match="has no memory"):
                save({"a": tensor})
    assert not list(tmp_path.iterdir())


def test_half_a_pair_of_f4_is_refused(write_file) -> None:
    path = write_file({"a": ("F4", [2, 3], b"123")})
    for backend in BACKENDS:
        with pytest.raises(thruway.UnsupportedError, match="even"):
            ours.load_file(path, backend=backend)


def test_a_file_that_became_a_pipe_does_not_hang(tmp_path: Path) -> None:
    ours.save_file({"a": torch.ones(3)}, tmp_path / "a")
    opened = thruway.safe_open(tmp_path / "a", "pt")
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    with pytest.raises(thruway.ChangedError):
        opened.get_tensor("a")


def test_numbers_are_not_bytes() -> None:
    for bad in (5, 10**12, [1, 2], -1):
        with pytest.raises(TypeError, match="bytes of a file"):
            ours.load(bad)


def test_a_required_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    ours.save_file({"a": torch.zeros(8)}, tmp_path / "a")
    with pytest.raises(thruway.PathUnavailableError):
        ours.load_file(tmp_path / "a", path="direct")


def test_errors_can_be_pickled() -> None:
    """Worker processes send them to their parents."""
    with pytest.raises(thruway.NotFoundError) as raised:
        ours.load_file("/nothing/here")
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is thruway.NotFoundError and str(again) == str(raised.value)
    assert (again.filename, again.kind, again.hint) == ("/nothing/here", "not found", raised.value.hint)
    assert again.errno == raised.value.errno


@pytest.mark.parametrize(
    ("shape", "nbytes", "offsets"),
    [
        ([2, 3], 24, [0, 24, 48]),
        ([2, 3], 24, [256, 280, 304]),
        ([2, 3], 24, [0, 256, 512]),
        ([6], 24, [0, 24, 256]),
        ([1, 6, 1], 24, [24]),
        ([], 4, [0, 4, 8]),
        ([0, 3], 0, [0, 0, 0]),
    ],
)
def test_tensors_of_a_block_of_memory_are_those_at_their_offsets(
    shape: list[int], nbytes: int, offsets: list[int]
) -> None:
    block = torch.arange(1024, dtype=torch.int16).to(torch.uint8)
    names = [f"tensor {offset} {number}" for number, offset in enumerate(offsets)]
    made: dict[str, torch.Tensor] = {}
    _tensors.make(block, [("F32", shape, nbytes, names, offsets)], made)
    assert list(made) == names
    for name, offset in zip(names, offsets, strict=True):
        tensor = made[name]
        assert (tensor.dtype, list(tensor.shape)) == (torch.float32, shape)
        assert tensor.is_contiguous()
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), block[offset : offset + nbytes])
        assert not nbytes or tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()


def test_tensors_that_share_memory_may_be_changed_in_place_while_gradients_are_tracked() -> None:
    made: dict[str, torch.Tensor] = {}
    _tensors.make(torch.zeros(64, dtype=torch.uint8), [("F32", [4], 16, ["a", "b"], [0, 16])], made)
    weight = torch.ones(4, requires_grad=True)
    made["a"].add_(weight).sum().backward()
    assert weight.grad is not None
    assert made["b"].eq(0).all()
    assert made["b"]._version == 0
    made["b"].requires_grad_()
