"""PyTorch Lightning with Cushion: training steps that run again, in parts, when memory runs out.

    pip install lightning
    python examples/python/lightning_habits.py

With Lightning's manual optimization, `training_step` runs forward and backward, so both can be tried again. Without
Lightning (`lightning` or `pytorch_lightning`), PyTorch or a GPU the example prints SKIPPED and the reason.
"""

from __future__ import annotations

import importlib.util
import sys


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(0)


if importlib.util.find_spec("torch") is None:
    skip("PyTorch is not installed")
if not any(importlib.util.find_spec(package) for package in ("lightning", "pytorch_lightning")):
    skip("Lightning is not installed")

import torch

if not torch.cuda.is_available():
    skip("there is no CUDA GPU")

import cushion

cushion.install()

if importlib.util.find_spec("lightning"):
    import lightning.pytorch as lightning
else:
    import pytorch_lightning as lightning

ALLOWED = 1 << 30
WIDTH = 1024
LAYERS = 4
ROWS = 1 << 16
BATCHES = 3


class Module(lightning.LightningModule):
    """Few parameters, and large activations for the backward pass: 8 KiB per row and layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scales = torch.nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            rows = torch.tanh(rows * scale)
        return rows.mean(dim=1)

    def forward_and_backward(self, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(inputs), wanted)
        self.manual_backward(loss)
        return loss.detach()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = cushion.retry(
            self.forward_and_backward,
            *batch,
            split=cushion.split_batch,
            loss="mean",
            # The model as the strategy has wrapped it, for example in DDP.
            grads=self.trainer.model,
            group="world",
        )
        # Outside the step, which may run several times: the update happens once.
        optimizer.step()
        print(f"step {batch_idx + 1}: {len(batch[0])} rows, loss {loss.item():.5f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    torch.manual_seed(0)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(ALLOWED / total)
    inputs = torch.randn(BATCHES * ROWS, WIDTH)
    data = torch.utils.data.TensorDataset(inputs, torch.tanh(inputs).mean(dim=1))
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=ROWS))
    figures = cushion.retry_stats()
    print(f"steps: {figures['calls']}; in parts: {figures['split']}; tries: {figures['tries']}")
    print("ok")


if __name__ == "__main__":
    main()
