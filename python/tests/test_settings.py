"""The sources of options, their order, and the errors for bad values."""

from __future__ import annotations

import unittest

import support  # noqa: F401

from cushion import _cushion

# Each option with a value other than its default, as written in a conf string.
OPTIONS = {
    "large_segment_size_mb": "32",
    "max_split_size_mb": "64",
    "max_non_split_rounding_mb": "48",
    "roundup_power2_divisions": "4",
    "garbage_collection_threshold": "0.5",
    "expandable_segments": "True",
    "paged": "False",
    "page_mb": "32",
    "trim_ms": "500",
    "per_process_memory_fraction": "0.25",
    "graph_capture_record_stream_reuse": "True",
    "wait_ms": "0",
    "wait_total_ms": "60000",
    "wait_base_us": "20",
    "wait_factor": "1.5",
    "wait_ceiling_ms": "10",
    "max_tries": "9",
    "callback_ms": "70",
    "skip_rungs": "borrow+wait",
    "spill_limit_mb": "1024",
    "spill_over_mb": "64",
}


def gather(environ: dict[str, str] | None = None, **arguments: object) -> _cushion.Settings:
    return _cushion.gather_settings(environ or {}, **arguments)


class Defaults(unittest.TestCase):
    def test_no_settings(self) -> None:
        settings = gather()
        self.assertEqual((settings.policy, settings.conf, settings.log), ("paged", "", False))
        self.assertIsNone(settings.torch_variable)

    def test_other_variables_do_not_matter(self) -> None:
        settings = gather({"PATH": "/bin", "CUSHION_PACKAGE": "x", "CUSHION_UNKNOWN": "1"})
        self.assertEqual((settings.policy, settings.conf, settings.log), ("paged", "", False))


class Arguments(unittest.TestCase):
    def test_policy(self) -> None:
        for policy in ("segments", "expandable", "paged"):
            self.assertEqual(gather(policy=policy).policy, policy)
            self.assertEqual(gather({"CUSHION_POLICY": policy}).policy, policy)

    def test_conf(self) -> None:
        settings = gather(conf="max_split_size_mb:64,expandable_segments:True")
        self.assertEqual(settings.policy, "expandable")
        self.assertIn("max_split_size_mb:64", settings.conf)
        self.assertEqual(gather(conf="expandable_segments:False").policy, "paged")
        self.assertEqual(gather(conf="paged:False").policy, "segments")
        self.assertEqual(gather(conf="paged:False,expandable_segments:True").policy, "expandable")
        settings = gather(conf="paged:True,page_mb:32")
        self.assertEqual(settings.policy, "paged")
        self.assertIn("page_mb:32", settings.conf)

    def test_log(self) -> None:
        self.assertTrue(gather(log=True).log)
        self.assertFalse(gather({"CUSHION_LOG": "1"}, log=False).log)


