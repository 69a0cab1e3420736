"""States taken apart into tensors and JSON, and put together again."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import thruway
import thruway.torch as ours
import torch
from thruway import _nest
from thruway._nest.common import at
from thruway.torch import _tensors


def again(state: Any, **options: Any) -> Any:
    """What a state is after it was taken apart, and its JSON was text."""
    nest = _nest.encode(state, **options)
    json.loads(nest.structure.encode())
    return _nest.decode(nest.structure, nest.groups)


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """That two states are equal to the last bit and type."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad), where
        assert bits(one) == bits(other), where
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    elif isinstance(one, np.generic):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), where
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other), where
    elif isinstance(one, complex):
        assert struct.pack("2d", one.real, one.imag) == struct.pack("2d", other.real, other.imag), where
    elif isinstance(one, dict):
        assert len(one) == len(other), where
        for (key, value), (other_key, other_value) in zip(one.items(), other.items(), strict=True):
            assert_same(key, other_key, f"a key of {where}")
            assert_same(value, other_value, at(where, key))
        assert getattr(one, "_metadata", None) == getattr(other, "_metadata", None)
        assert getattr(one, "default_factory", None) == getattr(other, "default_factory", None)
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other) and getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert one == other, where


def bits(tensor: torch.Tensor) -> bytes:
    raw = _over(tensor.detach().cpu())
    return raw.contiguous().numpy().tobytes()


def _over(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8)
    offset = tensor.storage_offset() * size
    strides = [*(stride * size for stride in tensor.stride()), 1]
    return raw.set_(tensor.resolve_conj().resolve_neg().untyped_storage(), offset, [*tensor.shape, size], strides)


PLAIN = [
    None, True, False, 0, 1, -1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**64), 7**9000,
    0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf"), 0.1 + 0.2,
    struct.unpack(">d", bytes.fromhex("fff80000deadbeef"))[0],
    complex(1, -0.0), complex(float("nan"), float("inf")), "", "text", "\0", "\u2028 \U0001f600", "\ud800", "a\udfffb",
    "!tuple", b"", b"\xff\0", bytearray(b"xyz"), range(3, 100, 7), range(2**70),
    [], (), {}, set(), frozenset(), OrderedDict(), [[]], ((),), ([],), [()], {"!tuple": [1]}, {"!": 1}, {"": 1},
    {1: "int", "1": "text", 1.5: 2, None: 3, "None": 4, (1, (2,)): 5, b"1": 6, frozenset({1, "a"}): 7, 2j: 8},
    {"\ud800": 9},
    {True: 1, 0: 2}, {"True": 1}, OrderedDict(b=1, a=2), OrderedDict({2: 1, "2": 2}), {1, 2.5, "a", (1, 2), None, b"x"},
    defaultdict(list, {"a": [1]}), defaultdict(None, {3: 1}), Counter({2: 1, 30: 2}), deque([1, (2,)]),
    deque([1, 2], maxlen=2), {"tensor": {"!tensor": ["x", "y"]}}, {"!encoded": 1}, {"format": "thruway nest"},
    torch.float32, torch.bfloat16, torch.Size([2, 0, 3]), torch.device("cpu"), torch.device("cuda:3"),
    np.float32(1.5), np.float64("nan"), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("äx"), np.bytes_(b"x"),
    np.str_(""), np.datetime64("2020-01-02"), ml_dtypes.bfloat16(1.5), np.dtype("float32"), np.dtype("<U3"),
    np.random.get_state(), random.getstate(), np.random.default_rng(3).bit_generator.state,
    np.random.Generator(np.random.MT19937(5)).bit_generator.state, torch.get_rng_state(),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PLAIN)))
def test_a_plain_value_comes_back_as_itself(number: int) -> None:
    value = PLAIN[number]
    for state in (value, {"a": value}, [value], (value,)):
        assert_same(state, again(state))
    if isinstance(value, (int, str, float)):
        assert_same({value: 1}, again({value: 1}))


