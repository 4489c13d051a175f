"""Calls that must happen once per step: an optimizer's update, and the unscaling of a GradScaler. A step that makes
them inside `cushion.retry` is tried again if that is right, and refused if they would happen twice."""

from __future__ import annotations

import _thread
import threading
import unittest
from typing import Any

import support  # puts the package under test on the path
from exact import ExactCase

import cushion


class Updates(ExactCase):
    def note(self, error: BaseException) -> str:
        # Python 3.10 has no notes.
        return " ".join(getattr(error, "__notes__", ["an optimizer has changed the parameters"]))

    def test_inside_a_step_that_may_be_split(self) -> None:
        """Refused at the first call, without a shortage: in parts there would be several updates."""
        model, inputs = self.plain(), self.torch.randn(8, 6)
        optimizer = self.torch.optim.AdamW(model.parameters(), 0.1)
        before = [parameter.detach().clone() for parameter in model.parameters()]

        @cushion.retry(split=cushion.split_batch, loss="mean", grads=model)
        def step(inputs: Any) -> Any:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        with self.assertRaisesRegex(RuntimeError, r"AdamW\.step\(\) is called inside a step that may run in parts"):
            step(inputs)
        self.assert_equal_bits([parameter.detach() for parameter in model.parameters()], before)

    def test_no_retry_after_an_update(self) -> None:
        model, inputs = self.plain(), self.torch.randn(8, 6)
        optimizer = self.torch.optim.SGD(model.parameters(), 0.1)
        calls: list[int] = []

        def step(inputs: Any) -> None:
            calls.append(1)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if fails:
                raise self.out_of_memory()

        fails = True
        with self.assertRaises(RuntimeError) as raised:
            cushion.retry(step, inputs, grads=model)
        self.assertEqual(len(calls), 1)
        self.assertIn("an optimizer has changed the parameters", self.note(raised.exception))
        # A whole step may update if nothing fails.
        fails = False
        cushion.retry(step, inputs, grads=model)

    def test_a_failure_before_the_update(self) -> None:
        torch = self.torch
        inputs, updated = torch.randn(8, 6), []
        for failures in (0, 2):
            torch.manual_seed(0)
            model = self.plain()
            optimizer = torch.optim.Adam(model.parameters(), 0.1)

            def step(inputs: Any) -> None:
                nonlocal failures
                model(inputs).square().mean().backward()
                if failures > 0:
                    failures -= 1
                    raise self.out_of_memory()
                optimizer.step()

            cushion.retry(step, inputs, grads=optimizer)
            updated.append([parameter.detach().clone() for parameter in model.parameters()])
        self.assert_equal_bits(*updated)

    def test_no_retry_after_a_failed_update(self) -> None:
        """Some parameters may have been updated by then."""
        calls: list[int] = []
        model, inputs = self.plain(), self.torch.randn(8, 6)

        class Fails(self.torch.optim.SGD):  # type: ignore[misc, name-defined]
            def step(test, closure: Any = None) -> Any:  # noqa: N805
                raise self.out_of_memory()

        optimizer = Fails(model.parameters(), 0.1)

        def step(inputs: Any) -> None:
            calls.append(1)
            model(inputs).square().mean().backward()
            optimizer.step()

        with self.assertRaises(RuntimeError) as raised:
            cushion.retry(step, inputs, grads=model)
        self.assertEqual(len(calls), 1)
        self.assertIn("an optimizer has changed the parameters", self.note(raised.exception))

    def test_on_a_thread_of_autograd(self) -> None:
        """With tensors on a GPU, hooks of backward() run on threads that Python did not start."""
        model, inputs = self.plain(), self.torch.randn(8, 6)
        optimizer = self.torch.optim.SGD(model.parameters(), 0.1)
        seen: list[BaseException | None] = []

        def update() -> None:
            try:
                optimizer.step()
            except RuntimeError as error:
                seen.append(error)
            else:
                seen.append(None)
            finally:
                done.release()

        def hook(*_: Any) -> None:
            _thread.start_new_thread(update, ())
            done.acquire()

        done = threading.Lock()
        done.acquire()
        model[2].bias.register_post_accumulate_grad_hook(hook)
        calls: list[int] = []

        def step(inputs: Any) -> Any:
            calls.append(1)
            loss = model(inputs).square().mean()
            loss.backward()
            if fails:
                raise self.out_of_memory()
            return loss.detach()

        fails = False
        cushion.retry(step, inputs, split=cushion.split_batch, loss="mean", grads=model)
        self.assertIn("SGD.step() is called inside a step that may run in parts", str(seen[0]))
        fails = True
        with self.assertRaises(RuntimeError) as raised:
            cushion.retry(step, inputs, grads=model)
        self.assertEqual((len(calls), seen[1:]), (2, [None]))
        self.assertIn("an optimizer has changed the parameters", self.note(raised.exception))
        # Outside backward(), a thread that Python did not start belongs to no attempt.
        _thread.start_new_thread(update, ())
        done.acquire()
        self.assertIsNone(seen[-1])

    def test_in_a_hook_of_a_parameter_on_a_gpu(self) -> None:
        torch = self.torch
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        threads: list[int] = []

        def hook(parameter: Any) -> None:
            threads.append(threading.get_ident())
            optimizer.step()

        model.weight.register_post_accumulate_grad_hook(hook)

        def step(rows: Any) -> None:
            model.weight.view(2, 2).backward(torch.empty(2, 2, device="cuda"))

        with self.assertRaisesRegex(RuntimeError, r"SGD\.step\(\) is called inside a step that may run in parts"):
            cushion.retry(step, torch.zeros(4, 1), split=cushion.split_batch, loss="mean", grads=model)
        self.assertNotIn(threading.get_ident(), threads)

    def test_an_update_on_another_thread(self) -> None:
        """The program trains another model at the same time."""
        model, other, inputs = self.plain(), self.plain(), self.torch.randn(8, 6)
        optimizer = self.torch.optim.SGD(other.parameters(), 0.1)
        updates: list[str] = []

        def update() -> None:
            optimizer.step()
            updates.append("done")

        def hook(*_: Any) -> None:
            thread = threading.Thread(target=update)
            thread.start()
            thread.join()

        model[2].bias.register_post_accumulate_grad_hook(hook)

        def step(inputs: Any) -> Any:
            self.at_most(4, inputs)
            loss = model(inputs).square().mean()
            loss.backward()
            return loss.detach()

        cushion.retry(step, inputs, split=cushion.split_batch, loss="mean", grads=model)
        self.assertEqual(updates, ["done"] * 2)