class Variables(unittest.TestCase):
    def test_every_option_has_one(self) -> None:
        for option, value in OPTIONS.items():
            with self.subTest(option):
                self.assertIn(f"{option}:{value}", gather({f"CUSHION_{option.upper()}": value}).conf)

    def test_the_table_has_all_documented_options(self) -> None:
        text = (support.ROOT / "docs" / "options.md").read_text()
        for option in OPTIONS:
            self.assertIn(f"`CUSHION_{option.upper()}`", text)
        self.assertEqual(text.count("](#"), len(OPTIONS))

    def test_policy_conf_and_log(self) -> None:
        settings = gather({"CUSHION_POLICY": "expandable", "CUSHION_CONF": "max_split_size_mb:80", "CUSHION_LOG": "1"})
        self.assertEqual((settings.policy, settings.log), ("expandable", True))
        self.assertIn("max_split_size_mb:80", settings.conf)
        self.assertFalse(gather({"CUSHION_LOG": "0"}).log)

    def test_receipts_and_injected_failures(self) -> None:
        settings = gather({"CUSHION_RECEIPTS": "a.jsonl", "CUSHION_INJECT": "every=9"})
        self.assertEqual((settings.receipts, settings.inject), ("a.jsonl", "every=9"))
        settings = gather({"CUSHION_RECEIPTS": "a", "CUSHION_INJECT": "every=9"}, receipts="b", inject="")
        self.assertEqual((settings.receipts, settings.inject), ("b", None))
        with self.assertRaisesRegex(ValueError, "^inject: `x` is not a rule"):
            gather(inject="x")

    def test_variables_of_pytorch(self) -> None:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            with self.subTest(name):
                settings = gather({name: "expandable_segments:True,max_split_size_mb:64"})
                self.assertEqual(settings.policy, "expandable")
                self.assertIn("max_split_size_mb:64", settings.conf)
                self.assertEqual(settings.torch_variable, (name, "expandable_segments:True,max_split_size_mb:64"))

    def test_only_the_first_variable_of_pytorch_is_used(self) -> None:
        settings = gather(
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        )
        self.assertEqual(settings.policy, "paged")
        self.assertEqual(settings.torch_variable, ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"))

    def test_backend_is_removed_from_the_variable_of_pytorch(self) -> None:
        settings = gather({"PYTORCH_CUDA_ALLOC_CONF": "backend:native,max_split_size_mb:64"})
        self.assertEqual(settings.torch_variable, ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"))


class WhoWins(unittest.TestCase):
    def test_each_source_overrides_the_one_before(self) -> None:
        environ: dict[str, str] = {}
        for name, value in (
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:30"),
            ("CUSHION_CONF", "max_split_size_mb:40"),
            ("CUSHION_MAX_SPLIT_SIZE_MB", "50"),
        ):
            environ[name] = value
            self.assertIn(f"max_split_size_mb:{value.rpartition(':')[2]}", gather(environ).conf)
        self.assertIn("max_split_size_mb:60", gather(environ, conf="max_split_size_mb:60").conf)

    def test_policy(self) -> None:
        environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        self.assertEqual(gather({**environ, "CUSHION_CONF": "expandable_segments:False"}).policy, "paged")
        self.assertEqual(gather({**environ, "CUSHION_CONF": "paged:False"}).policy, "segments")
        environ["CUSHION_CONF"] = "expandable_segments:True"
        environ["CUSHION_POLICY"] = "segments"
        self.assertEqual(gather(environ).policy, "segments")
        environ["CUSHION_EXPANDABLE_SEGMENTS"] = "True"
        self.assertEqual(gather(environ).policy, "expandable")
        self.assertEqual(gather(environ, policy="segments").policy, "segments")
        self.assertEqual(gather(environ, policy="paged").policy, "paged")
        # `expandable_segments:False` does not select `segments`, and does not end it.
        not_expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        self.assertEqual(gather(not_expandable).policy, "paged")
        self.assertEqual(gather({**not_expandable, "CUSHION_POLICY": "segments"}).policy, "segments")
        self.assertEqual(gather({"CUSHION_POLICY": "segments"}, conf="expandable_segments:False").policy, "segments")
        self.assertEqual(gather({**environ, "CUSHION_PAGED": "True"}).policy, "paged")
        for policy in ("segments", "expandable"):
            self.assertEqual(gather({"CUSHION_POLICY": "paged"}, policy=policy).policy, policy)

    def test_options_of_different_sources_are_combined(self) -> None:
        settings = gather(
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUSHION_PER_PROCESS_MEMORY_FRACTION": "0.5"},
            conf="max_split_size_mb:64",
        )
        self.assertEqual(settings.policy, "expandable")
        for part in ("per_process_memory_fraction:0.5", "max_split_size_mb:64"):
            self.assertIn(part, settings.conf)


class Errors(unittest.TestCase):
    def assert_names(self, source: str, environ: dict[str, str] | None = None, **arguments: object) -> None:
        with self.assertRaises(ValueError) as raised:
            gather(environ, **arguments)
        self.assertIn(source, str(raised.exception))

    def test_errors_name_their_source(self) -> None:
        self.assert_names("policy", policy="best")
        self.assert_names("no_such", conf="no_such:1")
        self.assert_names("max_split_size_mb", conf="max_split_size_mb:x")
        self.assert_names("CUSHION_POLICY", {"CUSHION_POLICY": "best"})
        self.assert_names("CUSHION_CONF", {"CUSHION_CONF": "no_such:1"})
        self.assert_names("CUSHION_LOG", {"CUSHION_LOG": "maybe"})
        self.assert_names("PYTORCH_CUDA_ALLOC_CONF", {"PYTORCH_CUDA_ALLOC_CONF": "no_such:1"})
        for option in OPTIONS:
            with self.subTest(option):
                name = f"CUSHION_{option.upper()}"
                self.assert_names(name, {name: "not good"})

    def test_out_of_range(self) -> None:
        for conf in (
            "max_split_size_mb:19",
            "large_segment_size_mb:10",
            "garbage_collection_threshold:1.0",
            "per_process_memory_fraction:1.5",
            "per_process_memory_fraction:-0.1",
            "roundup_power2_divisions:3",
            "expandable_segments:true",
            "paged:true",
            "page_mb:1",
            "page_mb:1025",
            "max_split_size_mb",
            "max_split_size_mb:99999999999999999999999",
        ):
            with self.subTest(conf), self.assertRaises(ValueError):
                gather(conf=conf)

    def test_keys_of_pytorch_alone_are_not_errors(self) -> None:
        settings = gather(conf="backend:native,pinned_num_register_threads:8,release_lock_on_cudamalloc:True")
        self.assertEqual(settings.conf, "")

    def test_wrong_types(self) -> None:
        for arguments in ({"policy": 1}, {"conf": b"x"}, {"log": "1"}):
            with self.subTest(arguments), self.assertRaises(TypeError):
                gather(**arguments)


class AtRunTime(unittest.TestCase):
    def test_configure_is_all_or_nothing(self) -> None:
        before = _cushion.conf()
        with self.assertRaises(ValueError):
            _cushion.configure("max_split_size_mb:64,no_such:1")
        self.assertEqual(_cushion.conf(), before)

    def test_configure_returns_whether_keys_of_others_remain(self) -> None:
        self.assertEqual(
            _cushion.configure("backend:native,pinned_num_register_threads:8"),
            ["backend", "pinned_num_register_threads"],
        )

    def test_without_backend(self) -> None:
        for conf, rest in (
            ("backend:native", ""),
            ("backend:native,max_split_size_mb:64", "max_split_size_mb:64"),
            ("max_split_size_mb:64,backend:cudaMallocAsync", "max_split_size_mb:64"),
            ("roundup_power2_divisions:[256:1,>:8],backend:native", "roundup_power2_divisions:[256:1,>:8]"),
            ("", ""),
        ):
            self.assertEqual(_cushion.without_backend(conf), rest)


if __name__ == "__main__":
    unittest.main()
