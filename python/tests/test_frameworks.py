"""Runs the recipes of docs/frameworks.md on several ranks, of which one runs out of memory.

Each recipe runs on two ranks on the CPU, with Ray also on four workers. In the second step one rank raises
`torch.OutOfMemoryError` once: before the forward pass, in it, or in the backward pass. After four steps the weights are
the same on all ranks, and equal to those of a run without a failure. Updates are plain SGD, because Adam would hide
gradients that are wrong by a factor.

Importing the frameworks takes longer than the runs: one process imports them all, and ranks are forked from it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import snippets
import snippets_frameworks as setups
import support

PAGE = support.ROOT / "docs" / "frameworks.md"
# The places of the failure in each run. The last run gives neither group= nor local=.
PLACES = ("nowhere", "before", "forward", "backward")
ALONE = "alone"
EXACT = 1e-12
# transformers computes the losses of causal language models in float32.
SINGLE = 1e-6
# bfloat16 has 8 bits of precision.
HALF = 1e-2
NO_GPU = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None, "CUDA_VISIBLE_DEVICES": ""}


def recipe(text: str) -> snippets.Block:
    """Returns the block of the page that contains this text."""
    found = [it for it in snippets.blocks(PAGE) if it.language == "python" and text in it.code]
    assert len(found) == 1, f"{len(found)} blocks of {PAGE.name} have {text!r}"
    return found[0]


# ---- a rank that runs out of memory ----


class Trap:
    """Raises out of memory once, in the second step, at a given place."""

    STEP = 1

    def __init__(self, place: str) -> None:
        self.place = place
        self.steps = 0
        self.fired = 0
        #: returns whether a module is the outermost one, whose call begins a forward pass
        self.is_outermost: Callable[[Any], bool] = lambda module: False

    def at(self, place: str) -> None:
        import torch

        if place == self.place and self.steps - 1 == self.STEP and not self.fired:
            self.fired += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Made up, at {place}")

    @contextlib.contextmanager
    def set(self, inside: Any, is_outermost: Callable[[Any], bool]) -> Any:
        """Hooks the calls of the outermost module, and both passes of a module inside it."""
        import torch

        def call(module: Any, _arguments: Any) -> None:
            if is_outermost(module):
                self.steps += 1
                self.at("before")

        def passed(_module: Any, _arguments: Any, outputs: Any) -> Any:
            return passing(self, outputs)

        handles = [torch.nn.modules.module.register_module_forward_pre_hook(call), inside.register_forward_hook(passed)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def passing(trap: Trap, outputs: Any) -> Any:
    """Returns the same outputs, with the trap in the forward and the backward pass."""
    import torch

    class Through(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_context: Any, tensor: Any) -> Any:
            trap.at("forward")
            return tensor.clone()

        @staticmethod
        def backward(_context: Any, grad: Any) -> Any:
            trap.at("backward")
            return grad

    if isinstance(outputs, tuple):
        return (Through.apply(outputs[0]), *outputs[1:])
    return Through.apply(outputs)


def weights(module: Any, buffers: bool = False) -> list[float]:
    import torch

    found = [getattr(it, "full_tensor", lambda it=it: it)() for it in module.parameters()]
    found += [it for it in module.buffers() if buffers]
    return list(torch.cat([it.detach().double().flatten() for it in found]).tolist())


def is_ddp(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def execute(code: str, names: dict[str, Any]) -> None:
    block = compile(code, str(PAGE), "exec", dont_inherit=True)
    exec(block, names)


def common_names() -> dict[str, Any]:
    import torch

    import cushion

    return {"torch": torch, "cushion": cushion, "loss_function": torch.nn.functional.mse_loss}


# ---- how each recipe is run on a rank ----


class Case:
    """A recipe: a text that identifies its block, and the setup around it."""

    text = ""
    package: str | None = None
    tolerance = EXACT
    #: whether the step runs in parts after a failure
    splits = True
    #: whether buffers are compared with those of a run without a failure; they may differ between ranks
    buffers = False

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.model = self.make()

    def make(self) -> Any:
        return setups.small_model()

    def run(self, code: str, trap: Trap) -> None:
        raise NotImplementedError

    def done(self) -> None:
        """Cleans up, so that another recipe can run in this process."""

    def weights(self) -> list[float]:
        return weights(self.model, self.buffers)


class Ddp(Case):
    text = "torch.nn.parallel.DistributedDataParallel(model)"

    def run(self, code: str, trap: Trap) -> None:
        _as_torchrun(self.rank)
        with trap.set(self.model[1], is_ddp):
            execute(code, {**common_names(), "model": self.model, "batches": setups.batches(self.rank)})


class DdpByItsModule(Ddp):
    """The program gives its own module as grads=, not the DDP around it."""

    def run(self, code: str, trap: Trap) -> None:
        inner = code.replace("grads=model", "grads=model.module")
        assert inner != code
        super().run(inner, trap)


class DdpFindsUnused(Ddp):
    """After its last reduction, DDP's C++ code begins another collective, of which parameters were used. The alarm of
    another rank may come in between: each rank waits there for a while."""

    def run(self, code: str, trap: Trap) -> None:
        import torch.distributed as dist

        finds = code.replace(
            "DistributedDataParallel(model)", "DistributedDataParallel(model, find_unused_parameters=True)"
        )
        assert finds != code
        all_reduce = dist.all_reduce

        def slow(*arguments: Any, **options: Any) -> Any:
            work = all_reduce(*arguments, **options)
            if options.get("async_op"):
                time.sleep(0.2)
            return work

        dist.all_reduce = slow
        try:
            super().run(finds, trap)
        finally:
            dist.all_reduce = all_reduce


class Fsdp2(Case):
    text = "fully_shard(model)"

    def run(self, code: str, trap: Trap) -> None:
        _as_torchrun(self.rank)
        with trap.set(self.model[1], lambda module: module is self.model):
            execute(code, {**common_names(), "model": self.model, "batches": setups.batches(self.rank)})


def _as_torchrun(rank: int) -> None:
    """Sets the variables of torchrun: the program creates its process group itself."""
    import torch.distributed as dist

    port = [ranks._free_port() if rank == 0 else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])


class BatchNorm(Case):
    """The recipe for models that see the whole batch: that of DDP without `split` and `loss`."""

    text = Ddp.text
    splits = False
    buffers = True

    def make(self) -> Any:
        import torch

        torch.manual_seed(0)
        nn = torch.nn
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)).double()

    def run(self, code: str, trap: Trap) -> None:
        whole = code.replace('split=cushion.split_batch, loss="mean", ', "")
        assert whole != code
        _as_torchrun(self.rank)
        with trap.set(self.model[2], is_ddp):
            execute(whole, {**common_names(), "model": self.model, "batches": setups.batches(self.rank)})


class BatchNormInEvaluation(BatchNorm):
    """Batch norm in evaluation uses its running statistics, so it can be split. DDP broadcasts its buffers in each
    forward pass."""

    splits = True

    def make(self) -> Any:
        return super().make().eval()

    def run(self, code: str, trap: Trap) -> None:
        _as_torchrun(self.rank)
        with trap.set(self.model[2], is_ddp):
            execute(code, {**common_names(), "model": self.model, "batches": setups.batches(self.rank)})


class Accelerate(Case):
    text = "accelerator.prepare"
    package = "accelerate"
    #: arguments of accelerate.Accelerator
    options: dict[str, Any] = {}

    def run(self, code: str, trap: Trap) -> None:
        names = self.names()
        with trap.set(self.model[1], is_ddp):
            execute(code, names)

    def names(self) -> dict[str, Any]:
        import torch
        from accelerate import Accelerator

        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        names = {**common_names(), "model": self.model, "optimizer": optimizer, "batches": setups.batches(self.rank)}
        return {**names, "accelerator": Accelerator(cpu=True, **self.options)}

    def done(self) -> None:
        _reset_accelerate()


def _reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Accumulating(Accelerate):
    """Two batches for each update. The gradients of the first exist when the second fails."""

    options = {"gradient_accumulation_steps": 2}


class Scaling(Accelerate):
    """With a GradScaler. Accelerate creates one only for GPUs, so it gets one for the CPU here."""

    options = {"gradient_accumulation_steps": 2}

    def names(self) -> dict[str, Any]:
        import torch

        names = super().names()
        names["accelerator"].scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return names


class HalfPrecision(Accelerate):
    options = {"mixed_precision": "bf16"}
    tolerance = HALF

    def make(self) -> Any:
        return super().make().float()

    def names(self) -> dict[str, Any]:
        names = super().names()
        return {**names, "batches": [(inputs.float(), targets.float()) for inputs, targets in names["batches"]]}


class Trainer(Case):
    """Hugging Face's Trainer, with a model whose loss is a mean, independent of the divisor that the Trainer passes."""

    text = "RetryTrainer"
    package = "transformers"
    #: arguments of TrainingArguments, and of the Trainer
    options: dict[str, Any] = {}
    more: dict[str, Any] = {}

    def make(self) -> Any:
        return setups.classifier()

    def middle(self) -> Any:
        return self.model.bert.encoder.layer[0]

    def data(self) -> list[dict[str, Any]]:
        return setups.sentences(8 * self.world * 4 * self.options.get("gradient_accumulation_steps", 1))

    def run(self, code: str, trap: Trap) -> None:
        names = {**common_names(), "transformers": importlib.import_module("transformers")}
        execute(code, names)
        with tempfile.TemporaryDirectory() as folder, trap.set(self.middle(), is_ddp):
            arguments = setups.arguments(folder, **self.options)
            trainer = names["RetryTrainer"](model=self.model, args=arguments, train_dataset=self.data(), **self.more)
            trainer.train()

    def done(self) -> None:
        _reset_accelerate()


