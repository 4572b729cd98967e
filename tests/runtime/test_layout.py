"""Every message says what it consists of where that differs: no two need be alike."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evenpipe.runtime.channel import Layouts, shapes_heard, shapes_told
from evenpipe.runtime.connections import open_channels

SHAPES = [[(3, 1, 16), ()], [], [(5,)]]
TOLD = [(8, 16, 1 << 40), (), (3,), *[(n,) * (n % 7) for n in range(40)]]


def tell_and_hear(rank, store_path, results):
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    channels = open_channels([("layout", 0, 1)], "gloo", "cpu")
    layouts = Layouts(channels["layout", 0, 1])
    if rank == 0:
        for sizes in TOLD:
            layouts.tell(sizes)
        for shapes in SHAPES:
            layouts.tell(shapes_told([torch.empty(shape) for shape in shapes]))
    else:
        results.put(([layouts.next() for _ in TOLD], [shapes_heard(layouts.next()) for _ in SHAPES]))
    dist.barrier()
    dist.destroy_process_group()


def test_what_is_told_is_heard_in_order(tmp_path):
    results = mp.get_context("fork").Queue()
    torch.set_num_threads(1)
    mp.start_processes(tell_and_hear, (str(tmp_path / "store"), results), nprocs=2, start_method="fork")
    assert results.get() == (TOLD, SHAPES)
