"""What two processes run for test_tools_that_wrap_layers: every method under FSDP2 against the same model whole."""

import pytest
import torch
import torch.distributed as dist
from builders import decoder
from test_tools_that_wrap_layers import METHODS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from dape.training.parallel import shard

dist.init_process_group("gloo")
for method in METHODS:
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    whole, sharded = decoder(method).train(), shard(decoder(method).train())
    for model in (whole, sharded):
        model(ids, labels=ids).loss.backward()
    for (name, parameter), other in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), (method, name)
        if parameter.grad is not None:
            torch.testing.assert_close(other.grad.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-6)
model, ids = decoder(), torch.randint(0, 40, (1, 8))
refused = pytest.raises(ValueError, match="context_parallel gives each process a part of the tokens")
with context_parallel(init_device_mesh("cpu", (2,)), buffers=[ids], buffer_seq_dims=[1]), refused:
    model(ids, use_cache=False)
model(ids, use_cache=False)
if dist.get_rank() == 0:
    print(f"{len(METHODS)} methods")
dist.destroy_process_group()
