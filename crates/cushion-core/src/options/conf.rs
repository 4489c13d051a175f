//! The syntax of a conf string: `key:value,key:value`, where a value may be a list in brackets.
//!
//! This file reads text, and knows nothing of what the keys mean. White space is dropped wherever
//! it stands, as PyTorch does; a missing `:` or `,`, an empty key or value, and brackets that do
//! not pair up are errors, where PyTorch lets most of them pass.

use super::OptionsError;

/// One `key:value` of a conf string, white space removed; a list keeps its brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) key: String,
    pub(super) value: String,
}

/// Splits a conf string into its pairs, in the order written.
pub(super) fn pairs(conf: &str) -> Result<Vec<Pair>, OptionsError> {
    let text: String = conf.chars().filter(|c| !is_space(*c)).collect();
    let mut items = items(&text)?;
    // What follows a trailing comma (and the whole of an empty string) is not an item.
    if items.last().is_some_and(|item| item.is_empty()) {
        items.pop();
    }
    items.into_iter().map(pair).collect()
}

/// White space as C's `isspace` has it: Rust's ASCII set and the vertical tab.
fn is_space(c: char) -> bool {
    c.is_ascii_whitespace() || c == '\u{b}'
}

/// The stretches between commas that stand outside brackets.
fn items(text: &str) -> Result<Vec<&str>, OptionsError> {
    let unbalanced = || OptionsError::UnbalancedBrackets { text: text.to_owned() };
    let mut items = Vec::new();
    let mut start = 0;
    let mut in_list = false;
    for (at, c) in text.char_indices() {
        match c {
            '[' if in_list => return Err(unbalanced()),
            '[' => in_list = true,
            ']' if !in_list => return Err(unbalanced()),
            ']' => in_list = false,
            ',' if !in_list => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if in_list {
        return Err(unbalanced());
    }
    items.push(&text[start..]);
    Ok(items)
}

fn pair(item: &str) -> Result<Pair, OptionsError> {
    if item.is_empty() {
        return Err(OptionsError::EmptyItem);
    }
    let (key, value) = match item.split_once(':') {
        Some((key, value)) if !key.contains(['[', ']']) => (key, value),
        _ => return Err(OptionsError::MissingColon { text: item.to_owned() }),
    };
    if key.is_empty() {
        return Err(OptionsError::EmptyKey { value: value.to_owned() });
    }
    let (value, rest) = value.split_at(value_len(value));
    if value.is_empty() {
        return Err(OptionsError::EmptyValue { key: key.to_owned() });
    }
    if !rest.is_empty() {
        return Err(OptionsError::MissingComma {
            key: key.to_owned(),
            value: value.to_owned(),
            found: rest.to_owned(),
        });
    }
    Ok(Pair { key: key.to_owned(), value: value.to_owned() })
}

/// How much of the text belongs to the value it begins with: a whole list, or all up to the next
/// mark that cannot be part of a plain value.
fn value_len(text: &str) -> usize {
    if text.starts_with('[') {
        text.find(']').map_or(text.len(), |at| at + 1)
    } else {
        text.find([':', '[', ']']).unwrap_or(text.len())
    }
}

/// A whole number: digits alone, without the sign that `u64::from_str` would take.
pub(super) fn whole(value: &str) -> Result<u64, String> {
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("`{value}` is not a whole number"));
    }
    value.parse().map_err(|_| format!("`{value}` does not fit in 64 bits"))
}

pub(super) fn number(value: &str) -> Result<f64, String> {
    value.parse().map_err(|_| "it is not a number".to_owned())
}

pub(super) fn boolean(value: &str) -> Result<bool, String> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err("it is not a truth value".to_owned()),
    }
}

pub(super) fn boolean_text(value: bool) -> String {
    if value { "True" } else { "False" }.to_owned()
}

pub(super) fn power_of_two(value: &str) -> Result<u64, String> {
    let number = whole(value)?;
    if number.is_power_of_two() {
        Ok(number)
    } else {
        Err(format!("`{value}` is not a power of two"))
    }
}