def test_what_json_has_stands_in_it_as_it_is() -> None:
    state = {"lr": 0.001, "name": "AdamW", "steps": [1, 2], "nothing": None, "nested": {"yes": True}}
    assert json.loads(_nest.encode(state).structure)["state"] == state


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)))
def test_tensors_of_every_dtype_of_torch_come_back(name: str) -> None:
    dtype = getattr(torch, name.removeprefix("torch."))
    if dtype.itemsize not in (1, 2, 4, 8, 16) or name.startswith("torch.q"):
        with pytest.raises(thruway.InvalidInputError, match=r"state\['q'\]"):
            _nest.encode({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)})
        return
    generator = torch.Generator().manual_seed(3)
    for shape in ((), (0,), (5,), (3, 4), (2, 0, 3)):
        count = int(np.prod(shape)) * dtype.itemsize
        raw = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)
        strides = torch.empty(shape).stride()
        tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, strides)
        nest = _nest.encode({"a": tensor, "b": tensor.T if len(shape) == 2 else 0})
        for stored in nest.groups["state"].values():
            assert stored.dtype in _tensors.CODES and stored.is_contiguous()
        assert_same(tensor, _nest.decode(nest.structure, nest.groups)["a"])


@pytest.mark.parametrize(
    "dtype", ["?", "<i2", ">i4", "<f2", ">f8", "<f16", "<c16", ">c8", "<U3", "S2", "<M8[ns]", "<m8[s]"]
)
def test_arrays_of_numpy_s_dtypes_come_back(dtype: str) -> None:
    for shape in ((), (0,), (4,), (2, 3)):
        values = np.arange(int(np.prod(shape))) % 2
        array = values.astype("i8").astype(dtype).reshape(shape)
        assert_same(array, again({"a": array})["a"])
    turned = np.asfortranarray(array)
    back = again([turned])[0]
    assert_same(turned, back)
    assert back.flags.f_contiguous


def test_the_states_of_training_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [one.state_dict() for one in schedulers],
        "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
    }
    back = again(state)
    assert_same(state, back)
    assert type(back["model"]) is OrderedDict and back["model"]._metadata["1"] == {"version": 2}
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    torch.set_rng_state(back["rng"][0])
    random.setstate(back["rng"][1])
    np.random.set_state(back["rng"][2])


