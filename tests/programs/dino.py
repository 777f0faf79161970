"""Self-distillation as in DINO, to be planned: weight_norm, a frozen teacher, a GPU that the script names itself."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig

warnings.simplefilter("ignore", FutureWarning)  # weight_norm is deprecated
DEVICE = torch.device("cuda")


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
        self.blocks, self.norm = nn.Sequential(*layer), nn.BatchNorm1d(32)
        self.last = nn.utils.weight_norm(nn.Linear(32, 64, bias=False))
        self.last.weight_g.data.fill_(1)
        self.last.weight_g.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.normalize(self.norm(self.blocks(x).mean(1)), dim=-1))
        return found


class Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Backbone().cuda(), Backbone().to(DEVICE)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(requires_grad=False)
        self.register_buffer("center", torch.zeros(64, device="cuda"))


def loss_fn(model: Dino, batch: Any) -> Tensor:
    views = batch[0].cuda(non_blocking=True).to(0)
    with torch.no_grad():
        target = F.softmax((model.teacher(views) - model.center) / 0.04, -1)
    return -(target * F.log_softmax(model.student(views) / 0.1, -1)).sum(-1).mean()


model = Dino().to("cuda:0")
trained = [each for each in model.parameters() if each.requires_grad]
trainer = Trainer(model, torch.optim.AdamW(trained), loss_fn, TrainerConfig(max_steps=2, global_batch_size=8))
trainer.fit(TensorDataset(torch.randn(64, 5, 32)))
