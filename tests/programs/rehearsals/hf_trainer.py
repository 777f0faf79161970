"""transformers' Trainer, which resumes from its newest checkpoint. Argument: --output_dir FOLDER."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

folder = sys.argv[sys.argv.index("--output_dir") + 1]
torch.manual_seed(0)
words = torch.randint(50, (160, 12))
data = [{"input_ids": row, "labels": row} for row in words]
config = GPT2Config(
    vocab_size=50, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
)
arguments = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=4,
    num_train_epochs=4,
    save_steps=6,
    logging_steps=5,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=1,
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
newest = get_last_checkpoint(folder) if Path(folder).is_dir() else None
trainer.train(resume_from_checkpoint=newest)
