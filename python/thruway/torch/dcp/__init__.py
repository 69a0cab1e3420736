"""PyTorch's distributed checkpoints (DCP) as safetensors files, written and read by every rank at once.

    import torch.distributed.checkpoint as dcp
    from thruway.torch.dcp import Reader, Writer

    dcp.save(state, storage_writer=Writer("/nvme/run/step-1000"))
    dcp.load(state, storage_reader=Reader("/nvme/run/step-1000"))  # with any number of ranks

A checkpoint is a directory on a filesystem that all ranks share. Each rank writes its shards, which are synced; then
the first one writes `thruway.dcp.json`, which makes a checkpoint of them. Until then there is none, or the one before.
"""

from thruway.torch.dcp._reader import Reader
from thruway.torch.dcp._writer import Writer

__all__ = ["Reader", "Writer"]