class TrainerAccumulating(Trainer):
    options = {"gradient_accumulation_steps": 2}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


class TrainerOfSums(Trainer):
    """The sum of the losses is divided by the number that the Trainer passes, for all batches of an update."""

    options = {"gradient_accumulation_steps": 2}
    more = {"compute_loss_func": summed}


class TrainerOfRanks(TrainerOfSums):
    """Each rank divides by the number of its own labels."""

    options = {"average_tokens_across_devices": False}


class TrainerOfWords(Trainer):
    """A causal language model, which divides a sum too. The number of labels that count is random, and 0 in some
    rows."""

    options = {"gradient_accumulation_steps": 2}
    tolerance = SINGLE

    def make(self) -> Any:
        import torch

        library = importlib.import_module("transformers")
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        return library.LlamaForCausalLM(library.LlamaConfig(vocab_size=11, pad_token_id=0, **sizes)).double()

    def middle(self) -> Any:
        return self.model.model.layers[0]

    def data(self) -> list[dict[str, Any]]:
        import torch

        rows = super().data()
        generator = torch.Generator().manual_seed(5)
        for at, row in enumerate(rows):
            keeps = torch.rand(row["input_ids"].shape, generator=generator) < 0.6
            row["labels"] = torch.where(keeps & bool(at % 8 > 2), row["input_ids"], -100)
        return rows


