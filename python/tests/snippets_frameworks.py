"""The setups of the blocks in docs/frameworks.md: a model, batches, and the frameworks themselves.

`test_snippets.py` runs the blocks in one process. `test_frameworks.py` runs them on several ranks, with failures, and
with its own models. The test of a block whose framework is not installed is skipped."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import unittest
from collections.abc import Callable
from typing import Any


def needed(package: str) -> Any:
    """Imports a framework; skips the test if it is not installed."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        raise unittest.SkipTest(f"{package.partition('.')[0]} is not installed")
    return importlib.import_module(package)


def small_model() -> Any:
    """Returns a model for batches of 4 columns, in float64, with fixed weights."""
    import torch

    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(rank: int = 0, number: int = 4) -> list[tuple[Any, Any]]:
    """Returns batches of 8 rows, different on each rank."""
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    shapes = [(8, 4), (8, 1)]
    return [tuple(torch.randn(shape, generator=generator).double() for shape in shapes) for _ in range(number)]


def training() -> dict[str, Any]:
    import torch

    return {"model": small_model(), "batches": batches(), "loss_function": torch.nn.functional.mse_loss}


def has_learnt(model: Any) -> None:
    """Checks that the block has updated the weights once for each batch."""
    import cushion

    changed = any(not same.equal(now) for same, now in zip(small_model().parameters(), model.parameters()))
    if not changed:
        raise AssertionError("the block has trained nothing")
    if cushion.retry_stats()["calls"] < len(batches()):
        raise AssertionError(f"cushion.retry ran {cushion.retry_stats()} for {len(batches())} batches")


def accelerate() -> dict[str, Any]:
    import torch

    names = training()
    names["accelerator"] = needed("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    return {**names, "after": lambda after: has_learnt(after["model"])}


def transformers() -> dict[str, Any]:
    def after(names: dict[str, Any]) -> None:
        import cushion

        model = classifier()
        with tempfile.TemporaryDirectory() as folder:
            trainer = names["RetryTrainer"](model=model, args=arguments(folder), train_dataset=sentences(32))
            trainer.train()
        if cushion.retry_stats()["calls"] != 4:
            raise AssertionError(f"cushion.retry ran {cushion.retry_stats()} for 4 batches")

    return {"transformers": needed("transformers"), "after": after}


def classifier() -> Any:
    """Returns a model whose loss is a mean, independent of the divisor that the Trainer passes."""
    import torch

    library = needed("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = library.BertConfig(vocab_size=11, max_position_embeddings=16, num_labels=3, **sizes, **no_dropout)
    return library.BertForSequenceClassification(config).double()


def sentences(number: int) -> list[dict[str, Any]]:
    """Returns data for a classifier with 3 classes and 11 words."""
    import torch

    generator = torch.Generator().manual_seed(3)
    words = torch.randint(1, 11, (number, 8), generator=generator)
    labels = torch.randint(0, 3, (number,), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": it} for row, it in zip(words, labels)]


def arguments(folder: str, **changes: Any) -> Any:
    """Returns the arguments of a Trainer that runs 4 steps of 8 rows and writes nothing."""
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    data = {"per_device_train_batch_size": 8, "max_steps": 4, "train_sampling_strategy": "sequential"}
    cpu = {"use_cpu": True, "dataloader_pin_memory": False}
    return needed("transformers").TrainingArguments(folder, **{**quiet, **plain, **data, **cpu, **changes})


def lightning() -> dict[str, Any]:
    import torch

    def after(names: dict[str, Any]) -> None:
        net = small_model()
        trainer = names["lightning"].Trainer(accelerator="cpu", max_epochs=1, **QUIET)
        trainer.fit(names["Model"](net), torch.utils.data.DataLoader(batches(), batch_size=None))
        has_learnt(net)

    names = {"lightning": needed("lightning.pytorch"), "loss_function": torch.nn.functional.mse_loss}
    return {**names, "after": after}


#: options of a Lightning Trainer that writes nothing
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}

SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
}
