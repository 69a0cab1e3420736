"""Loading and saving torch tensors, with the functions of `safetensors.torch` and more.

`load_file`, `save_file`, `load`, `save`, `load_model` and `save_model` are the reference's, with further options.
With a path or an open file, `save` and `load` are what `torch.save` and `torch.load` are, for any training state and
without pickle. `Checkpointer` saves the checkpoints of a training run, beside it too.
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
from thruway.torch._load import load_file
from thruway.torch._module import StateError, load_model, save_model
from thruway.torch._ranks import Ranks
from thruway.torch._save import SharedMemoryError, save_file
from thruway.torch._state import load, save
from thruway.torch._stream import stream
from thruway.torch.checkpointer import Checkpointer

__all__ = [
    "Checkpointer",
    "Names",
    "Ranks",
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
