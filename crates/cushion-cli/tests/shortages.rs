//! Shortages as `cushion replay` tells of them: the exit code, the words, the figures and the receipts.

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::support::{cushion, trace};

    /// A run that PyTorch did not finish, on the card it ran out of.
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
    fn it_ends_as_pytorch_did_with_pytorchs_ladder() {
        let (code, table, _) = capped(&["--ladder", "torch", "--policy", "segments"]);
        assert_eq!(code, Some(1));
        assert!(table.contains("at event 278444 a request of 3.79 GiB was refused"), "{table}");
        let told = "llama_varlen.capped24.pickle.gz, segments: 2 shortages, 1 survived (by cached 1), \
                    1 refused, 0.0 ms lost\n    fits with policy expandable\n";
        assert!(table.ends_with(told), "{table}");
    }

    #[test]
    fn expandable_fits_and_segments_says_what_would_have() {
        let (code, table, _) = capped(&["--ladder", "graceful", "--policy", "expandable"]);
        assert_eq!(code, Some(0));
        assert!(table.ends_with("1 survived (by cached 1), 0 refused, 0.0 ms lost\n"), "{table}");
        let (code, table, _) = capped(&["--ladder", "graceful", "--policy", "segments"]);
        assert_eq!(code, Some(1));
        assert!(table.ends_with("1 refused, 0.0 ms lost\n    fits with policy expandable\n"));
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
        // A byte too little is too little, and other options stay as they are asked for.
        let little = ["--ladder", "graceful", "--policy", "segments", "--spill", "4072669183"];
        assert_eq!(capped(&little).0, Some(1));
        let conf = [&args[..], &["--conf", "spill_over_mb:4000"]].concat();
        assert_eq!(capped(&conf).0, Some(1));
        // PyTorch has no such thing.
        let (code, _, talk) = capped(&["--spill", "8GiB"]);
        assert_eq!(code, Some(2));
        assert!(talk.contains("--spill needs --ladder graceful"), "{talk}");
    }

    #[test]
    fn json_counts_them() {
        let (_, rows, _) = capped(&["--ladder", "graceful", "--json"]);
        let figures: Vec<_> = json(&rows)
            .iter()
            .map(|row| ["shortages", "survived", "refused"].map(|key| row[key].as_u64().unwrap()))
            .collect();
        assert_eq!(figures, [[3, 2, 1], [1, 1, 0]]);
        for row in json(&rows) {
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
        let told: Vec<_> = lines.iter().map(|line| line["policy"].as_str().unwrap()).collect();
        assert_eq!(told, ["segments", "segments", "segments", "expandable"]);
        assert!(lines[0]["trace"].as_str().unwrap().ends_with("llama_varlen.capped24.pickle.gz"));
        assert_eq!(lines[0]["outcome"]["survived"], "cached");
        assert_eq!(lines[0]["remedies"], Value::Array(Vec::new()));
        assert_eq!(lines[2]["outcome"], "full");
        assert_eq!(lines[2]["remedies"][0], "fits with policy expandable");
        let read = cushion_trace::read_receipts(text.as_bytes()).unwrap();
        assert_eq!((read.latest.len(), read.tally.survived(), read.tally.refused), (4, 3, 1));
        assert_eq!(read.latest[2].shortage.requested, 4_072_448_000);
        // No shortage, no lines; and no place to write is an error.
        let fits = trace("stream_offload");
        assert_eq!(cushion(&["replay", &fits, "--receipts", &file]).status.code(), Some(0));
        assert_eq!(fs::read(&path).unwrap(), b"");
        let nowhere = folder.path().join("no/such.jsonl").display().to_string();
        let output = cushion(&["replay", &fits, "--receipts", &nowhere]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("no/such.jsonl"));
    }
}
