//! `cushion report`, run as a command: the content of the file, and its path.

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use serde_json::Value;

    use super::support::{
        cushion, event, figures, page, segment, trace, write_snapshot, write_with_segments,
    };

    const TRACES: [(&str, &[&str]); 4] = [
        ("graphs_serving", &[]),
        ("stream_offload.expandable", &[]),
        ("llama_varlen.capped24", &[]),
        ("llama_varlen.capped24", &["--capacity", "24GiB"]),
    ];

    fn numbers(value: &Value) -> Vec<u64> {
        value.as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).collect()
    }

    /// The table has the figures of `cushion replay`, and the highest point of each curve is the
    /// table's.
    #[test]
    fn figures_match_replay_and_no_peak_is_lost() {
        for (name, more) in TRACES {
            let trace = trace(name);
            let report = figures(&page(&trace, more));
            let replay = cushion(&[&["replay", &trace, "--json"], more].concat());
            let rows: Vec<Value> = String::from_utf8(replay.stdout)
                .unwrap()
                .lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
            let policies = report["policies"].as_array().unwrap();
            assert_eq!(policies.len(), rows.len(), "{name}: every policy is there");
            let mut live_peak = 0;
            for (policy, row) in policies.iter().zip(&rows) {
                assert_eq!(policy["name"], row["policy"]);
                assert_eq!(policy["live_peak"], row["live_peak_bytes"]);
                assert_eq!(policy["reserved_peak"], row["reserved_peak_bytes"]);
                assert_eq!(policy["excess"], row["excess"]);
                assert_eq!(policy["driver_us"], row["driver"]["time_us"]);
                assert_eq!(policy["refusal"].is_null(), row["oom"].is_null(), "{name}");
                assert_eq!(policy["refusal"]["event"], row["oom"]["event"]);
                let highest = numbers(&policy["reserved"]["hi"]).into_iter().max();
                assert_eq!(highest, policy["reserved_peak"].as_u64(), "{name}");
                live_peak = live_peak.max(policy["live_peak"].as_u64().unwrap());
                let smallest = policy["smallest"].as_u64().unwrap().to_string();
                let args = ["replay", &trace, "--capacity", &smallest, "--policy"];
                let passes = cushion(&[&args[..], &[policy["name"].as_str().unwrap()]].concat());
                assert_eq!(passes.status.code(), Some(0), "{name}: the smallest device is enough");
                maps_add_up(&policy["map"]);
            }
            let live = &report["timeline"]["live"];
            assert_eq!(numbers(&live["hi"]).into_iter().max(), Some(live_peak), "{name}");
            let spans = numbers(&live["lo"]).into_iter().zip(numbers(&live["hi"]));
            assert!(spans.into_iter().all(|(lo, hi)| lo <= hi));
            lifetimes_add_up(&report);
        }
    }

    fn maps_add_up(map: &Value) {
        let part = |key: &str| map[key].as_u64().unwrap();
        let parts = part("live") + part("pending") + part("rounding") + part("free");
        assert_eq!(parts, part("reserved"));
        assert_eq!(numbers(&map["rects"]["size"]).iter().sum::<u64>(), part("reserved"));
        let groups = map["groups"].as_array().unwrap();
        let segments = groups.iter().map(|group| group["size"].as_u64().unwrap()).sum::<u64>();
        assert_eq!(segments, part("reserved"));
        let free = groups.iter().map(|group| group["free"].as_u64().unwrap()).sum::<u64>();
        assert_eq!(free, part("free"));
    }

    fn lifetimes_add_up(report: &Value) {
        let lives = &report["lifetimes"];
        for axis in ["by_events", "by_time"] {
            let bins = lives[axis].as_array().unwrap();
            for key in ["count", "bytes", "at_peak"] {
                let ended: u64 = bins.iter().map(|bin| bin[key].as_u64().unwrap()).sum();
                let kept = lives["to_the_end"][key].as_u64().unwrap();
                assert_eq!(Some(ended + kept), lives["all"][key].as_u64(), "{axis} {key}");
            }
        }
        assert_eq!(lives["all"]["count"], report["trace"]["allocs"]);
        let peak = &report["peak"];
        let groups = peak["groups"].as_array().unwrap();
        let listed: u64 = groups.iter().map(|group| group["bytes"].as_u64().unwrap()).sum();
        assert_eq!(Some(listed + peak["other_bytes"].as_u64().unwrap()), peak["live"].as_u64());
    }

    #[test]
    fn findings_name_policies_and_cards_that_fit() {
        let lead = |trace: &str, more: &[&str]| {
            let report = figures(&page(trace, more));
            report["findings"][0]["text"].as_str().unwrap().to_owned()
        };
        let capped = trace("llama_varlen.capped24");
        assert_eq!(
            lead(&capped, &["--capacity", "24GiB"]),
            "On a device of 24 GiB the run fails under segments; expandable_segments:True and paged let \
             it finish."
        );
        assert_eq!(
            lead(&trace("vision_multires"), &[]),
            "paged would have saved 8.10 GiB of reserved memory (40 %); either way the run fits a 16 GB \
             card."
        );
    }

    /// The page uses no network: its policy forbids it, and it refers to nothing outside. A request
    /// that PyTorch refused, served here, is neither from before the trace nor kept.
    #[test]
    fn requests_that_pytorch_refused_are_not_kept() {
        let capped = trace("llama_varlen.capped24");
        let report = figures(&page(&capped, &["--capacity", "24GiB"]));
        assert_eq!(report["peak"]["from_before"]["count"], 0);
        let largest = &report["peak"]["groups"][0];
        assert_eq!((&largest["largest"], &largest["kept"]), (&4_072_448_000_u64.into(), &0.into()));
        // If every policy fails early, the recorded run is still shown to its end.
        let report = figures(&page(&trace("vision_multires.midrun"), &["--capacity", "200MiB"]));
        assert_eq!(report["timeline"]["live_peak"], 10_044_266_512_u64);
        for run in report["policies"].as_array().unwrap() {
            assert_eq!(run["refusal"]["at_beginning"], true);
            assert_eq!(run["refusal"]["recorded"], false);
            assert!(run["reserved_peak"].as_u64().unwrap() < 14 << 30);
        }
        let findings = report["findings"].to_string();
        assert!(!findings.contains("is what PyTorch did"), "{findings}");
        assert!(!findings.contains("fragmentation"), "{findings}");
    }

    #[test]
    fn the_page_is_self_contained() {
        let page = page(&trace("graphs_serving"), &[]);
        assert!(
            page.contains(
                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
            )
        );
        for outside in ["src=", "url(", "@import", "fetch(", "XMLHttpRequest", "innerHTML", "eval("]
        {
            assert!(!page.contains(outside), "{outside}");
        }
        let addresses = page.matches("http").count();
        let known =
            page.matches("http-equiv").count() + page.matches("http://www.w3.org/2000/svg").count();
        assert_eq!(addresses, known, "only SVG's namespace is a URL");
    }

    #[test]
    fn names_in_a_trace_are_escaped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("</title><b>.pickle");
        let path = path.display().to_string().replace("</title>", "<!--");
        let evil = "</script><script>alert(1)</script>\u{2028}&amp;";
        write_snapshot(path.as_ref(), &[event("alloc", 4096, 5000, Some(evil))]);
        let page = page(&path, &[]);
        assert!(!page.contains("<script>alert"));
        assert!(!page.contains("<!--"));
        let template = include_str!("../src/report/page.html");
        assert_eq!(page.matches("</script").count(), template.matches("</script").count());
        let report = figures(&page);
        assert_eq!(report["trace"]["name"], "<!--<b>.pickle");
        assert_eq!(report["frames"][0], format!("{evil} ({evil}:7)"));
    }

    /// Memory from before the trace has its stack if the end of the file has it.
    #[test]
    fn memory_from_before_the_trace_is_separate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("middle.pickle");
        let (a, b, new) = (1 << 40, 1 << 41, 1 << 42);
        let size = 64 << 20;
        let segments = [segment(a, size, "weights"), segment(new, size, "late")];
        let events = [
            event("segment_alloc", new, size, None),
            event("alloc", new, size, Some("late")),
            event("free_requested", b, size / 2, None),
            event("free_completed", b, size / 2, None),
            event("segment_free", b, size / 2, None),
        ];
        write_with_segments(&path, &segments, &events);
        let report = figures(&page(&path.display().to_string(), &[]));
        assert_eq!(report["trace"]["begins_in_the_middle"], true);
        let peak = &report["peak"];
        let name = |group: &Value| match group["origin"]["site"].as_u64() {
            Some(site) => {
                let frame = report["sites"][usize::try_from(site).unwrap()][0].as_u64().unwrap();
                report["frames"][usize::try_from(frame).unwrap()].as_str().unwrap().to_owned()
            }
            None => group["origin"].as_str().unwrap().to_owned(),
        };
        let mut names: Vec<(String, u64)> = peak["groups"]
            .as_array()
            .unwrap()
            .iter()
            .map(|group| (name(group), group["bytes"].as_u64().unwrap()))
            .collect();
        names.sort();
        let size = u64::try_from(size).unwrap();
        let expected =
            [("before", size / 2), ("late (late:7)", size), ("weights (weights:7)", size)];
        assert_eq!(names, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        assert_eq!(peak["from_before"]["at_peak"], size + size / 2);
        let kinds = report["policies"][0]["map"]["rects"]["kind"].as_str().unwrap();
        assert!(kinds.contains('B') && kinds.contains('K'), "{kinds}");
    }

    /// Addresses that no allocator would choose: none agrees, and the report says so.
    #[test]
    fn a_replay_without_equal_addresses_is_not_called_close() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("odd.pickle");
        let events: Vec<Vec<u8>> =
            (0..520).map(|i| event("alloc", (1 << 40) + i * (1 << 30) + 256, 512, None)).collect();
        write_snapshot(&path, &events);
        let report = figures(&page(&path.display().to_string(), &[]));
        let findings = report["findings"].to_string();
        assert!(
            findings.contains("is not what PyTorch did: none of 520 allocations"),
            "{findings}"
        );
        assert!(!findings.contains("close to"), "{findings}");
    }

    /// The page says that the run failed, how much memory it had, and which capacity to give.
    #[test]
    fn a_recorded_out_of_memory_leads_the_page() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out.html");
        let capped = trace("corners/capped");
        let output = cushion(&["report", &capped, "-o", &out.display().to_string()]);
        assert_eq!(output.status.code(), Some(0), "the page was written");
        let report = figures(&fs::read_to_string(&out).unwrap());
        let finding = |at: usize| report["findings"][at]["text"].as_str().unwrap();
        assert_eq!(report["findings"][0]["tone"], "bad");
        let first =
            "with 681.40 MiB live and 774.00 MiB reserved; 138.46 GiB of the device were free";
        assert!(finding(0).contains(first), "{}", finding(0));
        assert!(finding(1).contains("says nothing about the card it ran on"), "{}", finding(1));
        assert!(finding(1).contains("--capacity 974MiB"), "{}", finding(1));
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("ran out of memory") && told.contains("--capacity 974MiB"), "{told}");
        // With a capacity, that is the first finding.
        let report = figures(&page(&capped, &["--capacity", "1GiB"]));
        assert!(!report["findings"].to_string().contains("says nothing about the card"));
    }

    /// Tens of thousands of small blocks, every other one free: the page stays small.
    #[test]
    fn the_page_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("comb.pickle");
        let count = 60_000;
        let block = |i: i64| (1 << 40) + i * 512;
        let mut events: Vec<Vec<u8>> =
            (0..count).map(|i| event("alloc", block(i), 512, Some(&format!("f{i}")))).collect();
        for i in (0..count).step_by(2) {
            events.push(event("free_requested", block(i), 512, None));
            events.push(event("free_completed", block(i), 512, None));
        }
        // The peak of reserved bytes comes when all holes exist.
        events.push(event("alloc", 1 << 42, 1 << 30, None));
        write_snapshot(&path, &events);
        let page = page(&path.display().to_string(), &[]);
        assert!(page.len() < 3 << 20, "{} bytes", page.len());
        let report = figures(&page);
        let mut rects = 0;
        for policy in report["policies"].as_array().unwrap() {
            rects += policy["map"]["rects"]["size"].as_array().unwrap().len();
            assert!(
                policy["map"]["merged"].as_u64() > Some(0),
                "the number of merged blocks is reported"
            );
            maps_add_up(&policy["map"]);
            assert!(policy["reserved"]["hi"].as_array().unwrap().len() <= 1500);
        }
        assert!(rects <= 20_000, "{rects}");
        assert!(report["sites"].as_array().unwrap().len() <= 400);
        assert!(report["peak"]["groups"].as_array().unwrap().len() <= 31);
        assert!(report["peak"]["other_groups"].as_u64() > Some(29_000));
        assert_eq!(report["lifetimes"]["by_time"], Value::Null, "the file has no times");
        assert_eq!(report["timeline"]["times"], Value::Null);
    }

    #[test]
    fn the_file_is_named_after_the_trace_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        let run = |more: &[&str]| {
            let traces = fs::canonicalize(trace("graphs_serving")).unwrap();
            Command::new(env!("CARGO_BIN_EXE_cushion"))
                .current_dir(&folder)
                .arg("report")
                .arg(traces)
                .args(more)
                .output()
                .unwrap()
        };
        let output = run(&[]);
        assert_eq!(output.status.code(), Some(0));
        assert!(output.stdout.is_empty());
        let talk = String::from_utf8(output.stderr).unwrap();
        assert!(talk.contains("graphs_serving.html (2"), "{talk}");
        let first = fs::read(folder.path().join("graphs_serving.html")).unwrap();
        assert!(first.ends_with(b"</html>\n"));
        // A second run writes the same bytes, and leaves nothing else in the folder.
        assert_eq!(run(&["-o", "graphs_serving.html"]).status.code(), Some(0));
        assert_eq!(fs::read(folder.path().join("graphs_serving.html")).unwrap(), first);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn bad_input_is_exit_code_2_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out.html").display().to_string();
        let empty = folder.path().join("empty.pickle");
        write_snapshot(&empty, &[]);
        let empty = empty.display().to_string();
        let good = trace("graphs_serving");
        for args in [
            &["report", "/no/such/file", "-o", &out][..],
            &["report", &empty, "-o", &out],
            &["report", &good, "-o", &out, "--device", "3"],
            &["report", &good, "-o", &out, "--capacity", "lots"],
            &["report", &good, "-o", &out, "--capacity", "24"],
            &["report", &good, "-o", "/no/such/folder/out.html"],
            &["report"],
        ] {
            let output = cushion(args);
            assert_eq!(output.status.code(), Some(2), "{args:?}");
            assert!(!output.stderr.is_empty(), "{args:?} says nothing");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "only the snapshot");
    }
}