class TrainerOfSmoothedWords(TrainerOfWords):
    """The Trainer computes the loss itself, and removes the labels from the batch for that."""

    options = {"label_smoothing_factor": 0.1}


class LightningByHand(Case):
    text = "self.manual_backward"
    package = "lightning"
    finds_unused = False

    def run(self, code: str, trap: Trap) -> None:
        import torch

        lightning = importlib.import_module("lightning.pytorch")
        names = {**common_names(), "lightning": lightning}
        execute(code, names)
        strategy = lightning.strategies.DDPStrategy(find_unused_parameters=self.finds_unused)
        options = {"accelerator": "cpu", "devices": self.world, "strategy": strategy, "max_epochs": 1}
        trainer = lightning.Trainer(**options, **setups.QUIET)
        loader = torch.utils.data.DataLoader(setups.batches(self.rank), batch_size=None)
        with trap.set(self.middle(), self.is_outermost):
            trainer.fit(names["Model"](self.model), loader)

    def middle(self) -> Any:
        return self.model[1]

    def is_outermost(self, module: Any) -> bool:
        # Lightning calls training_step inside DDP's forward pass.
        return module is self.model


class LightningFindsUnused(LightningByHand):
    finds_unused = True


class Lightning(LightningByHand):
    """With automatic optimization. The step contains DDP's forward pass, with its broadcast of the buffers."""

    text = "optimizer_closure"
    splits = False
    buffers = True

    def make(self) -> Any:
        return BatchNorm.make(self)  # type: ignore[arg-type]

    def middle(self) -> Any:
        return self.model[2]

    def is_outermost(self, module: Any) -> bool:
        return is_ddp(module)


CASES: dict[str, type[Case]] = {
    it.__name__: it
    for it in (Ddp, DdpByItsModule, DdpFindsUnused, Fsdp2, BatchNorm, BatchNormInEvaluation)
    + (Accelerate, Accumulating, Scaling, HalfPrecision)
    + (Trainer, TrainerAccumulating, TrainerOfSums, TrainerOfRanks, TrainerOfWords, TrainerOfSmoothedWords)
    + (LightningByHand, LightningFindsUnused, Lightning)
}


# ---- ranks ----


