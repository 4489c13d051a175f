//! A short, deterministic run of the engine's fuzz target: every file of the corpus, then mutations
//! of these files. `make fuzz TARGET=engine` runs the target for as long as needed.

#[path = "../../../../fuzz/programs.rs"]
mod programs;

#[cfg(test)]
mod tests {
    use cushion_core::random::Random;
    use cushion_core::testing::Program;
    use std::fs;
    use std::panic::catch_unwind;
    use std::path::PathBuf;

    use super::programs;

    /// Number of mutated inputs.
    const INPUTS: u64 = 2000;

    fn corpus() -> Vec<(String, Vec<u8>)> {
        let folder =
            PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/engine"));
        let mut files: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.display().to_string(), fs::read(&path).unwrap()))
            .collect();
        files.sort();
        assert!(!files.is_empty(), "the corpus is empty");
        files
    }

    fn roll(random: &mut Random, sides: usize) -> usize {
        usize::try_from(random.next() % sides.max(1) as u64).unwrap()
    }

    /// Changes, removes, repeats or inserts some bytes. `other` is another file of the corpus.
    fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = roll(random, bytes.len());
        let end = (at + 1 + roll(random, 24)).min(bytes.len());
        match roll(random, 6) {
            0 | 1 if at < bytes.len() => bytes[at] = random.next().to_le_bytes()[0],
            2 => drop(bytes.drain(at..end)),
            3 => {
                let repeated = bytes[at..end].repeat(1 + roll(random, 8));
                let to = roll(random, bytes.len());
                bytes.splice(to..to, repeated);
            }
            4 => {
                let from = roll(random, other.len());
                let upto = (from + 8 + roll(random, 64)).min(other.len());
                bytes.splice(at..at, other[from..upto].iter().copied());
            }
            _ => drop(bytes.splice(at..at, random.next().to_le_bytes())),
        }
    }

    #[test]
    fn corpus_and_mutations_run_without_failure() {
        let files = corpus();
        for (name, bytes) in &files {
            assert!(catch_unwind(|| programs::run(bytes)).is_ok(), "{name}");
        }
        for input in 0..INPUTS {
            let mut random = Random(input);
            let mut bytes = files[roll(&mut random, files.len())].1.clone();
            let other = &files[roll(&mut random, files.len())].1;
            for _ in 0..=roll(&mut random, 6) {
                mutate(&mut random, &mut bytes, other);
            }
            let program = Program::read(&bytes);
            if program.failure().is_some() {
                let smallest = program.shrunk();
                panic!("input {input}: {}\n{smallest:#?}", smallest.failure().unwrap_or_default());
            }
        }
    }

    /// The same bytes give the same program. Every byte string, even one that is too short or too
    /// long, gives a program.
    #[test]
    fn every_byte_string_is_a_program() {
        assert!(Program::read(&[]).actions.is_empty());
        assert!(Program::read(&[0; 5000]).actions.len() > 100);
        let bytes = Program::bytes(7);
        assert_eq!(Program::read(&bytes), Program::random(7));
        (0..bytes.len().min(100)).for_each(|end| drop(Program::read(&bytes[..end])));
    }
}