class Scalers(ExactCase):
    def scaler(self) -> Any:
        return self.torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def test_a_whole_step_that_unscales_and_clips(self) -> None:
        """The second try unscales again, with the same result as a step without a failure."""
        torch = self.torch
        inputs, found = torch.randn(8, 6), []
        for failures in (0, 1, 2):
            torch.manual_seed(0)
            model, scaler = self.plain(), self.scaler()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            left = failures

            def step(inputs: Any) -> Any:
                nonlocal left
                loss = model(inputs).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                if left > 0:
                    left -= 1
                    raise self.out_of_memory()
                return loss.detach()

            loss = cushion.retry(step, inputs, grads=optimizer)
            scaler.step(optimizer)
            scaler.update()
            state = [loss, torch.tensor(scaler.get_scale()), *(it.detach() for it in model.parameters())]
            found.append(state)
        self.assertEqual(float(found[0][1]), 2048.0)
        for got in found[1:]:
            self.assert_equal_bits(got, found[0])

    def test_a_step_of_the_scaler_that_skips_the_update(self) -> None:
        """A GradScaler skips the update if gradients are infinite, so such a step may be tried again."""
        torch = self.torch
        model, scaler = self.plain(), self.scaler()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inputs = torch.full((8, 6), float("inf"))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        left = [1]

        def step(inputs: Any) -> None:
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if left[0] > 0:
                left[0] -= 1
                raise self.out_of_memory()

        cushion.retry(step, inputs, grads=optimizer)
        # Halved once, not for each try.
        self.assertEqual(scaler.get_scale(), 512.0)
        self.assert_equal_bits([parameter.detach() for parameter in model.parameters()], before)

    def test_inside_a_step_that_may_be_split(self) -> None:
        torch = self.torch
        model, scaler, inputs = self.plain(), self.scaler(), torch.randn(8, 6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for call in ("unscale_", "step", "update"):

            def step(inputs: Any) -> Any:
                loss = model(inputs).square().mean()
                scaler.scale(loss).backward()
                getattr(scaler, call)(*(() if call == "update" else (optimizer,)))
                return loss.detach()

            with self.assertRaisesRegex(RuntimeError, rf"GradScaler\.{call}\(\) is called inside a step"):
                cushion.retry(step, inputs, split=cushion.split_batch, loss="mean", grads=optimizer)

    def test_outside_a_step_in_parts(self) -> None:
        torch = self.torch
        inputs, found = torch.randn(8, 6), []
        for room in (8, 3):
            torch.manual_seed(0)
            model, scaler = self.plain(), self.scaler()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

            @cushion.retry(split=cushion.split_batch, loss="mean", grads=optimizer)
            def step(inputs: Any) -> Any:
                loss = model(inputs).square().mean()
                scaler.scale(loss).backward()
                self.at_most(room, inputs)
                return loss.detach()

            for _ in range(3):
                optimizer.zero_grad()
                step(inputs)
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
            self.assertEqual(scaler.get_scale(), 8192.0)
            found.append([parameter.detach() for parameter in model.parameters()])
        self.assert_close(*found)


if __name__ == "__main__":
    unittest.main()