def on_rank(rank: int, world: int, name: str) -> dict[str, Any]:
    """Executes all runs of one recipe. Each failure is on another rank than the one before."""
    import cushion

    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="tests")
    code = recipe(CASES[name].text).code
    results: dict[str, Any] = {}
    for at, place in enumerate((*PLACES, ALONE)):
        before = cushion.retry_stats()
        trap = Trap(place if rank == at % world else "nowhere")
        case = CASES[name](rank, world)
        begun = case.weights() if place == "nowhere" else []
        results[place] = result = {"begun": begun}
        try:
            case.run(code.replace(', group="world"', "") if place == ALONE else code, trap)
            result["weights"] = case.weights()
        except Exception as error:
            if place != ALONE:
                raise
            result["error"] = f"{type(error).__name__}: {error}"
        case.done()
        after = cushion.retry_stats()
        result.update(fired=trap.fired, steps=trap.steps, **{it: after[it] - before[it] for it in after})
    return results


def run_on_ranks(names: list[str]) -> dict[str, Any]:
    """Returns the results of each recipe on both ranks, or the error."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    # Modules that each rank would otherwise import in its first step.
    for module in ("torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in names:
        package = CASES[name].package
        if package is not None:
            _import_for_ranks(package)
        try:
            results[name] = ranks.run(2, on_rank, name)
        except AssertionError:
            results[name] = traceback.format_exc()
    return results


def _import_for_ranks(package: str) -> None:
    import logging

    if package == "lightning":
        importlib.import_module("lightning.pytorch")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    elif package == "transformers":
        library = importlib.import_module("transformers")
        # transformers imports these at the first access.
        for name in ("Trainer", "TrainingArguments", "BertForSequenceClassification", "LlamaForCausalLM"):
            getattr(library, name)
    else:
        importlib.import_module(package)


def is_installed(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


@functools.cache
def results() -> dict[str, Any]:
    names = [name for name, case in CASES.items() if is_installed(case.package)]
    # In a fresh process: forked ones have the GPUs of the stand-ins, which frameworks would use.
    found: dict[str, Any] = support.call(run_on_ranks, names, changes=NO_GPU, warm=False, timeout=600)
    return found


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(map(abs, other))


class Checks(unittest.TestCase):
    """Checks of the runs of a recipe, on all ranks."""

    def check(self, everywhere: list[dict[str, Any]], case: type[Case]) -> None:
        whole = [it["nowhere"] for it in everywhere]
        self.assertEqual([it["retried"] for it in whole], [0] * len(whole))
        self.assertGreater(difference(whole[0]["begun"], whole[0]["weights"]), 10 * case.tolerance)
        for place in PLACES:
            with self.subTest(place):
                runs = [it[place] for it in everywhere]
                if not case.buffers:
                    self.assertEqual([it["weights"] for it in runs], [runs[0]["weights"]] * len(runs))
                for run, same in zip(runs, whole):
                    self.assertLessEqual(difference(run["weights"], same["weights"]), case.tolerance)
                if place == "nowhere":
                    continue
                self.assertEqual(sum(it["fired"] for it in runs), 1)
                self.assertEqual([it["retried"] for it in runs], [1] * len(runs))
                self.assertEqual([it["split"] > 0 for it in runs], [case.splits] * len(runs))

    def check_alone(self, everywhere: list[dict[str, Any]]) -> None:
        for run in everywhere:
            self.assertIn('Give group="world"', run[ALONE].get("error", "no error"))
            self.assertEqual(run[ALONE]["tries"], 0)


@support.needs_torch
class Recipes(Checks):
    """The tests are generated below, one for each recipe."""

    def check_case(self, name: str) -> None:
        case = CASES[name]
        if not is_installed(case.package):
            self.skipTest(f"{case.package} is not installed")
        everywhere = results()[name]
        if isinstance(everywhere, str):
            self.fail(everywhere)
        self.check(everywhere, case)
        with self.subTest("without group="):
            self.check_alone(everywhere)


def _test(name: str) -> Any:
    def test(self: Recipes) -> None:
        self.check_case(name)

    test.__doc__ = CASES[name].__doc__
    return test


for _name in CASES:
    setattr(Recipes, f"test_{_name}", _test(_name))


# ---- Ray ----


class Shown:
    """Records how a block calls a function of Ray."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def init(self, **given: Any) -> None:
        self.given = given


#: the present run of a Ray worker: the recipe gets its model and its batches from functions
_worker: dict[str, Any] = {}


def make_model() -> Any:
    _worker["model"] = setups.small_model()
    _worker["trapped"].enter_context(_worker["trap"].set(_worker["model"][1], is_ddp))
    return _worker["model"]