class Maker:
    """Random states from a seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.torch = random.Random(seed), torch.Generator().manual_seed(seed)
        self.storages = [torch.randint(0, 99, (240,), generator=self.torch, dtype=torch.int16) for _ in range(3)]

    def state(self, depth: int = 0) -> Any:
        kind = self.random.randrange(10 if depth < 5 else 5)
        if kind < 3:
            return self.random.choice(PLAIN)
        if kind == 3:
            return self.tensor()
        if kind == 4:
            dtype = self.random.choice(["f4", "i8", "u1", ">i2", "c16"])
            return np.arange(self.random.randrange(9)).astype(dtype)
        values = [self.state(depth + 1) for _ in range(self.random.randrange(5))]
        keys = [self.random.choice(["a", "b", "a.b", "a.b.c", 1, "1", None, ("x", 2), -0.5, b"k"]) for _ in values]
        pairs = dict(zip(keys, values, strict=True))
        return [values, tuple(values), pairs, OrderedDict(pairs), deque(values)][kind - 5]

    def tensor(self) -> torch.Tensor:
        storage = self.random.choice(self.storages)
        dtype = self.random.choice([torch.int16, torch.int32, torch.uint8, torch.float16, torch.complex64])
        length = storage.nbytes // dtype.itemsize
        shape = [self.random.randrange(5) for _ in range(self.random.randrange(4))]
        strides = [self.random.choice([0, 1, 2, 3, 4]) for _ in shape]
        span = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
        start = self.random.randrange(max(length - span, 1))
        return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), start, shape, strides)


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple, deque)) else []
    return [tensor for one in inner for tensor in tensors_of(one)]


@pytest.mark.parametrize("seed", range(150))
def test_any_state_comes_back_and_shares_what_it_shared(seed: int) -> None:
    state = [Maker(seed).state() for _ in range(4)]
    nest = _nest.encode(state, grouped=seed % 2 == 0)
    back = _nest.decode(nest.structure, nest.groups)
    assert_same(state, back)
    before, after = tensors_of(state), tensors_of(back)
    # A byte that is changed through one tensor is seen to change in the same others.
    for number in range(0, len(before), 3):
        if before[number].numel():
            for tensors in (before, after):
                first = _over(tensors[number])
                first[(0,) * first.dim()] ^= 1
            for one, other in zip(before, after, strict=True):
                assert bits(one) == bits(other)


def test_shared_memory_is_stored_once() -> None:
    whole = torch.arange(1000.0)
    weight = torch.randn(30, 20)
    state = {
        "model": {"head": weight, "embedding": weight, "turned": weight.T, "row": weight[3]},
        "views": {"a": whole[:600], "b": whole[400:], "c": whole[500]},
        "many": torch.ones(1, 3).expand(1 << 40, 3),
        "small part": torch.zeros(1 << 20)[5:7],
        "gaps": torch.arange(100).view(10, 10)[:, 3],
    }
    nest = _nest.encode(state)
    sizes = {group: sum(tensor.nbytes for tensor in tensors.values()) for group, tensors in nest.groups.items()}
    assert sizes == {"model": 2400, "views": 4000, "state": 12 + 8 + 80}
    back = _nest.decode(nest.structure, nest.groups)
    assert back["many"].shape == (1 << 40, 3) and back["many"].stride() == (0, 1)
    assert back["model"]["turned"].stride() == (1, 20)
    back["model"]["embedding"][3, 4] = 77
    assert back["model"]["head"][3, 4] == back["model"]["turned"][4, 3] == back["model"]["row"][4] == 77
    back["views"]["b"][100] = -1
    assert back["views"]["c"] == back["views"]["a"][500] == -1
    assert "embedding" not in nest.groups["model"] and nest.groups["model"]["head"].shape == (30, 20)


def test_whole_tensors_keep_their_name_and_shape_whatever_came_before() -> None:
    whole = torch.randn(4, 6)
    nest = _nest.encode({"model": {"part": whole[1:], "whole": whole, "also": whole}})
    assert {name: tensor.shape for name, tensor in nest.groups["model"].items()} == {"whole": (4, 6)}


def test_neighbours_in_one_storage_are_stored_apart() -> None:
    flat = torch.arange(10.0)
    nest = _nest.encode({"m": {"a": flat[:4].view(2, 2), "b": flat[4:]}})
    assert {name: list(tensor.shape) for name, tensor in nest.groups["m"].items()} == {"a": [2, 2], "b": [6]}


def test_strides_come_back_without_gaps() -> None:
    state = {
        "transposed": torch.randn(3, 4).T,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one": torch.randn(4, 1, 3).permute(2, 1, 0),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    back = again(state)
    assert_same({key: tensor.resolve_conj().resolve_neg() for key, tensor in state.items()}, back)
    for key in ("transposed", "channels last", "one"):
        assert back[key].stride() == state[key].stride(), key
    assert again(torch.arange(12)[::3]).stride() == (1,)


def test_parameters_stay_parameters() -> None:
    state = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
    ]
    state += [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2]
    back = again(state)
    assert [type(one) for one in back] == [torch.nn.Parameter] * 2 + [torch.Tensor] * 2
    assert [one.requires_grad for one in back] == [True, False, True, True]


def test_names_come_from_the_path_and_never_collide() -> None:
    one = [torch.full((1,), number) for number in range(12)]
    state = {
        "model": {"a.b": one[0], "a": {"b": one[1], "b~2": one[2]}, "__metadata__": one[3], 1: one[4], "1": one[5]},
        "../../etc/passwd": {"/x": one[6]},
        1: {"w": one[7]},
        "1": {"w": one[8]},
        "top": one[9],
        "state": {"top": one[10]},
        "\ud800": {"\udfff": one[11]},
    }
    nest = _nest.encode(state)
    assert list(nest.groups["model"]) == ["a.b", "a.b~2", "a.b~2~2", "__metadata__~2", "1", "1~2"]
    assert list(nest.groups["1"]) == ["w", "w~2"] and list(nest.groups["state"]) == ["top", "top~2"]
    assert_same(state, _nest.decode(nest.structure, nest.groups))
    assert nest.structure == _nest.encode(state).structure
    assert list(_nest.encode(state, grouped=False).groups) == [""]
    assert "model.a.b" in _nest.encode(state, grouped=False).groups[""]


def test_some_keys_of_a_state_need_only_their_tensors() -> None:
    shared = torch.ones(3)
    state = {"model": {"w": shared}, "ema": {"w": shared, "x": torch.zeros(2)}, 3: torch.ones(1), "step": 5}
    nest = _nest.encode(state)
    assert _nest.wanted(nest.structure, only=["ema"]) == {"model": {"w": "cpu"}, "ema": {"x": "cpu"}}
    assert _nest.wanted(nest.structure) == {"model": {"w": "cpu"}, "ema": {"x": "cpu"}, "state": {"3": "cpu"}}
    assert_same({"step": 5}, _nest.decode(nest.structure, {}, only=["step"]))
    part = {group: dict.fromkeys(names) for group, names in _nest.wanted(nest.structure, only=["model"]).items()}
    part["model"]["w"] = nest.groups["model"]["w"]
    assert_same({"model": {"w": shared}}, _nest.decode(nest.structure, part, only=["model"]))
    with pytest.raises(thruway.InvalidInputError, match="'optimizer'"):
        _nest.decode(nest.structure, nest.groups, only=["optimizer"])
    with pytest.raises(thruway.InvalidInputError, match="no dict"):
        _nest.decode(_nest.encode([1]).structure, {}, only=["a"])
    assert _nest.decode(_nest.encode(OrderedDict(a=1, b=2)).structure, {}, only=["b"]) == OrderedDict(b=2)


class Level(IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")
Self: list[Any] = []
Self.append({"self": Self})
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
WITH_ATTRIBUTE: Any = OrderedDict()
WITH_ATTRIBUTE.more = 1


class MyTensor(torch.Tensor):
    pass


REFUSED = {
    "enum": Level.HIGH,
    "namedtuple": Point(1, 2),
    "function": len,
    "lambda": lambda: 0,
    "class": dict,
    "object": object(),
    "fraction": Fraction(1, 3),
    "text with a class of its own": torch.__version__,
    "generator": torch.Generator(),
    "module": torch.nn.Linear(1, 1),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "subclass": torch.ones(3).as_subclass(MyTensor),
    "contains itself": Self,
    "too deep": DEEP,
    "objects": np.array([object()]),
    "record": np.zeros(2, dtype=[("a", "i4")]),
    "masked": np.ma.masked_array([1, 2], [0, 1]),
    "factory": defaultdict(lambda: 3),
    "attributes": WITH_ATTRIBUTE,
    "tensor as key": {torch.ones(1): 2},
    "tensor in key": {(1, torch.ones(1)): 2},
    "array in set": {Point(1, 2)},
    "memoryview": memoryview(b"x"),
    "freed": torch.ones(3),
}
REFUSED["freed"].untyped_storage().resize_(0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_by_its_path(what: str) -> None:
    with pytest.raises(thruway.InvalidInputError, match=r"state\['outer'\]\[1\]\['inner'\]"):
        _nest.encode({"outer": [1, {"inner": REFUSED[what]}]})


def test_a_list_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert_same({"a": shared, "b": [shared, shared]}, again({"a": shared, "b": [shared, shared]}))


def test_an_encoder_takes_what_has_no_place() -> None:
    class Fractions:
        def encode(self, value: Any) -> Any:
            if isinstance(value, Fraction):
                return {"fraction": (value.numerator, value.denominator), "tensor": torch.ones(2)}
            return NotImplemented

        def decode(self, value: Any) -> Any:
            return Fraction(*value["fraction"])

    state = {"a": [Fraction(1, 3), {"x": Fraction(2, 5)}], "b": {"fraction": 3}}
    for encoder in (Fractions(), (Fractions().encode, Fractions().decode)):
        nest = _nest.encode(state, encoder)
        assert list(nest.groups["a"]) == ["0.tensor", "1.x.tensor"]
        assert _nest.decode(nest.structure, nest.groups, encoder) == state
    with pytest.raises(thruway.InvalidInputError, match=r"state\['a'\]\[0\] was encoded by an encoder"):
        _nest.decode(nest.structure, nest.groups)
    with pytest.raises(thruway.InvalidInputError, match=r"state\['c'\]"):
        _nest.encode({"c": object()}, Fractions())

    def broken(value: Any) -> Any:
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        _nest.decode(nest.structure, nest.groups, (Fractions().encode, broken))


def test_a_structure_survives_a_file(tmp_path: Path) -> None:
    base = torch.arange(7, dtype=torch.bfloat16)
    state = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": base,
        "c": base[2:4].view(torch.float32),
        "d": torch.zeros(1, 1),
    }
    state["n"] = np.arange(3.0).astype(ml_dtypes.bfloat16)
    state["complex"] = torch.randn(3, dtype=torch.complex128)
    nest = _nest.encode(state, grouped=False)
    tensors = {
        name: torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16) if isinstance(value, np.ndarray) else value
        for name, value in nest.groups[""].items()
    }
    ours.save_file(tensors, tmp_path / "a", {"structure": nest.structure})
    for backend in ("mmap", "pread"):
        loaded = ours.load_file(tmp_path / "a", backend=backend)
        back = _nest.decode(nest.structure, {"": loaded})
        assert_same(state, back)
        back["b"][2:4] = 0
        assert back["c"].tolist() == [0.0]


def hostile() -> list[str]:
    nest = _nest.encode({"m": {"w": torch.ones(2, 3).T, "x": torch.ones(4, dtype=torch.complex128)}, "n": np.ones(3)})
    good = json.loads(nest.structure)

    def whole(state: Any, stored: Any = None) -> str:
        return json.dumps({**good, "state": state, **({} if stored is None else {"stored": stored})})

    bodies = [
        None,
        1,
        "x",
        [],
        [1],
        ["m"],
        ["m", "w", 3],
        {},
        [[]],
        [None, None],
        [["a", 1], ["a", 2]],
        [[[], 1]],
        "zz",
        1.5,
    ]
    tags = ["tensor", "array", "tuple", "dict", "OrderedDict", "state_dict", "defaultdict", "Counter", "deque", "set"]
    tags += [
        "frozenset",
        "range",
        "int",
        "float",
        "complex",
        "str",
        "bytes",
        "bytearray",
        "numpy.scalar",
        "numpy.dtype",
    ]
    tags += ["torch.dtype", "torch.Size", "torch.device", "encoded", "unknown", "", "torch.load", "numpy.load"]
    views = [
        {"view": [0, [7], [1]]}, {"view": [-4, [1], [1]]}, {"view": [0, [2, 2], [1]]}, {"view": [0, [1 << 62], [0]]},
        {"view": [1 << 62, [1], [1]]}, {"view": [1, [1], [1]]}, {"view": 3}, {"view": [0, [-1], [1]]},
        {"view": [0, [1], [1]], "dtype": "float128"}, {"view": [0, [1], [1]], "dtype": "load"}, {"expand": [1 << 63]},
        {"expand": [7, 7]}, {"expand": "x"}, {"view": [0, [2], [1 << 62]]},
    ]  # fmt: skip
    notes = [
        {"strides": [1, 1 << 40]}, {"strides": [1]}, {"strides": [-1, 1]}, {"strides": "x"},
        {"dtype": "float32", "shape": [5]}, {"dtype": "float32"}, {"dtype": 3, "shape": []}, {"align": "x"},
        {"align": -1}, [], 3,
    ]  # fmt: skip
    made = ["", "{", "[]", "3", '{"format": "thruway nest"}', "[" * 100_000, '{"a":' * 100_000, "NaN"]
    made += [nest.structure.replace('"version":1', '"version":1,"version":1'), nest.structure[:-1]]
    made += [whole({f"!{tag}": body}) for tag in tags for body in bodies]
    made += [whole({"!tensor": ["m", "w", how]}) for how in views] + [whole({"!array": ["n", "n", {"view": 1}]})]
    made += [whole({"!tensor": ["m", "w"]}, {"m": {"w": one}}) for one in notes]
    made += [whole({"!tensor": ["m", "w"]}, {"m": 3}), whole({"!tensor": ["m", "w"]}, [])]
    made += [
        whole({"!array": ["state", "n"]}, {"state": {"n": {"dtype": dtype, "shape": [3]}}})
        for dtype in ("O", "<O8", "V8", 3)
    ]
    made += [
        whole(json.loads("[" * 300 + "]" * 300)),
        json.dumps(good).replace('"state": {', '"state": {"x": 1e999, ', 1),
    ]
    made += [json.dumps({**good, "version": 2}), json.dumps({**good, "more": 1}), json.dumps({**good, "stored": 1})]
    return made


@pytest.mark.parametrize("text", hostile())
def test_a_hostile_structure_is_an_error_of_ours_or_a_value(text: str) -> None:
    nest = _nest.encode({"m": {"w": torch.ones(2, 3).T, "x": torch.ones(4, dtype=torch.complex128)}, "n": np.ones(3)})
    try:
        value = _nest.decode(text, nest.groups)
    except thruway.ThruwayError as error:
        assert str(error)
    else:
        # Few of these say something that is valid: of types that are plain.
        assert type(value).__module__ in ("builtins", "collections", "numpy", "numpy.dtypes", "torch")
    try:
        _nest.wanted(text)
    except thruway.ThruwayError as error:
        assert str(error)


@pytest.mark.parametrize("seed", range(20))
def test_a_structure_with_any_piece_replaced_is_an_error_of_ours_or_a_value(seed: int) -> None:
    nest = _nest.encode([Maker(seed).state() for _ in range(4)])
    chosen = random.Random(seed)
    for _ in range(40):
        structure = json.loads(nest.structure)
        holder, key = chosen.choice(list(_places(structure)))
        holder[key] = chosen.choice(
            [None, -1, 1 << 40, 2.5, "x", [], {}, [[]], {"!tuple": 3}, {"!tensor": ["state", "0"]}]
        )
        try:
            _nest.decode(json.dumps(structure), nest.groups)
        except thruway.ThruwayError as error:
            assert str(error)


def _places(node: Any) -> Any:
    keys = range(len(node)) if isinstance(node, list) else node if isinstance(node, dict) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def test_tensors_that_are_not_there_are_named() -> None:
    nest = _nest.encode({"model": {"w": torch.ones(2)}})
    for tensors in ({}, {"model": {}}, {"model": {"v": torch.ones(2)}}):
        with pytest.raises(
            thruway.MalformedError, match=r"state\['model'\]\['w'\] is the tensor 'w' of the group 'model'"
        ):
            _nest.decode(nest.structure, tensors)
