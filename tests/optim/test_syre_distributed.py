"""Syre under torchrun: two processes of DDP give one process's numbers, and shards of FSDP2 the whole parameter's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from assay.optim import Syre

STEPS = 5


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))


def rows():
    g = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=g), torch.randn(16, 4, generator=g)


def trained(net, mine, store, sharded=False):
    """Trains with AdamW and then SGD; returns the anchors and the final parameters, whole and in order."""
    whole = (lambda p: p.full_tensor()) if sharded else (lambda p: p)
    x, y = (part[mine] for part in rows())
    for optimizer in (
        torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.2),
        torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.2),
    ):
        syre = Syre(optimizer, sigma=1.0, store=store)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        anchors = [whole(syre.anchor(p)).flatten() for p in net.parameters()]
        syre.remove()
    return torch.cat(anchors), torch.cat([whole(p.detach()).flatten() for p in net.parameters()])


def worker(out):
    """One rank: half of the rows, under DDP with either store, then under FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)  # ranks differ in their global generators, as they do where data are augmented
    mine = slice(8 * rank, 8 * rank + 8)
    found = {}
    for store in ("seed", "tensor"):
        net = nn.parallel.DistributedDataParallel(model())
        found[store] = [part.tolist() for part in trained(net, mine, store)]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    found["fsdp"] = [part.tolist() for part in trained(net, mine, "tensor", sharded=True)]
    try:
        Syre(torch.optim.AdamW(net.parameters(), weight_decay=0.1))
    except ValueError as refused:
        found["refused"] = str(refused)
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as usual


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    anchors, weights = trained(model(), slice(None), "seed")
    for found in ranks:
        assert "need store" in found["refused"]
        for how in ("seed", "tensor", "fsdp"):
            theirs = [torch.tensor(part) for part in found[how]]
            assert torch.equal(theirs[0], anchors)  # the same on every rank
            torch.testing.assert_close(theirs[1], weights, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    worker(sys.argv[1])
