"""Loading and saving torch tensors, with the functions of `safetensors.torch` and more.

`load_file`, `save_file`, `load`, `save`, `load_model` and `save_model` are the reference's, with further options.
`stream` hands tensors over one by one, `load_into` fills a module in place, and `thruway.torch.distributed` loads with
many ranks.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError("thruway.torch needs PyTorch: pip install torch", name="torch") from None

from thruway._select import Names, Shard, expert_names
from thruway.torch._into import load_into
from thruway.torch._load import load, load_file
from thruway.torch._module import StateError, load_model, save_model
from thruway.torch._save import SharedMemoryError, save, save_file
from thruway.torch._stream import stream

__all__ = [
    "Names",
    "Shard",
    "SharedMemoryError",
    "StateError",
    "expert_names",
    "load",
    "load_file",
    "load_into",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "stream",
]
