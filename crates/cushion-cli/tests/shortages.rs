//! Shortages in `cushion replay` and `cushion report`: the exit code, the messages, the figures and
//! the receipts.

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::support::{cushion, figures, page, receipt_lines, trace};

    /// Replays a run that PyTorch did not finish, on the card it ran out of.
    fn capped(more: &[&str]) -> (Option<i32>, String, String) {
        let trace = trace("llama_varlen.capped24");
        let output = cushion(&[&["replay", &trace, "--capacity", "24GiB"], more].concat());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn json(text: &str) -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn with_pytorchs_ladder_the_replay_ends_as_pytorch_did() {
        let (code, table, _) = capped(&["--ladder", "torch", "--policy", "segments"]);
        assert_eq!(code, Some(1));
        assert!(table.contains("at event 278444 a request of 3.79 GiB was refused"), "{table}");
        let told = "llama_varlen.capped24.pickle.gz, segments: 2 shortages, 1 survived (by cached 1), \
                    1 refused, 0.0 ms lost\n    fits with policy expandable\n    needs 2.55 GiB more\n";
        assert!(table.ends_with(told), "{table}");
    }

    #[test]
    fn expandable_fits_and_segments_names_remedies() {
        let (code, table, _) = capped(&["--ladder", "graceful", "--policy", "expandable"]);
        assert_eq!(code, Some(0));
        assert!(table.ends_with("1 survived (by cached 1), 0 refused, 0.0 ms lost\n"), "{table}");
        let (code, table, _) = capped(&["--ladder", "graceful", "--policy", "segments"]);
        assert_eq!(code, Some(1));
        assert!(table.ends_with(
            "1 refused, 0.0 ms lost\n    fits with policy expandable\n    needs 2.55 GiB more\n"
        ));
    }

    #[test]
    fn host_memory_lets_segments_finish() {
        let args = ["--ladder", "graceful", "--policy", "segments", "--spill", "8GiB"];
        let (code, table, _) = capped(&args);
        assert_eq!(code, Some(0), "{table}");
        assert!(table.contains("spill 1), 0 refused"), "{table}");
        assert!(table.ends_with(", 3.79 GiB of host memory at the peak\n"), "{table}");
        let (code, rows, _) = capped(&[&args[..], &["--json"]].concat());
        let row = &json(&rows)[0];
        assert_eq!((code, &row["spilled_peak_bytes"]), (Some(0), &4_072_669_184_u64.into()));
        // One byte less is not enough, and other options stay as given.
        let little = ["--ladder", "graceful", "--policy", "segments", "--spill", "4072669183"];
        assert_eq!(capped(&little).0, Some(1));
        let conf = [&args[..], &["--conf", "spill_over_mb:4000"]].concat();
        assert_eq!(capped(&conf).0, Some(1));
        // PyTorch has no spilling.
        let (code, _, talk) = capped(&["--spill", "8GiB"]);
        assert_eq!(code, Some(2));
        assert!(talk.contains("--spill needs --ladder graceful"), "{talk}");
    }

    #[test]
    fn json_counts_shortages() {
        let (_, rows, _) = capped(&["--ladder", "graceful", "--json"]);
        for (row, refusals) in json(&rows).iter().zip([1, 0]) {
            let count = |key: &str| row[key].as_u64().unwrap();
            assert_eq!((count("refused"), count("survived") > 0), (refusals, true), "{row}");
            assert_eq!(count("shortages"), count("survived") + count("refused"));
            assert!(row["milliseconds_lost"].as_f64().unwrap() >= 0.0);
            assert_eq!(row["spilled_peak_bytes"], 0);
        }
    }

    #[test]
    fn receipts_are_written_one_per_line_and_can_be_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("receipts.jsonl");
        let file = path.display().to_string();
        let (code, table, _) = capped(&["--ladder", "graceful", "--receipts", &file]);
        assert_eq!(code, Some(1));
        assert!(table.contains("out of memory"));
        let text = fs::read_to_string(&path).unwrap();
        let lines = json(&text);
        let (segments, expandable): (Vec<_>, Vec<_>) =
            lines.iter().partition(|line| line["policy"] == "segments");
        assert!(segments.len() > 1 && expandable.iter().all(|line| line["policy"] == "expandable"));
        assert!(lines[0]["trace"].as_str().unwrap().ends_with("llama_varlen.capped24.pickle.gz"));
        assert_eq!(lines[0]["outcome"]["survived"], "cached");
        assert_eq!(lines[0]["remedies"], Value::Array(Vec::new()));
        let refused = segments[segments.len() - 1];
        assert_eq!(refused["outcome"], "full");
        assert_eq!(refused["remedies"][0], "fits with policy expandable");
        let read = cushion_trace::read_receipts(text.as_bytes()).unwrap();
        assert_eq!((read.latest.len(), read.tally.refused), (lines.len(), 1));
        assert_eq!(read.latest[segments.len() - 1].shortage.requested, 4_072_448_000);
        // Without a shortage the file is empty; a path that cannot be written is an error.
        let fits = trace("stream_offload");
        assert_eq!(cushion(&["replay", &fits, "--receipts", &file]).status.code(), Some(0));
        assert_eq!(fs::read(&path).unwrap(), b"");
        let nowhere = folder.path().join("no/such.jsonl").display().to_string();
        let output = cushion(&["replay", &fits, "--receipts", &nowhere]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("no/such.jsonl"));
    }

    #[test]
    fn the_report_has_a_row_for_each_shortage() {
        let trace = trace("llama_varlen.capped24");
        let page = page(&trace, &["--capacity", "24GiB", "--ladder", "graceful"]);
        let shortages = &figures(&page)["shortages"];
        assert_eq!(shortages.as_array().unwrap().len(), 2);
        let segments = &shortages[0];
        assert_eq!(segments["name"], "segments");
        let rows = segments["rows"].as_array().unwrap();
        assert_eq!(segments["all"], rows.len());
        let told = segments["told"].as_str().unwrap();
        assert!(told.starts_with(&format!("{} shortages, ", rows.len())), "{told}");
        assert!(told.ends_with(", 1 refused, 0.0 ms lost"), "{told}");
        let refused = &rows[rows.len() - 1];
        assert_eq!((&refused["number"], &refused["survived"]), (&rows.len().into(), &false.into()));
        assert_eq!(refused["remedies"][0], "fits with policy expandable");
        assert_eq!(refused["groups"][0]["each"], 4_072_448_000_u64);
        let rungs = rows[0]["rungs"].as_array().unwrap();
        let cached = &rungs[rungs.len() - 1];
        assert_eq!((&cached["rung"], &cached["ended"]), (&"cached".into(), &"served".into()));
        assert!(cached["won"].as_u64() > Some(0));
        assert_eq!(shortages[1]["rows"][0]["outcome"], "survived by cached");
        // Without a shortage there is no section.
        let fits = figures(&super::support::page(&trace, &[]));
        assert_eq!(fits["shortages"], Value::Array(Vec::new()));
    }

    #[test]
    fn the_report_shows_receipts_of_another_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let file = path.display().to_string();
        let fits = trace("graphs_serving");
        let (survived, refused) = receipt_lines();
        // Many survived shortages, one refused long before, and a truncated line.
        let half = &survived[..survived.len() / 2];
        let text = [refused.as_str(), &survived.repeat(300), half].concat();
        fs::write(&path, &text).unwrap();
        let shortages = &figures(&page(&fits, &["--receipts", &file]))["shortages"];
        assert_eq!(shortages.as_array().unwrap().len(), 1);
        let run = &shortages[0];
        assert_eq!((&run["name"], &run["from_file"]), (&"run.jsonl".into(), &true.into()));
        assert_eq!((&run["all"], &run["torn"]), (&301.into(), &1.into()));
        let rows = run["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 50);
        assert_eq!(rows[0]["outcome"], "refused", "a refused shortage is always shown");
        // A file without receipts makes no section, and a message says so.
        fs::write(&path, "\n").unwrap();
        let output = cushion(&["report", &fits, "--receipts", &file, "-o", "-"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(String::from_utf8_lossy(&output.stderr).contains("run.jsonl: no receipts"));
        // A line that is not a receipt is bad input.
        fs::write(&path, "{\"number\": \"one\"}\n").unwrap();
        for file in [file.as_str(), "/no/such/file.jsonl"] {
            let output = cushion(&["report", &fits, "--receipts", file, "-o", "-"]);
            assert_eq!(output.status.code(), Some(2));
            assert!(output.stdout.is_empty());
            let talk = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(talk.contains(file), "{talk}");
            assert!(file.starts_with("/no") || talk.contains("line 1 is not a receipt"), "{talk}");
        }
    }

    #[test]
    fn names_and_figures_in_receipts_are_escaped_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evil.jsonl");
        let evil = "</script><script>alert(1)</script>\u{2028}&amp;";
        let mut line: Value = serde_json::from_str(&receipt_lines().1).unwrap();
        line["who"] = format!("{evil}{}", "x".repeat(100_000)).into();
        for key in ["requested", "size", "reserved", "allocated", "pending", "wanted"] {
            line["shortage"][key] = u64::MAX.into();
        }
        line["took"] = 1e19.into();
        let many = vec![line["shortage"]["tried"][0].clone(); 5000];
        line["shortage"]["tried"] = many.into();
        line["groups"][0]["stack"] = vec![evil.repeat(9); 5].into();
        line["groups"] = vec![line["groups"][0].clone(); 100].into();
        let answer = serde_json::json!({"callback": evil, "failed": evil.repeat(100), "won": u64::MAX, "seconds": 1e19});
        line["answers"] = vec![answer; 20].into();
        fs::write(&path, (line.to_string() + "\n").repeat(100)).unwrap();
        let file = path.display().to_string();
        let plain = page(&trace("graphs_serving"), &[]);
        let page = page(&trace("graphs_serving"), &["--receipts", &file]);
        assert!(page.len() < plain.len() + (200 << 10), "{} bytes", page.len() - plain.len());
        assert!(!page.contains("<script>alert"));
        assert_eq!(page.matches("</script").count(), plain.matches("</script").count());
        let row = &figures(&page)["shortages"][0]["rows"][0];
        assert!(row["who"].as_str().unwrap().starts_with(evil));
        assert_eq!(row["answers"].as_array().map(Vec::len), Some(4));
        assert!(row["answers"][0].as_str().unwrap().starts_with(&format!("{evil} failed: ")));
        assert!(row["groups"][0]["at"].as_str().unwrap().starts_with(evil));
        assert_eq!(
            row["remedies"].as_array().map(Vec::len),
            Some(1),
            "the message has the needed bytes"
        );
    }
}
