//! `cushion storm`, run as a command. On virtual time its figures depend on the seed alone.

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use serde_json::Value;

    fn storm(args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_cushion")).arg("storm").args(args).output().unwrap()
    }

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    fn json(output: &Output) -> Vec<Value> {
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn sum(rows: &[Value], ladder: &str, key: &str) -> u64 {
        let rows = rows.iter().filter(|row| row["ladder"] == ladder);
        rows.map(|row| row[key].as_u64().unwrap()).sum()
    }

    #[test]
    fn the_ladder_saves_tasks_that_are_lost_without_it() {
        let output = storm(&["--seeds", "20", "--json"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "");
        let rows = json(&output);
        assert_eq!(rows.len(), 120);
        assert!(rows.iter().all(|row| row["hang"].is_null() && row["violation"].is_null()));
        let losers = rows.iter().filter(|row| row["ladder"] == "torch" && row["missing"] != 0);
        assert!(losers.count() > 20, "most runs without the ladder lose tasks");
        assert_eq!(sum(&rows, "graceful", "missing"), 0);
        let alone = sum(&rows, "graceful", "can_run_alone");
        assert!(sum(&rows, "graceful", "finished") >= alone && alone > 0);
        for key in ["survived", "give_way", "restarts"] {
            assert!(sum(&rows, "graceful", key) > 0, "{key}");
        }
        assert_eq!(sum(&rows, "torch", "restarts"), 0);
    }

    #[test]
    fn json_has_a_line_for_each_seed_policy_and_ladder() {
        let rows = json(&storm(&["--seeds", "3", "--first-seed", "40", "--tasks", "5", "--json"]));
        let order = |row: &Value| {
            let word = |key: &str| row[key].as_str().unwrap().to_owned();
            (row["seed"].as_u64().unwrap(), word("policy"), word("ladder"))
        };
        let mut expected = Vec::new();
        for seed in 40..43 {
            for policy in ["segments", "expandable", "paged"] {
                for ladder in ["torch", "graceful"] {
                    expected.push((seed, policy.to_owned(), ladder.to_owned()));
                }
            }
        }
        assert_eq!(rows.iter().map(order).collect::<Vec<_>>(), expected);
        for row in rows {
            assert_eq!((&row["tasks"], &row["real_threads"]), (&5.into(), &false.into()));
            for key in ["device_bytes", "can_run_alone", "finished", "missing", "survived"] {
                assert!(row[key].is_u64(), "{key}: {row}");
            }
            let told: u64 =
                ["give_way", "split", "full"].iter().map(|key| row[key].as_u64().unwrap()).sum();
            assert_eq!(row["refused"], told, "{row}");
            assert!(row["lost_ms"].is_f64() && row["took_ms"].as_f64().unwrap() > 0.0, "{row}");
        }
    }

    #[test]
    fn a_seed_is_reproducible() {
        let args = ["--seeds", "6", "--first-seed", "90", "--json"];
        let first = text(&storm(&args).stdout);
        assert_eq!(first, text(&storm(&args).stdout), "the same seeds, another run");
        let third = ["--seeds", "1", "--first-seed", "92", "--json"];
        let lines: Vec<&str> = first.lines().collect();
        assert_eq!(text(&storm(&third).stdout).lines().collect::<Vec<_>>(), lines[12..18]);
    }

    #[test]
    fn the_table_has_a_row_for_each_policy_and_ladder() {
        let output = storm(&["--seeds", "2", "--tasks", "4", "--policy", "expandable"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let table = text(&output.stdout);
        let lines: Vec<Vec<&str>> =
            table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert_eq!(lines[0][..3], ["policy", "ladder", "runs"]);
        assert_eq!(lines[1][..3], ["expandable", "torch", "2"]);
        assert_eq!(lines[2][..3], ["expandable", "graceful", "2"]);
    }

    #[test]
    fn a_task_that_cannot_run_alone_need_not_finish() {
        let args = ["--seeds", "3", "--device-ratio", "0.3", "--ladder", "graceful", "--json"];
        let output = storm(&args);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        for row in json(&output) {
            assert!(row["can_run_alone"].as_u64() < row["tasks"].as_u64(), "{row}");
            assert_eq!(row["missing"], 0, "{row}");
        }
    }

    #[test]
    fn real_threads_pass_too() {
        let shape = ["--tasks", "5", "--allocations", "15", "--device-ratio", "1.1"];
        let output = storm(&[&["--real-threads", "--seeds", "2", "--json"], &shape[..]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let rows = json(&output);
        assert_eq!(rows.len(), 12);
        assert!(rows.iter().all(|row| row["real_threads"] == true));
        assert_eq!(sum(&rows, "graceful", "missing"), 0);
    }

    #[test]
    fn bad_usage_is_exit_code_2() {
        let last = u64::MAX.to_string();
        for args in [
            &["--seeds", "0"][..],
            &["--seeds", "many"],
            &["--first-seed", &last, "--seeds", "2"],
            &["--tasks", "0"],
            &["--at-once", "0"],
            &["--allocations", "0"],
            &["--allocations", "70000"],
            &["--streams", "0"],
            &["--task-max", "1KiB"],
            &["--task-max", "2"],
            &["--task-max", "2TiB"],
            &["--task-max", "lots"],
            &["--device-ratio", "0"],
            &["--device-ratio", "-1"],
            &["--device-ratio", "NaN"],
            &["--device-ratio", "1e9"],
            &["--policy", "best"],
            &["--ladder", "none"],
            &["--watchdog", "0"],
            &["surplus"],
        ] {
            let output = storm(args);
            assert_eq!(output.status.code(), Some(2), "{args:?}");
            assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
        }
    }
}
