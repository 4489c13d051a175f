"""Hugging Face's Trainer with Cushion: training steps that run again, in parts, when memory runs out.

    pip install transformers accelerate
    python examples/python/hf_trainer.py
    torchrun --nproc-per-node 2 examples/python/hf_trainer.py --short 1      # rank 1 runs out of memory

`RetryTrainer` is the only change to a program. The example runs on GPUs or on the CPU. `--short RANK` makes memory run
out once on a rank, in the forward pass of the second step. The losses are the same with and without it. Without
transformers, Accelerate or PyTorch it prints SKIPPED.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from typing import Any


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(0)


for package, name in (("torch", "PyTorch"), ("transformers", "transformers"), ("accelerate", "Accelerate")):
    if importlib.util.find_spec(package) is None:
        skip(f"{name} is not installed")

import torch

import cushion

if torch.cuda.is_available():
    # Before TrainingArguments are created, which use CUDA.
    cushion.install()

import transformers

ROWS, WORDS, VOCABULARY = 96, 12, 32


class RetryTrainer(transformers.Trainer):
    """Runs steps that do not fit in parts, on all ranks together. Their gradients are those of the whole batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        # The Trainer does this inside the step, after cushion.retry has checked which layers are in training.
        model.train()
        return cushion.retry(
            super().training_step,
            model,
            inputs,
            num_items_in_batch,
            split=self.parts_of,
            weight=self.labels_of,
            grads=model,
            group="world",
        )

    def labels_of(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> int:
        """Returns the number of labels of a part, as the Trainer counts them."""
        labels = inputs["labels"]
        return int((labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum())

    def parts_of(self, number: int, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Returns the arguments of each part, with its share of the divisor of the loss. Parts then add up to the
        whole, both for models that use the divisor and for models that compute a mean."""
        parts = [arguments[0] for arguments, _ in cushion.split_batch.rows(*inputs)(number, inputs)]
        if num_items_in_batch is None:
            return [((model, part), {}) for part in parts]
        whole = self.labels_of(model, inputs)
        shares = [self.labels_of(model, part) / whole if whole else 1.0 for part in parts]
        return [((model, part, float(num_items_in_batch) * share), {}) for part, share in zip(parts, shares)]


class Shortage:
    """Raises out of memory once, in the second forward pass."""

    def __init__(self, is_here: bool) -> None:
        self.is_here = is_here
        self.passes = 0

    def __call__(self, *_: Any) -> None:
        self.passes += 1
        if self.is_here and self.passes == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Made up by --short")


def sentences() -> list[dict[str, torch.Tensor]]:
    """Returns sequences of words in a fixed order, which a model can learn."""
    starts = torch.randint(0, VOCABULARY, (ROWS, 1))
    words = (starts + torch.arange(WORDS)) % VOCABULARY
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in words]


def main() -> None:
    parser = argparse.ArgumentParser(description="A Trainer whose steps run again when memory runs out.")
    parser.add_argument("--short", type=int, metavar="RANK", help="the rank that runs out of memory")
    asked = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=WORDS, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.model.layers[1].register_forward_pre_hook(Shortage(rank == asked.short))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = RetryTrainer(model=model, args=arguments, train_dataset=sentences())
        # Each update is printed below.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    if rank == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"update {entry['step']}: loss {float(entry['loss']):.4f}")
        figures = cushion.retry_stats()
        print(f"steps: {figures['calls']}; tries: {figures['tries']}; in parts: {figures['split']}")
        print("ok")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