/// The least number of bytes to insert, delete or replace to turn `a` into `b` (Levenshtein).
pub(super) fn edits(a: &[u8], b: &[u8]) -> usize {
    // `row[j]` is the distance from the part of `a` read so far to the first `j` bytes of `b`.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(conf: &str) -> Vec<(String, String)> {
        pairs(conf).unwrap().into_iter().map(|p| (p.key, p.value)).collect()
    }

    fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn pairs_and_lists_are_split() {
        assert_eq!(ok("a:1"), owned(&[("a", "1")]));
        assert_eq!(ok("a:1,b:x"), owned(&[("a", "1"), ("b", "x")]));
        assert_eq!(ok("a:[1:2,>:3],b:x"), owned(&[("a", "[1:2,>:3]"), ("b", "x")]));
        assert_eq!(ok("a:[],a:[]"), owned(&[("a", "[]"), ("a", "[]")]));
    }

    #[test]
    fn empty_text_and_trailing_comma_are_fine() {
        assert_eq!(ok(""), []);
        assert_eq!(ok(" \t\n\u{b}\u{c}\r"), []);
        assert_eq!(ok("a:1,"), owned(&[("a", "1")]));
        assert_eq!(ok("a:[1] , "), owned(&[("a", "[1]")]));
    }

    #[test]
    fn white_space_is_dropped_everywhere() {
        assert_eq!(ok(" a : T rue ,\n b:[ 1 : 2 ]"), owned(&[("a", "True"), ("b", "[1:2]")]));
    }

    #[test]
    fn each_slip_has_its_error() {
        let colon = |text: &str| OptionsError::MissingColon { text: text.to_owned() };
        let comma = |key: &str, value: &str, found: &str| OptionsError::MissingComma {
            key: key.to_owned(),
            value: value.to_owned(),
            found: found.to_owned(),
        };
        let brackets = |text: &str| OptionsError::UnbalancedBrackets { text: text.to_owned() };
        let cases = [
            ("a", colon("a")),
            ("a 1", colon("a1")),
            ("a:1,b", colon("b")),
            ("a[1:2]", colon("a[1:2]")),
            ("[a:1]", colon("[a:1]")),
            ("a:1:2", comma("a", "1", ":2")),
            ("a:1[2]", comma("a", "1", "[2]")),
            ("a:[1]b:2", comma("a", "[1]", "b:2")),
            ("a:[1][2]", comma("a", "[1]", "[2]")),
            ("a:[1", brackets("a:[1")),
            ("a:1]", brackets("a:1]")),
            ("a:[[1]]", brackets("a:[[1]]")),
            ("a:]1[", brackets("a:]1[")),
            (":1", OptionsError::EmptyKey { value: "1".to_owned() }),
            (":", OptionsError::EmptyKey { value: String::new() }),
            ("a:", OptionsError::EmptyValue { key: "a".to_owned() }),
            ("a::1", OptionsError::EmptyValue { key: "a".to_owned() }),
            ("a:,b:1", OptionsError::EmptyValue { key: "a".to_owned() }),
            (",", OptionsError::EmptyItem),
            (",a:1", OptionsError::EmptyItem),
            ("a:1,,", OptionsError::EmptyItem),
            ("a:1,,b:2", OptionsError::EmptyItem),
        ];
        for (conf, error) in cases {
            assert_eq!(pairs(conf), Err(error), "{conf}");
        }
    }

    #[test]
    fn edits_are_counted() {
        let cases = [("", "", 0), ("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3)];
        for (a, b, distance) in cases {
            assert_eq!(edits(a.as_bytes(), b.as_bytes()), distance);
            assert_eq!(edits(b.as_bytes(), a.as_bytes()), distance);
        }
    }

    #[test]
    fn plain_values() {
        assert_eq!(whole("0"), Ok(0));
        assert_eq!(whole("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "+1", "-1", "1.0", "0x10", "１", "18446744073709551616"] {
            assert!(whole(text).is_err(), "{text}");
        }
        assert_eq!(power_of_two("1"), Ok(1));
        assert_eq!(power_of_two("9223372036854775808"), Ok(1 << 63));
        assert!(power_of_two("0").is_err() && power_of_two("6").is_err());
        assert_eq!(number("1e-2"), Ok(0.01));
        assert!(number("").is_err() && number("0,1").is_err());
        assert_eq!((boolean("True"), boolean("False")), (Ok(true), Ok(false)));
        assert!(boolean("true").is_err());
    }
}