def fails_otherwise(_outputs: Any, _targets: Any) -> Any:
    raise ValueError("made up, and not out of memory")


def work(config: dict[str, Any]) -> None:
    """The training function of a worker. On its first start a step fails; on the second it executes all runs."""
    import ray.train
    import torch

    import cushion

    torch.set_num_threads(1)
    rank, world = (getattr(ray.train.get_context(), f"get_world_{what}")() for what in ("rank", "size"))
    names = {**common_names(), "__name__": "__main__", "ray": ray}
    names.update(make_model=make_model, make_batches=setups.batches)
    folder = Path(config["folder"])
    lives = folder / f"lives {world} {rank}"
    lives.touch()
    lives.write_text(lives.read_text() + "life ")
    is_first = config["dies"] and lives.read_text() == "life "
    results: dict[str, Any] = {"is_installed": cushion.is_installed()}
    for at, place in enumerate(PLACES[:1] if is_first else (*PLACES, ALONE)):
        before = cushion.retry_stats()
        trap = Trap(place if rank == at % world else "nowhere")
        results[place] = result = {"begun": weights(setups.small_model())}
        execute(config["code"].replace(', group="world"', "") if place == ALONE else config["code"], names)
        if is_first and rank == 1:
            names["loss_function"] = fails_otherwise
        with contextlib.ExitStack() as stack:
            _worker.update(trap=trap, trapped=stack)
            try:
                names["train"](None)
                result["weights"] = weights(_worker["model"])
            except RuntimeError as error:
                if place != ALONE:
                    (folder / f"error {world} {rank}").write_text(f"{type(error).__name__}: {error}")
                    raise
                result["error"] = str(error)
        after = cushion.retry_stats()
        result.update(fired=trap.fired, **{it: after[it] - before[it] for it in after})
    (folder / f"results {world} {rank}").write_text(json.dumps(results))


def run_on_ray(folder: str) -> dict[str, Any]:
    """Starts both worker groups on one cluster. Returns the results that the workers wrote."""
    import ray
    import ray.train.torch

    shown = Shown()
    execute(recipe("worker_process_setup_hook").code, {"ray": shown})
    small = {"num_cpus": 5, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 * support.MIB}
    ray.init(**small, **shown.given, _temp_dir=folder, log_to_driver=False, configure_logging=False)
    try:
        code = recipe("ray.train.torch.prepare_model").code
        names = {**common_names(), "__name__": "__main__", "ray": ray}
        execute(code, names)
        printed = names["trainer"]
        for workers in (2, 4):
            config = {"folder": folder, "code": code, "dies": workers == 2}
            scaling = printed.scaling_config if workers == 2 else ray.train.ScalingConfig(num_workers=workers)
            options = {"scaling_config": scaling, "run_config": printed.run_config}
            ray.train.torch.TorchTrainer(work, train_loop_config=config, **options).fit()
    finally:
        ray.shutdown()
    return {file.name: file.read_text() for file in Path(folder).iterdir() if " " in file.name}


@functools.cache
def ray_results() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # Ray writes results below the user's home by default.
        changes = {"HOME": folder, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        found: dict[str, Any] = support.call(run_on_ray, folder, changes=changes, warm=False, timeout=900)
    return found


@support.needs_torch
@unittest.skipUnless(is_installed("ray"), "ray is not installed")
class Ray(Checks):
    """Over the stand-ins, because the workers install Cushion. Ray gives them no GPU: all tensors are on the CPU."""

    def everywhere(self, world: int) -> list[dict[str, Any]]:
        return [json.loads(ray_results()[f"results {world} {rank}"]) for rank in range(world)]

    def test_two_workers(self) -> None:
        self.check(self.everywhere(2), Case)

    def test_four_workers(self) -> None:
        self.check(self.everywhere(4), Case)

    def test_workers_without_group_or_local(self) -> None:
        for world in (2, 4):
            self.check_alone(self.everywhere(world))

    def test_workers_install_cushion_as_they_start(self) -> None:
        for world in (2, 4):
            self.assertEqual([it["is_installed"] for it in self.everywhere(world)], [True] * world)

    def test_ray_restarts_the_workers_after_another_error(self) -> None:
        lives = {name: text for name, text in ray_results().items() if name.startswith("lives")}
        self.assertEqual({text for name, text in lives.items() if name.startswith("lives 2")}, {"life life "})
        self.assertEqual({text for name, text in lives.items() if name.startswith("lives 4")}, {"life "})


if __name__ == "__main__":
    unittest.main()
