//! A short, repeatable run of the fuzz targets: every file of their corpus unchanged, then damaged
//! in many ways. `make fuzz` runs the targets for any length of time.

#[path = "../../../fuzz/bodies.rs"]
mod bodies;

#[cfg(test)]
mod tests {
    use cushion_core::random::Random;
    use std::fs;
    use std::panic::catch_unwind;
    use std::path::PathBuf;

    use super::bodies;

    /// The number of damaged inputs per target.
    const INPUTS: u64 = 20_000;

    fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus"));
        let mut files: Vec<_> = fs::read_dir(folder.join(target))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.display().to_string(), fs::read(&path).unwrap()))
            .collect();
        files.sort();
        assert!(!files.is_empty(), "no corpus for {target}");
        files
    }

    /// A deterministic random source, so that a failure can be repeated.
    struct Dice(Random);

    impl Dice {
        fn roll(&mut self, sides: usize) -> usize {
            usize::try_from(self.0.next() % (sides.max(1) as u64)).unwrap()
        }

        fn byte(&mut self) -> u8 {
            u8::try_from(self.roll(256)).unwrap()
        }

        /// Damages bytes in one of several ways. `other` is another file of the corpus.
        fn damage(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
            let at = self.roll(bytes.len());
            let len = 1 + self.roll(16);
            let end = (at + len).min(bytes.len());
            match self.roll(9) {
                0 if at < bytes.len() => bytes[at] = self.byte(),
                1 if at < bytes.len() => bytes[at] ^= 1 << self.roll(8),
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..end)),
                4 => {
                    let copy = bytes[at..end].to_vec();
                    let to = self.roll(bytes.len());
                    bytes.splice(to..to, copy);
                }
                5 => {
                    let byte = self.byte();
                    bytes.splice(at..at, vec![byte; len]);
                }
                6 => {
                    let from = self.roll(other.len());
                    let upto = (from + 8 * len).min(other.len());
                    bytes.splice(at..at, other[from..upto].iter().copied());
                }
                7 => bytes[at..end].fill([0, 0x7f, 0x80, 0xff][self.roll(4)]),
                // A repeated byte, enough for deep nesting or a length that overflows.
                _ => {
                    let byte = bytes.get(at).copied().unwrap_or(b'[');
                    bytes.splice(at..at, vec![byte; 20 * len]);
                }
            }
        }
    }

    fn run(target: &str) {
        let files = corpus(target);
        for (name, bytes) in &files {
            assert!(catch_unwind(|| bodies::run(target, bytes)).is_ok(), "{name}");
        }
        for input in 0..INPUTS {
            let mut dice = Dice(Random(input));
            let mut bytes = files[dice.roll(files.len())].1.clone();
            let other = &files[dice.roll(files.len())].1;
            for _ in 0..=dice.roll(6) {
                dice.damage(&mut bytes, other);
            }
            assert!(
                catch_unwind(|| bodies::run(target, &bytes)).is_ok(),
                "{target}, input {input}: {}",
                bytes.escape_ascii()
            );
        }
    }

    #[test]
    fn every_target_is_known() {
        let names = bodies::TARGETS;
        assert_eq!(names, ["pickle", "json", "rmm", "own", "open", "receipts"]);
    }

    #[test]
    fn pickle() {
        run("pickle");
    }

    #[test]
    fn json() {
        run("json");
    }

    #[test]
    fn rmm() {
        run("rmm");
    }

    #[test]
    fn own() {
        run("own");
    }

    #[test]
    fn open() {
        run("open");
    }

    #[test]
    fn receipts() {
        run("receipts");
    }
}
