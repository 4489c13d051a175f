//! The syntax of a conf string: `key:value,key:value`, where a value may be a list in brackets.
//!
//! This file splits text into pairs; it does not know the keys. Like PyTorch, it removes all white
//! space. A missing `:` or `,`, an empty key or value, and unbalanced brackets are errors; PyTorch
//! ignores most of them.

use super::OptionsError;

/// One `key:value` of a conf string, without white space; a list keeps its brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) key: String,
    pub(super) value: String,
}

/// Splits a conf string into its pairs, in the order written.
pub(super) fn pairs(conf: &str) -> Result<Vec<Pair>, OptionsError> {
    let text: String = conf.chars().filter(|c| !is_space(*c)).collect();
    let mut items = items(&text)?;
    // The text after a trailing comma, and an empty string, are not items.
    if items.last().is_some_and(|item| item.is_empty()) {
        items.pop();
    }
    items.into_iter().map(pair).collect()
}

/// Returns whether C's `isspace` is true: for Rust's ASCII white space and the vertical tab.
fn is_space(c: char) -> bool {
    c.is_ascii_whitespace() || c == '\u{b}'
}

/// Splits the text at the commas outside brackets.
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

/// Returns the length of the value at the beginning of the text: a whole list, or everything up to
/// the next character that a plain value cannot contain.
fn value_len(text: &str) -> usize {
    if text.starts_with('[') {
        text.find(']').map_or(text.len(), |at| at + 1)
    } else {
        text.find([':', '[', ']']).unwrap_or(text.len())
    }
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
    fn empty_text_and_a_trailing_comma_are_accepted() {
        assert_eq!(ok(""), []);
        assert_eq!(ok(" \t\n\u{b}\u{c}\r"), []);
        assert_eq!(ok("a:1,"), owned(&[("a", "1")]));
        assert_eq!(ok("a:[1] , "), owned(&[("a", "[1]")]));
    }

    #[test]
    fn white_space_is_removed_everywhere() {
        assert_eq!(ok(" a : T rue ,\n b:[ 1 : 2 ]"), owned(&[("a", "True"), ("b", "[1:2]")]));
    }

    #[test]
    fn each_syntax_error_is_named() {
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
}
