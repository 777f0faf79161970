"""The loader over a dataset, or made like the user's own DataLoader."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_kit.config.settings import DataConfig
from ddp_kit.data import build_loader
from ddp_kit.distributed.world import World

CPU = torch.device("cpu")
ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, device=CPU)
DATA = TensorDataset(torch.arange(10.0))
BATCHES = [[0, 1, 2], [3, 4], [9]]


class WorkerNumber(Dataset[int]):
    """Says which DataLoader worker made each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        return -1 if info is None else info.id


def test_build_loader_yields_the_requested_batches() -> None:
    loader = build_loader(DATA, BATCHES, DataConfig(), ALONE, seed=0)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3, 4], [9]]


def test_build_loader_keeps_the_settings_of_the_users_loader() -> None:
    generator = torch.Generator()
    own = DataLoader(
        WorkerNumber(), batch_size=5, shuffle=True, num_workers=2, collate_fn=tuple, generator=generator, timeout=30
    )
    made = build_loader(own.dataset, BATCHES, DataConfig(), ALONE, seed=0, template=own)  # type: ignore[arg-type]
    assert (made.num_workers, made.generator, made.timeout) == (2, generator, 30)
    assert list(made) == [(0, 0, 0), (1, 1), (0,)], "tuples: its collate function made them"


class DrawsRandomNumbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def test_workers_draw_different_numbers_per_rank_and_the_same_in_the_next_run() -> None:
    def drawn(rank: int) -> list[float]:
        world = World(rank, 2, rank, 2, 0, CPU)
        config = DataConfig(num_workers=1)
        loader = build_loader(DrawsRandomNumbers(), [[0], [1]], config, world, seed=0)  # type: ignore[arg-type]
        return [batch.item() for batch in loader]

    assert drawn(0) == drawn(0)
    assert set(drawn(0)).isdisjoint(drawn(1))


def test_build_loader_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    list(build_loader(DATA, BATCHES, DataConfig(), ALONE, seed=0))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_num_workers_auto_leaves_a_core_for_the_rank() -> None:
    def workers(world: World) -> object:
        config = DataConfig(num_workers="auto")
        return build_loader(WorkerNumber(), BATCHES, config, world, seed=0).num_workers  # type: ignore[attr-defined]

    assert 0 <= workers(ALONE) <= 8  # type: ignore[operator]
    assert workers(World(0, 64, 0, 64, 0, CPU)) == 0
