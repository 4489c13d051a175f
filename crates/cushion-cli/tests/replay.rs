//! `cushion replay`, run as a command.

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;
    use std::process::{Command, Output};

    use serde_json::Value;

    fn trace(name: &str) -> String {
        let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces"));
        folder.join(format!("{name}.pickle.gz")).display().to_string()
    }

    fn cushion(args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_cushion")).args(args).output().unwrap()
    }

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    fn json(output: &Output) -> Vec<Value> {
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_trace_that_fits() {
        let trace = trace("stream_offload");
        let output = cushion(&["replay", &trace]);
        assert_eq!(output.status.code(), Some(0));
        let expected = "\
trace                     policy      allocs  live peak     floor  reserved peak  excess    driver  result
stream_offload.pickle.gz  segments      3577   9.85 GiB  9.85 GiB      12.08 GiB  1.2264   6.59 ms  fits
stream_offload.pickle.gz  expandable    3577   9.85 GiB  9.85 GiB      10.00 GiB  1.0154  22.73 ms  fits
stream_offload.pickle.gz  paged         3577   9.85 GiB  9.85 GiB       9.88 GiB  1.0029  16.33 ms  fits
";
        assert_eq!(text(&output.stdout), expected);
        assert_eq!(text(&output.stderr), "");
    }

    #[test]
    fn json_has_a_line_for_each_trace_and_policy() {
        let traces = [trace("stream_offload"), trace("graphs_serving")];
        let output = cushion(&["replay", "--json", &traces[0], &traces[1]]);
        assert_eq!(output.status.code(), Some(0));
        let rows = json(&output);
        assert_eq!(rows.len(), 6);
        for (row, (trace, policy)) in rows.iter().zip([
            (&traces[0], "segments"),
            (&traces[0], "expandable"),
            (&traces[0], "paged"),
            (&traces[1], "segments"),
            (&traces[1], "expandable"),
            (&traces[1], "paged"),
        ]) {
            assert_eq!(row["trace"], **trace);
            assert_eq!(row["policy"], policy);
            assert_eq!(row["ladder"], "torch");
            assert_eq!(row["oom"], Value::Null);
            for key in ["events", "allocs", "live_peak_bytes", "reserved_peak_bytes", "retries"] {
                assert!(row[key].is_u64(), "{key}: {row}");
            }
            for key in ["malloc", "free", "create", "map", "set_access", "unmap", "release"] {
                assert!(row["driver"][key].is_u64(), "{key}: {row}");
            }
            assert!(row["driver"]["time_us"].as_f64().unwrap() > 0.0);
            let ratio = row["reserved_peak_bytes"].as_f64().unwrap()
                / row["live_peak_bytes"].as_f64().unwrap();
            assert!((row["excess"].as_f64().unwrap() - ratio).abs() < 1e-12);
        }
        assert_eq!(rows[0]["same_address"], 3577);
        assert_eq!(rows[1]["same_address"], Value::Null);
    }

    #[test]
    fn out_of_memory_is_exit_code_1_with_the_figures() {
        let trace = trace("llama_varlen.capped24");
        let args = ["replay", &trace, "--capacity", "24GiB", "--verify", "--json"];
        let output = cushion(&[&args[..], &["--policy", "segments"]].concat());
        assert_eq!(output.status.code(), Some(1));
        let row = &json(&output)[0];
        assert_eq!(row["same_address"], row["allocs"]);
        assert_eq!(row["oom"]["event"], 278_444);
        assert_eq!(row["oom"]["requested"], 4_072_448_000_u64);
        for key in ["live", "reserved", "largest_free"] {
            assert!(row["oom"][key].as_u64().unwrap() > 0, "{key}");
        }
        assert!(text(&output.stderr).contains("93299 of 93299 allocations at PyTorch's address"));

        assert_eq!(row["result"], "out_of_memory");
    }

    /// Comparing nothing is not agreement.
    #[test]
    fn a_verify_that_compares_nothing_is_exit_code_3() {
        let native = trace("stream_offload");
        let output = cushion(&["replay", &native, "--verify", "--policy", "expandable"]);
        assert_eq!(output.status.code(), Some(3));
        let talk = text(&output.stderr);
        assert!(talk.contains("not verified: 0 of 3577 allocations were compared"), "{talk}");
        assert!(talk.contains("recorded with segments") && talk.contains("--policy segments"));
        assert!(text(&output.stdout).contains("fits"), "the replay itself is printed");
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log.csv");
        let rows =
            "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00:000001,allocate,0x10,1,0x0\n";
        std::fs::write(&log, rows).unwrap();
        let output = cushion(&["replay", &log.display().to_string(), "--verify"]);
        assert_eq!(output.status.code(), Some(3));
        assert!(text(&output.stderr).contains("the trace is not PyTorch's"));
        // Comparing one trace does not cover another.
        let expandable = trace("stream_offload.expandable");
        let args = ["replay", &native, &expandable, "--verify", "--policy", "expandable"];
        assert_eq!(cushion(&args).status.code(), Some(3));
    }

    #[test]
    fn allocations_that_verify_skips_are_counted() {
        let capped = trace("corners/pools_capped");
        let output = cushion(&["replay", &capped, "--verify", "--policy", "segments"]);
        assert_eq!(output.status.code(), Some(1), "the recorded run ran out of memory");
        let talk = text(&output.stderr);
        assert!(talk.contains("587 of 587 allocations at PyTorch's address"), "{talk}");
        assert!(
            talk.contains("in part: 2 requests that PyTorch refused were not compared"),
            "{talk}"
        );
        let middle = trace("vision_multires.midrun");
        let args = ["replay", &middle, "--verify", "--policy", "segments", "--capacity"];
        let output = cushion(&[&args[..], &["9GiB"]].concat());
        let talk = text(&output.stderr);
        assert!(talk.contains("allocations after the replay ran out of memory"), "{talk}");
        let output = cushion(&[&args[..], &["100MiB"]].concat());
        assert_eq!(output.status.code(), Some(3));
        let talk = text(&output.stderr);
        assert!(talk.contains("0 of 6243 allocations were compared: memory ran out"), "{talk}");
    }

    #[test]
    fn the_smallest_device_is_found_for_each_policy() {
        let trace = trace("graphs_serving");
        let output = cushion(&["replay", "--min-capacity", &trace]);
        assert_eq!(output.status.code(), Some(0));
        let expected = "\
trace                     policy      allocs  live peak     floor  reserved peak  excess  smallest device    driver  result
graphs_serving.pickle.gz  segments      3607   4.14 GiB  4.27 GiB       6.76 GiB  1.6348         4.58 GiB   6.66 ms  fits
graphs_serving.pickle.gz  expandable    3607   4.14 GiB  4.27 GiB       4.84 GiB  1.1693         4.48 GiB  13.14 ms  fits
graphs_serving.pickle.gz  paged         3607   4.14 GiB  4.27 GiB       4.34 GiB  1.0485         4.30 GiB   5.60 ms  fits
";
        assert_eq!(text(&output.stdout), expected);
        let rows = json(&cushion(&["replay", "--min-capacity", "--json", &trace]));
        for row in rows {
            let smallest = row["min_capacity_bytes"].as_u64().unwrap();
            assert!(row["floor_bytes"].as_u64().unwrap() <= smallest);
            let policy = row["policy"].as_str().unwrap();
            let with = |bytes: u64| {
                let capacity = bytes.to_string();
                let args = ["replay", &trace, "--policy", policy, "--capacity", &capacity];
                cushion(&args).status.code()
            };
            assert_eq!(with(smallest), Some(0));
            assert_eq!(with(smallest - (2 << 20)), Some(1));
        }
        // Without the flag the key exists, and is null.
        let rows = json(&cushion(&["replay", "--json", &trace]));
        assert_eq!(rows[0]["min_capacity_bytes"], Value::Null);
        assert_eq!(rows[0]["floor_bytes"], 4_589_395_968_u64);
    }

    #[test]
    fn a_failure_is_reported_with_its_stack() {
        let trace = trace("vision_multires.midrun");
        let args = ["replay", &trace, "--capacity", "9GiB", "--policy", "segments"];
        let output = cushion(&args);
        assert_eq!(output.status.code(), Some(1));
        let table = text(&output.stdout);
        assert!(table.contains("the largest free range was"), "{table}");
        assert!(table.contains("    functional.py:2846 batch_norm\n"), "{table}");
        let row = &json(&cushion(&[&args[..], &["--json"]].concat()))[0];
        assert_eq!(row["oom"]["stack"][0], "functional.py:2846 batch_norm");
        assert!(row["oom"]["event"].as_u64().unwrap() > 0);
    }

    #[test]
    fn a_trace_from_the_middle_is_verified_with_caveats() {
        let trace = trace("vision_multires.midrun");
        let output = cushion(&["replay", &trace, "--verify"]);
        assert_eq!(output.status.code(), Some(0));
        let talk = text(&output.stderr);
        assert!(
            talk.contains("the trace begins in the middle of a run: 260.19 MiB live"),
            "{talk}"
        );
        assert!(talk.contains("segments: 6243 of 6243 allocations at PyTorch's address"), "{talk}");
        assert!(talk.contains("expandable: the memory that this policy would have held"), "{talk}");
    }

    #[test]
    fn hurried_frees_are_reported() {
        let trace = trace("stream_offload");
        let output = cushion(&["replay", &trace, "--capacity", "6GiB", "--policy", "segments"]);
        assert_eq!(output.status.code(), Some(0));
        let talk = text(&output.stderr);
        assert!(talk.contains("earlier than PyTorch, to reuse"), "{talk}");
    }

    #[test]
    fn standard_input_is_a_trace() {
        let file = std::fs::File::open(trace("stream_offload")).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_cushion"))
            .args(["replay", "-", "--json", "--policy", "segments"])
            .stdin(file)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(json(&output)[0]["allocs"], 3577);
    }

    #[test]
    fn a_difference_is_exit_code_3_and_is_explained() {
        let trace = trace("vision_multires");
        let output = cushion(&[
            "replay",
            &trace,
            "--policy",
            "segments",
            "--verify",
            "--conf",
            "roundup_power2_divisions:4,pinned_use_background_threads:True",
        ]);
        assert_eq!(output.status.code(), Some(3));
        let talk = text(&output.stderr);
        assert!(talk.contains("the first difference is at event"), "{talk}");
        assert!(
            talk.contains("not options of the device allocator: pinned_use_background_threads")
        );
    }

    /// A run that was refused memory does not count as fitting because a replay had no limit.
    #[test]
    fn a_recorded_out_of_memory_is_exit_code_1_without_a_capacity() {
        let capped = trace("llama_varlen.capped24");
        let output = cushion(&["replay", &capped]);
        assert_eq!(output.status.code(), Some(1));
        let table = text(&output.stdout);
        assert!(!table.contains("fits\n"), "{table}");
        assert_eq!(table.matches("ran out when recorded\n").count(), 3, "{table}");
        let told = "\n\
llama_varlen.capped24.pickle.gz: the recorded run ran out of memory: at event 278444 PyTorch refused \
a request of 3.79 GiB, with 16.95 GiB live and 22.76 GiB reserved; 116.28 GiB of the device were free.
    the replay has no limit and skips that request: it says nothing about the card it ran on
    more was free than requested: the run had a limit, of at least 22.76 GiB and below 26.55 GiB
    to find out what fits it, give that limit, or --capacity 23306MiB, the least it can have been
";
        assert!(table.ends_with(told), "{table}");
        // With --json it is a message, and figures in every line.
        let output = cushion(&["replay", &capped, "--json", "--policy", "segments"]);
        assert_eq!(output.status.code(), Some(1));
        let talk = text(&output.stderr);
        assert!(talk.contains("the recorded run ran out of memory: at event 278444"), "{talk}");
        assert!(talk.contains("--capacity 23306MiB"), "{talk}");
        let row = &json(&output)[0];
        assert_eq!((&row["result"], &row["oom"]), (&"recorded_out_of_memory".into(), &Value::Null));
        let recorded = serde_json::json!({
            "event": 278_444, "requested": 4_072_448_000_u64, "refusals": 1,
            "live": 18_202_004_692_u64, "reserved": 24_438_112_256_u64,
            "device_free": 124_855_123_968_u64, "capacity": 24_438_112_256_u64,
        });
        assert_eq!(row["recorded_oom"], recorded);
        // With a capacity, the replay decides.
        let args = ["replay", &capped, "--json", "--policy", "expandable", "--capacity", "24GiB"];
        let output = cushion(&args);
        assert_eq!(output.status.code(), Some(0));
        let row = &json(&output)[0];
        assert_eq!((&row["result"], &row["recorded_oom"]), (&"fits".into(), &recorded));
    }

    #[test]
    fn the_capacity_of_a_full_card_is_held_plus_free() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("full.json");
        let mib = 1 << 20;
        let snapshot = serde_json::json!({"segments": [], "device_traces": [[
            {"action": "segment_alloc", "addr": mib, "size": 30 * mib, "stream": 0},
            {"action": "alloc", "addr": mib, "size": 30 * mib, "stream": 0},
            {"action": "oom", "device_free": 7 * mib + 5, "size": 64 * mib, "stream": 0},
        ]]});
        std::fs::write(&path, snapshot.to_string()).unwrap();
        let path = path.display().to_string();
        let output = cushion(&["replay", &path, "--min-capacity"]);
        assert_eq!(output.status.code(), Some(1));
        let table = text(&output.stdout);
        for part in [
            "a request of 64.00 MiB, with 30.00 MiB live and 30.00 MiB reserved; 7.00 MiB of the",
            "give --capacity 37MiB: the memory that the run held and that was free\n",
            "on the smallest device that request is served too\n",
        ] {
            assert!(table.contains(part), "{table}");
        }
        let output = cushion(&["replay", &path, "--capacity", "37MiB"]);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(text(&output.stdout).matches("out of memory\n").count(), 3);
    }

    /// An RMM log does not say how much memory its device had: no figure is invented.
    #[test]
    fn an_unknown_card_gets_no_capacity() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log.csv");
        let rows = "Thread,Time,Action,Pointer,Size,Stream\n\
                    1,10:00:00:000001,allocate,0x7f0000000000,1048576,0x0\n\
                    1,10:00:00:000002,allocate failure,0x0,8589934592,0x0\n";
        std::fs::write(&log, rows).unwrap();
        let output = cushion(&["replay", &log.display().to_string()]);
        assert_eq!(output.status.code(), Some(1));
        let table = text(&output.stdout);
        for part in [
            "its allocator refused a request of 8.00 GiB, with 1024.00 KiB live.\n",
            "give the memory it leaves to the allocator, as --capacity 24GiB\n",
        ] {
            assert!(table.contains(part), "{table}");
        }
    }

    /// Impossible sizes are reported as they are, and nothing overflows.
    #[test]
    fn an_impossible_refusal_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absurd.json");
        let most = i64::MAX;
        let snapshot = serde_json::json!({"segments": [], "device_traces": [[
            {"action": "segment_alloc", "addr": 512, "size": most, "stream": 0},
            {"action": "segment_alloc", "addr": 1024, "size": most, "stream": 0},
            {"action": "alloc", "addr": 512, "size": 100, "stream": 0},
            {"action": "oom", "device_free": most, "size": 64, "stream": 0},
        ]]});
        std::fs::write(&path, snapshot.to_string()).unwrap();
        let output = cushion(&["replay", &path.display().to_string()]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains("the recorded run ran out of memory"));
    }

    #[test]
    fn the_graceful_ladder_runs_and_is_not_verified() {
        let trace = trace("graphs_serving");
        let output = cushion(&["replay", &trace, "--ladder", "graceful", "--json"]);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(json(&output)[0]["ladder"], "graceful");
        let output = cushion(&["replay", &trace, "--ladder", "graceful", "--verify"]);
        assert_eq!(output.status.code(), Some(2));
    }

    #[test]
    fn bad_input_and_usage_are_exit_code_2() {
        let good = trace("stream_offload");
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"not a pickle").unwrap();
        let bad = file.path().display().to_string();
        for args in [
            &["replay", "/no/such/file"][..],
            &["replay", &bad],
            &["replay", &bad, &good],
            &["replay", &good, "--device", "3"],
            &["replay", &good, "--capacity", "lots"],
            &["replay", &good, "--capacity", "24"],
            &["replay", &good, "--ladder", "graceful", "--spill", "8"],
            &["replay", &good, "--conf", "max_split_size_mb:1"],
            &["replay", &good, "--conf", "nonsense:1"],
            &["replay", &good, "--policy", "best"],
            &["replay"],
            &["dance"],
            &[],
        ] {
            let output = cushion(args);
            assert_eq!(output.status.code(), Some(2), "{args:?}");
            assert!(!output.stderr.is_empty(), "{args:?} says nothing");
        }
        // A bad file does not stop the replay of the good one.
        let output = cushion(&["replay", &bad, &good, "--json"]);
        assert_eq!(json(&output).len(), 3);
        let talk = text(&output.stderr);
        assert!(talk.contains(&bad) && talk.contains("at byte 0"), "{talk}");
    }

    /// A closed pipe must not turn a failure into a success.
    #[test]
    fn a_closed_pipe_does_not_change_the_exit_code() {
        use std::process::Stdio;
        let capped = trace("llama_varlen.capped24");
        for (args, code) in [
            (&["replay", "/no/such/file"][..], 2),
            (&["replay", &capped, "--capacity", "24GiB", "--policy", "segments"], 1),
        ] {
            let mut child = Command::new(env!("CARGO_BIN_EXE_cushion"))
                .args(args)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            drop((child.stdout.take(), child.stderr.take()));
            assert_eq!(child.wait().unwrap().code(), Some(code), "{args:?}");
        }
    }

    #[test]
    fn help_goes_to_standard_output() {
        for args in [&["--help"][..], &["replay", "--help"], &["--version"]] {
            let output = cushion(args);
            assert_eq!(output.status.code(), Some(0), "{args:?}");
            assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
        }
    }

    #[test]
    fn the_generated_page_of_options_is_up_to_date() {
        let output = cushion(&["options"]);
        let page = include_str!("../../../docs/options.md");
        assert_eq!(text(&output.stdout), page, "run `make docs`");
    }
}
