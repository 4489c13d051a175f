//! Broken, hostile and wrong files: each gives exit code 2, no standard output, and one message
//! line with the place and the expectation.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Output};

    use flate2::Compression;
    use flate2::write::GzEncoder;

    /// A kind of broken file, and what the message must contain.
    struct Case {
        name: &'static str,
        bytes: Vec<u8>,
        says: &'static [&'static str],
    }

    fn case(name: &'static str, bytes: impl Into<Vec<u8>>, says: &'static [&'static str]) -> Case {
        Case { name, bytes: bytes.into(), says }
    }

    /// Runs the command with a memory limit: a decompression bomb that is not stopped aborts it.
    fn replay(path: &Path) -> Output {
        let cushion = env!("CARGO_BIN_EXE_cushion");
        if cfg!(target_os = "linux") {
            let limited = "ulimit -v 3000000; exec \"$0\" \"$@\"";
            return Command::new("sh")
                .args(["-c", limited, cushion, "replay"])
                .arg(path)
                .output()
                .unwrap();
        }
        Command::new(cushion).arg("replay").arg(path).output().unwrap()
    }

    fn told(output: &Output, name: &str) -> String {
        let talk = String::from_utf8(output.stderr.clone()).unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {talk}");
        assert!(output.stdout.is_empty(), "{name}");
        assert_eq!(talk.lines().count(), 1, "{name}: {talk}");
        assert!(!talk.contains("panicked"), "{name}: {talk}");
        talk
    }

    fn check(cases: Vec<Case>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        for Case { name, bytes, says } in cases {
            fs::write(&path, bytes).unwrap();
            let talk = told(&replay(&path), name);
            for part in says {
                assert!(talk.contains(part), "{name}: no {part:?} in {talk}");
            }
            assert!(talk.contains("byte ") || talk.contains("line "), "{name}, no place: {talk}");
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Returns one uncompressed frame of up to 255 bytes.
    fn zstd(bytes: &[u8]) -> Vec<u8> {
        let len = u8::try_from(bytes.len()).unwrap();
        let block = 1 | u32::from(len) << 3;
        let head = [0x28, 0xb5, 0x2f, 0xfd, 0x20, len];
        [&head[..], &block.to_le_bytes()[..3], bytes].concat()
    }

    // Pickles, as Python would write them.

    fn text(text: &str) -> Vec<u8> {
        let len = u8::try_from(text.len()).unwrap();
        [&[0x8c, len][..], text.as_bytes()].concat()
    }

    fn list(values: &[Vec<u8>]) -> Vec<u8> {
        [b"](".to_vec(), values.concat(), b"e".to_vec()].concat()
    }

    fn dict(items: &[(&str, &[u8])]) -> Vec<u8> {
        let items: Vec<u8> =
            items.iter().flat_map(|(key, value)| [text(key), value.to_vec()].concat()).collect();
        [b"}(".to_vec(), items, b"u".to_vec()].concat()
    }

    fn pickle(body: &[u8]) -> Vec<u8> {
        [b"\x80\x04", body, b"."].concat()
    }

    fn snapshot(segments: &[u8], traces: &[u8]) -> Vec<u8> {
        pickle(&dict(&[("segments", segments), ("device_traces", traces)]))
    }

    fn with_event(items: &[(&str, &[u8])]) -> Vec<u8> {
        snapshot(b"]", &list(&[list(&[dict(items)])]))
    }

    fn with_segment(items: &[(&str, &[u8])]) -> Vec<u8> {
        snapshot(&list(&[dict(items)]), b"]")
    }

    fn alloc() -> Vec<(&'static str, &'static [u8])> {
        vec![("action", b"\x8c\x05alloc"), ("addr", b"M\x00\x02"), ("size", b"K\x64")]
    }

    fn alloc_with(key: &'static str, value: &'static [u8]) -> Vec<u8> {
        let mut items = alloc();
        items.push((key, value));
        with_event(&items)
    }

    /// Returns a valid snapshot that can be replayed.
    fn sound() -> Vec<u8> {
        let event = dict(&alloc());
        snapshot(b"]", &list(&[list(&[event])]))
    }

    #[test]
    fn a_valid_file_is_not_an_error() {
        // The cases below break this file.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let json = br#"{"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 100}]]}"#;
        let packed =
            [sound(), gzip(&sound()), zstd(&sound()), json.to_vec(), gzip(json), zstd(json)];
        for bytes in packed {
            fs::write(&path, bytes).unwrap();
            let output = replay(&path);
            let talk = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{talk}");
        }
    }

    #[test]
    fn files_of_another_kind() {
        let tensors = b"\x40\0\0\0\0\0\0\0{\"weight\":{\"dtype\":\"F32\"}}";
        let utf16: Vec<u8> =
            "\u{feff}{\"segments\"".encode_utf16().flat_map(u16::to_le_bytes).collect();
        check(vec![
            case("empty", "", &["an empty file", "expected a PyTorch memory snapshot"]),
            case("empty in gzip", gzip(b""), &["an empty file"]),
            case("white space", " \n\n ", &["white space"]),
            case("a zip of torch.save", "PK\x03\x04\x14", &["a zip archive", "_dump_snapshot"]),
            case("safetensors", tensors, &["a safetensors file"]),
            case("a web page", "<!DOCTYPE html>\n<html>", &["HTML", "a web page"]),
            case(
                "a Git LFS pointer",
                "version https://git-lfs.github.com/spec/v1\n",
                &["git lfs pull"],
            ),
            case("a note", "see attached trace\n", &["text that begins with `see attached trace`"]),
            case("another CSV", "Name,Value\na,1\n", &["text that begins with `Name,Value`"]),
            case("noise", [0x00, 0x9c, 0x13, 0x37], &["the bytes 00 9c 13 37"]),
            case("xz", b"\xfd7zXZ\x00\x00", &["an xz file", "unpack it"]),
            case("UTF-16", utf16, &["UTF-16", "UTF-8"]),
            case("gzip in gzip", gzip(&gzip(&sound())), &["a gzip file inside another"]),
            case("zstd in gzip", gzip(&zstd(&sound())), &["a zstd file inside another"]),
            case("gzip in zstd", zstd(&gzip(&sound())), &["a gzip file inside another"]),
            case(
                "a later version of ours",
                b"CUSHION\xff",
                &["the Cushion trace cannot be read", "version 1", "version 255"],
            ),
        ]);
    }

    #[test]
    fn paths_that_are_not_files() {
        let folder = tempfile::tempdir().unwrap();
        let talk = told(&replay(folder.path()), "a directory");
        assert!(talk.contains("a directory") && talk.contains("expected"), "{talk}");
        let talk = told(&replay(&folder.path().join("missing")), "a missing file");
        assert!(talk.contains("missing: could not read the file: No such file"), "{talk}");
        #[cfg(target_os = "linux")]
        {
            // The file opens, but cannot be read.
            let talk = told(&replay(Path::new("/proc/self/mem")), "an unreadable file");
            assert!(talk.contains("could not read the file"), "{talk}");
        }
    }

    #[test]
    fn broken_compressed_files() {
        let zipped = gzip(&sound());
        let cut = zipped[..zipped.len() / 2].to_vec();
        let no_checksum = zipped[..zipped.len() - 6].to_vec();
        let mut checksum = zipped.clone();
        let at = checksum.len() - 8;
        checksum[at] ^= 1;
        let mut flipped = zipped.clone();
        flipped[12] ^= 0xff;
        let frame = zstd(&sound());
        let mut method = zipped.clone();
        method[2] = 9;
        check(vec![
            case("gzip, cut", cut, &["the gzip wrapping cannot be read", "the end of the file"]),
            case("gzip, only its magic", b"\x1f\x8b", &["gzip wrapping", "the end of the file"]),
            case("gzip without its checksum", no_checksum, &["the rest of the gzip wrapping"]),
            case("gzip with a wrong checksum", checksum, &["gzip wrapping", "damage"]),
            case("gzip, a bit flipped", flipped, &["gzip wrapping"]),
            case("gzip of another method", method, &["gzip wrapping", "damage"]),
            case(
                "gzip, then rubbish",
                [zipped, b"rubbish here".to_vec()].concat(),
                &["gzip wrapping"],
            ),
            case(
                "zstd, cut",
                frame[..frame.len() - 9].to_vec(),
                &["zstd wrapping", "the end of the file"],
            ),
            case("zstd, only its magic", &frame[..4], &["zstd wrapping"]),
            case(
                "zstd with a window of terabytes",
                b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00",
                &["zstd wrapping", "its window is", "more than the 134217728 allowed"],
            ),
            case(
                "zstd with a dictionary",
                b"\x28\xb5\x2f\xfd\x21\x07\x01\x09\x00\x00x",
                &["zstd wrapping"],
            ),
            case(
                "zstd, an unknown block",
                b"\x28\xb5\x2f\xfd\x20\x01\x0f\x00\x00x",
                &["zstd wrapping"],
            ),
            case("zstd, then rubbish", [frame, b"rubbish".to_vec()].concat(), &["zstd wrapping"]),
        ]);
    }

    #[test]
    fn decompression_bombs() {
        let absurd =
            |opcode: u8| [&[0x80, 0x04, opcode][..], &(1_u64 << 60).to_le_bytes()].concat();
        // Megabytes of the same bytes, in some kilobytes.
        let bomb = |start: &[u8], piece: &[u8], megabytes: usize| {
            let megabyte = gzip(&piece.repeat((1 << 20) / piece.len()));
            [gzip(start), megabyte.repeat(megabytes)].concat()
        };
        let long_text = bomb(&absurd(0x8d), b"x", 80);
        let lists = bomb(b"\x80\x04", b"]", 16);
        let dicts = bomb(b"\x80\x04", b"}", 16);
        let marks = bomb(b"\x80\x04", b"(", 192);
        let memo = bomb(b"\x80\x04N", b"\x94", 64);
        let ints = bomb(b"\x80\x04", b"K\x01", 192);
        let open = bomb(b"[", b"[", 48);
        let empties = bomb(b"[", b"[],", 48);
        let digits = bomb(b"[", b"7", 80);
        let json_text = bomb(b"[\"", b"x", 80);
        let row = bomb(b"Action,Pointer,Size\n", b"1", 64);
        check(vec![
            case(
                "a string of an exabyte, in gzip",
                long_text,
                &["values of at most 67108864 bytes"],
            ),
            case("16 million lists, in gzip", lists, &["over a limit", "the memory needed"]),
            case("16 million dicts, in gzip", dicts, &["over a limit", "the memory needed"]),
            case("192 million marks, in gzip", marks, &["over a limit", "the memory needed"]),
            case("64 million memo entries, in gzip", memo, &["over a limit", "the memory needed"]),
            case("192 MB of numbers, in gzip", ints, &["over a limit", "the memory needed"]),
            case("JSON, 48 million deep, in gzip", open, &["over a limit", "the memory needed"]),
            case("JSON, 16 million empty lists, in gzip", empties, &["over a limit"]),
            case("JSON, a number of 80 million digits", digits, &["at most 67108864 bytes"]),
            case("JSON, a string of 80 MB", json_text, &["at most 67108864 bytes"]),
            case("a row of 64 MB, in gzip", row, &["line 2", "a line of at most 4096 bytes"]),
            case("BINUNICODE8, an exabyte", absurd(0x8d), &["1152921504606846976 more bytes"]),
            case("BINBYTES8, an exabyte", absurd(0x8e), &["1152921504606846976 more bytes"]),
            case(
                "LONG4, two gigabytes",
                b"\x80\x02\x8b\xff\xff\xff\x7f\x01",
                &["2147483646 more bytes"],
            ),
            case(
                "LONG4, a negative length",
                b"\x80\x02\x8b\xff\xff\xff\xff\x01",
                &["the length of an int"],
            ),
            case("FRAME, an exabyte, and no more", absurd(0x95), &["one more byte"]),
        ]);
    }

    #[test]
    fn pickles_that_want_to_run_code() {
        check(vec![
            case(
                "GLOBAL",
                b"\x80\x02cos\nsystem\n\x8c\x02ls\x85R.",
                &["refused", "byte 2", "GLOBAL"],
            ),
            case(
                "GLOBAL of protocol 0",
                b"cos\nsystem\n(S'ls'\ntR.",
                &["refused", "byte 0", "GLOBAL"],
            ),
            case(
                "STACK_GLOBAL",
                b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
                &["refused", "STACK_GLOBAL"],
            ),
            case("REDUCE", b"\x80\x02N)R.", &["refused", "byte 4", "REDUCE"]),
            case("INST", b"\x80\x02(ios\nsystem\n.", &["refused", "INST"]),
            case("OBJ", b"\x80\x02(No.", &["refused", "OBJ"]),
            case("BUILD", b"\x80\x02}}b.", &["refused", "BUILD"]),
            case("NEWOBJ", b"\x80\x02N)\x81.", &["refused", "NEWOBJ"]),
            case("EXT1", b"\x80\x02\x82\x01.", &["refused", "EXT1"]),
            case("PERSID", b"\x80\x02Px\n.", &["refused", "PERSID"]),
        ]);
    }

    #[test]
    fn broken_pickles() {
        let cut = sound();
        let mut flipped = sound();
        let action = flipped.windows(6).position(|word| word == b"action").unwrap();
        flipped[action] ^= 0x02;
        let deep = 1_000_000;
        let nested = [vec![b']'; deep], vec![b'a'; deep - 1]].concat();
        let event = [dict(&alloc()), b"\x94".to_vec()].concat();
        check(vec![
            case(
                "cut in the middle",
                &cut[..cut.len() / 2],
                &["the pickle cannot be read", "the end"],
            ),
            case(
                "cut before STOP",
                &cut[..cut.len() - 1],
                &["one more byte", "the end of the file"],
            ),
            case("only a header", b"\x80\x04", &["byte 2", "one more byte"]),
            case("a bit flipped in a key", flipped, &["device_traces[0]", "a list of events"]),
            case("a protocol to come", b"\x80\x09}.", &["a pickle protocol up to 5", "protocol 9"]),
            case("no such opcode", b"\x80\x04\xfe.", &["byte 2", "a pickle opcode", "0xfe"]),
            case("a million deep", pickle(&nested), &["the top level is a list"]),
            case(
                "a list that contains itself",
                b"\x80\x04]\x94h\x00a.",
                &["the top level is a list"],
            ),
            case("an empty stack", b"\x80\x04.", &["a value", "none on the stack"]),
            case("no mark", b"\x80\x04]e.", &["a mark"]),
            case("a key without a value", b"\x80\x04}(K\x01u.", &["a key without one"]),
            case("append to a number", b"\x80\x04K\x01K\x02a.", &["a list to append to"]),
            case("items into a list", b"\x80\x04]K\x01K\x02s.", &["a dict to put items into"]),
            case("a memo entry never written", b"\x80\x04h\x07.", &["byte 2", "number 7"]),
            case("a memo entry far away", b"\x80\x04j\xff\xff\xff\xff.", &["number 4294967295"]),
            case("a number that is none", b"\x80\x02Ix\n.", &["a number"]),
            case("a set", b"\x80\x04\x8f.", &["the plain data of a snapshot", "a set"]),
            case("a buffer outside of the file", b"\x80\x05\x97.", &["a buffer kept outside"]),
            case(
                "an event named again",
                snapshot(b"]", &list(&[list(&[event, b"eh\x00(h\x00".to_vec()])])),
                &["still open", "already read as an event"],
            ),
            case(
                "a list of events used twice",
                snapshot(b"]", &list(&[list(&[dict(&alloc())]), b"2".to_vec()])),
                &["`device_traces[1]` is a list that was used before"],
            ),
            case(
                "2000 devices",
                snapshot(b"]", &list(&vec![b"]".to_vec(); 2000])),
                &["2000 devices", "at most 1024"],
            ),
        ]);
    }

    /// One table of cases, long because each case is a line or two.
    #[test]
    fn pickles_that_are_not_snapshots() {
        let block = |items: &[(&str, &[u8])]| {
            let blocks = list(&[dict(items)]);
            with_segment(&[("address", b"K\x01"), ("total_size", b"K\x02"), ("blocks", &blocks)])
        };
        check(vec![
            case("a number", pickle(b"K\x05"), &["the top level is an int, expected a dict"]),
            case(
                "no device_traces",
                pickle(&dict(&[("segments", b"]")])),
                &["has no `device_traces`"],
            ),
            case("no segments", pickle(&dict(&[("device_traces", b"]")])), &["has no `segments`"]),
            case(
                "segments is a str",
                snapshot(&text("x"), b"]"),
                &["`segments`", "a str", "a list"],
            ),
            case("a trace is a number", snapshot(b"]", &list(&[b"K\x01".to_vec()])), &["an int"]),
            case(
                "a trace of numbers",
                snapshot(b"]", b"](](K\x01ee"),
                &["a list of something else"],
            ),
            case(
                "events as tuples",
                snapshot(b"]", b"](](\x8c\x05alloc\x4b\x01\x86ee"),
                &["`device_traces[0]`", "a list of events"],
            ),
            case(
                "a number among events",
                snapshot(b"]", &list(&[list(&[dict(&alloc()), b"K\x01".to_vec()])])),
                &["a dict with an `action`", "an int among events"],
            ),
            case("action is a number", with_event(&[("action", b"K\x01")]), &["`action`", "a str"]),
            case("alloc without addr", with_event(&alloc()[..1]), &["`alloc` has no `addr`"]),
            case("alloc without size", with_event(&alloc()[..2]), &["`alloc` has no `size`"]),
            case("a negative size", alloc_with("size", b"J\xff\xff\xff\xff"), &["a negative int"]),
            case(
                "a size of NaN",
                alloc_with("size", b"G\x7f\xf8\0\0\0\0\0\0"),
                &["`size`", "a float"],
            ),
            case(
                "a size of 80 bits",
                alloc_with("size", b"\x8a\x0a\0\0\0\0\0\0\0\0\0\x01"),
                &["64 bits"],
            ),
            case("addr is a str", alloc_with("addr", b"\x8c\x010"), &["`addr`", "a str"]),
            case("stream is None", alloc_with("stream", b"N"), &["`stream`", "None"]),
            case("time_us is a list", alloc_with("time_us", b"]"), &["`time_us`", "a list"]),
            case(
                "pool_id is a number",
                alloc_with("pool_id", b"K\x01"),
                &["`pool_id`", "two ints"],
            ),
            case("frames is a number", alloc_with("frames", b"K\x01"), &["`frames` is an int"]),
            case("a frame is a number", alloc_with("frames", b"](K\x01e"), &["a frame is an int"]),
            case("a segment is a list", snapshot(b"](]e", b"]"), &["`segments[0]` is a list"]),
            case(
                "a segment without address",
                with_segment(&[]),
                &["`segments[0]` has no `address`"],
            ),
            case(
                "a segment of no type",
                with_segment(&[
                    ("address", b"K\x01"),
                    ("total_size", b"K\x02"),
                    ("segment_type", b"\x8c\x01x"),
                ]),
                &["`segment_type`", "`small` or `large`"],
            ),
            case("a block without size", block(&[]), &["`segments[0].blocks[0]` has no `size`"]),
            case(
                "a block of no state",
                block(&[("size", b"K\x01"), ("state", b"\x8c\x04lost")]),
                &["`state`", "`active_allocated`"],
            ),
            case(
                "settings is a list",
                {
                    let items: [(&str, &[u8]); 3] =
                        [("segments", b"]"), ("device_traces", b"]"), ("allocator_settings", b"]")];
                    pickle(&dict(&items))
                },
                &["`allocator_settings` is a list"],
            ),
        ]);
    }

    #[test]
    fn broken_json() {
        let event = |event: &str| format!(r#"{{"segments": [], "device_traces": [[{event}]]}}"#);
        let deep = "[".repeat(1_000_000) + &"]".repeat(1_000_000);
        let half_deep = "{\"a\":".repeat(1_000_000);
        check(vec![
            case("cut", r#"{"segments": ["#, &["the JSON cannot be read", "byte 14", "the end"]),
            case("cut in a string", r#"{"segm"#, &["byte 6", "its closing quote"]),
            case("a comma too many", r#"{"segments": [1,]}"#, &["byte 16", "a value", "`]`"]),
            case("a comma too few", r#"{"segments": [] "x": 1}"#, &["a comma or `}`"]),
            case("no colon", r#"{"segments" []}"#, &["byte 12", "a colon"]),
            case("single quotes", "{'segments': []}", &["byte 1", "a key in quotes"]),
            case("the wrong end", r#"{"segments": [}}"#, &["byte 14", "a value"]),
            case(
                "something behind the end",
                r#"{"segments": []} {}"#,
                &["byte 17", "the end of the file"],
            ),
            case("an unknown escape", r#"{"\q": 1}"#, &["an escape that JSON knows", "`q`"]),
            case("a short code point", r#"{"\u12": 1}"#, &["four hexadecimal digits"]),
            case("a line end in a string", "{\"seg\nments\": 1}", &["byte 5", "0x0a"]),
            case("a leading zero", r#"{"segments": 01}"#, &["byte 13", "a number", "`01`"]),
            case("an unknown word", r#"{"segments": nil}"#, &["null", "`i`"]),
            case("a comment", "{ // no\n}", &["a key in quotes or `}`", "`/`"]),
            case("a million deep", deep, &["the top level is a list"]),
            case("a million deep, cut", half_deep, &["a value", "the end of the file"]),
            case("a list", "[]", &["the top level is a list, expected a dict"]),
            case("another object", r#"{"a": 1}"#, &["the top level has no `segments`"]),
            case(
                "size as text",
                event(r#"{"action": "alloc", "addr": 1, "size": "2"}"#),
                &["`size`", "a str"],
            ),
            case(
                "a size of NaN",
                event(r#"{"action": "alloc", "addr": 1, "size": NaN}"#),
                &["`size`", "a float"],
            ),
            case(
                "a size of 1e400",
                event(r#"{"action": "alloc", "addr": 1, "size": 1e400}"#),
                &["a float"],
            ),
            case(
                "a negative size",
                event(r#"{"action": "alloc", "addr": 1, "size": -2}"#),
                &["a negative int"],
            ),
            case(
                "a huge size",
                event(r#"{"action": "alloc", "addr": 1, "size": 99999999999999999999}"#),
                &["64 bits"],
            ),
            case(
                "a pool of three",
                event(r#"{"action": "alloc", "pool_id": [1, 2, 3]}"#),
                &["`pool_id`", "two ints"],
            ),
            case(
                "a null among events",
                event(r#"{"action": "alloc", "addr": 1, "size": 2}, null"#),
                &["among events"],
            ),
        ]);
    }

    #[test]
    fn broken_cushion_traces() {
        let own = |rest: &[u8]| [b"CUSHION\x01\x00", rest].concat();
        let absurd = own(b"A\0T\xff\xff\xff\xff\x7f");
        check(vec![
            case("only its magic", "CUSHION", &["the Cushion trace cannot be read", "byte 7"]),
            case("no such origin", b"CUSHION\x01\x09A", &["byte 8", "1 for those of RMM", "9"]),
            case("cut", own(b"A\0T"), &["the Cushion trace", "one more byte"]),
            case("another part", own(b"B"), &["byte 9", "the part `A`", "0x42"]),
            case("34 billion texts", absurd, &["the Cushion trace", "the end of the file"]),
            case("a stack that is not there", own(b"A\0T\0F\0S\x01\0\x01"), &["one of 0 frames"]),
        ]);
    }

    #[test]
    fn broken_rmm_logs() {
        let log = |row: &str| format!("Thread,Time,Action,Pointer,Size,Stream\n{row}\n");
        check(vec![
            case(
                "too few cells",
                log("1,10:00:00:000001,allocate,0x10"),
                &["line 2", "6 cells", "4"],
            ),
            case("too many cells", log("1,10:00:00:000001,free,0x10,1,0,9"), &["6 cells", "7"]),
            case(
                "an unknown action",
                log("1,10:00:00:000001,realloc,0x10,1,0"),
                &["column 19", "`realloc`"],
            ),
            case(
                "an address that is none",
                log("1,10:00:00:000001,free,zz,1,0"),
                &["an address", "`zz`"],
            ),
            case(
                "an address of 68 bits",
                log("1,10:00:00:000001,free,0x11111111111111111,1,0"),
                &["64 bits"],
            ),
            case("a negative size", log("1,10:00:00:000001,free,0x10,-1,0"), &["a size", "`-1`"]),
            case(
                "a size with a unit",
                log("1,10:00:00:000001,free,0x10,1KB,0"),
                &["a size", "`1KB`"],
            ),
            case("no size", log("1,10:00:00:000001,free,0x10,,0"), &["a size", "an empty cell"]),
            case(
                "a stream that is none",
                log("1,10:00:00:000001,free,0x10,1,main"),
                &["a stream", "`main`"],
            ),
            case(
                "a time that is none",
                log("1,noon,free,0x10,1,0"),
                &["column 3", "a time", "`noon`"],
            ),
            case("an open quote", log("1,\"10:00,free,0x10,1,0"), &["a closing quote"]),
            case(
                "two logs in one",
                log("Thread,Time,Action,Pointer,Size,Stream"),
                &["several logs in one"],
            ),
            case(
                "cut in a row",
                "Thread,Time,Action,Pointer,Size,Stream\n1,10:00",
                &["line 2", "6 cells"],
            ),
        ]);
    }
}
